"""Looks at HTML pages as a browser draws them: contrast of the texts, horizontal overflow, screenshots.

``python -m dev.pages FILE_OR_URL… --screenshots FOLDER`` opens each page at 1280 and 390 px, light and dark, in a
Chromium without a window, prints what is wrong, and ends with 1 if there is something. WCAG 2.1 (AA) asks for a
contrast of 4.5 (1.4.3), and for no horizontal scrolling at 320 px (1.4.10); here it is the width of a phone.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

WIDTHS, SCHEMES = (1280, 390), ("light", "dark")
MIN_CONTRAST = 4.5
_START_S = 30.0
_SHOWN = 2600
"""Of a page, in its screenshot, in pixels."""
_DRAW_S = 1.5
"""For its scripts."""
_CHECK = Path(__file__).with_suffix(".js").read_text().replace("LEAST", str(MIN_CONTRAST))


def chromium() -> str | None:
    """The program, None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


async def check(pages: Sequence[str], screenshots: Path | None = None) -> list[str]:
    """What is wrong with the pages, a line for each; ``pages`` are addresses. Needs :func:`chromium`."""
    problems = []
    async with _browser() as send:
        forget = "try { localStorage.clear() } catch { }"  # a site may keep the colours of its first visit
        await send("Page.enable")
        await send("Page.addScriptToEvaluateOnNewDocument", source=forget)
        for page, width, scheme in itertools.product(pages, WIDTHS, SCHEMES):
            size = {"width": width, "height": _SHOWN, "deviceScaleFactor": 1, "mobile": width < 800}
            await send("Emulation.setDeviceMetricsOverride", **size)
            await send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            await send("Page.navigate", url=page)
            for _ in range(int(_START_S / _DRAW_S)):
                await asyncio.sleep(_DRAW_S)
                state = await send("Runtime.evaluate", expression="document.readyState", returnByValue=True)
                if state["result"].get("value") == "complete":
                    break
            result = await send("Runtime.evaluate", expression=_CHECK, returnByValue=True)
            if "value" not in result["result"]:
                raise RuntimeError(f"{page}: {result}")
            problems += [f"{page}, {width} px, {scheme}: {problem}" for problem in result["result"]["value"]]
            if screenshots is not None:
                shot = await send("Page.captureScreenshot")
                name = f"{page.rstrip('/').rpartition('/')[2].removesuffix('.html')}-{width}-{scheme}.png"
                (screenshots / name).write_bytes(base64.b64decode(shot["data"]))
    return problems


@asynccontextmanager
async def _browser() -> AsyncIterator[Any]:
    """A function that sends a command of the DevTools protocol to a page, and returns the answer."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run")
        program = await asyncio.create_subprocess_exec(
            str(chromium()), *options, f"--user-data-dir={folder}", "about:blank", stderr=asyncio.subprocess.PIPE
        )
        try:
            port = await asyncio.wait_for(_port(program), _START_S)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    [page] = [target for target in await answer.json() if target["type"] == "page"]
                async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    numbers: Iterator[int] = itertools.count(1)

                    async def send(method: str, **params: Any) -> dict[str, Any]:
                        await socket.send_json({"id": (number := next(numbers)), "method": method, "params": params})
                        while (answer := await socket.receive_json()).get("id") != number:
                            pass
                        if "error" in answer:
                            raise RuntimeError(f"{method}: {answer['error']}")
                        return answer["result"]

                    yield send
        finally:
            program.terminate()
            await program.communicate()


async def _port(program: asyncio.subprocess.Process) -> str:
    """The port, which the program says on standard error."""
    assert program.stderr is not None
    async for line in program.stderr:
        if found := re.search(rb"ws://127\.0\.0\.1:(\d+)/", line):
            return found[1].decode()
    raise RuntimeError(f"{chromium()} has not started")


def main() -> int:
    """Check the pages that the command names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", help="HTML files, or addresses")
    parser.add_argument("--screenshots", type=Path, help="a folder for screenshots")
    options = parser.parse_args()
    if chromium() is None:
        print("no Chromium here: install the package chromium, or Google Chrome", file=sys.stderr)
        return 2
    if options.screenshots is not None:
        options.screenshots.mkdir(parents=True, exist_ok=True)
    addresses = [page if "://" in page else Path(page).resolve().as_uri() for page in options.pages]
    problems = asyncio.run(check(addresses, options.screenshots))
    print("\n".join(problems or [f"{len(addresses)} pages: nothing is below {MIN_CONTRAST} or too wide"]))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
