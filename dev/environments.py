"""Installs our base beside the packages of applications, and checks that nothing changes: ``make environments``.

For each environment of ``dev/environments.toml``: its packages are installed, our base is installed from a wheel that
is built once, and the list of packages before must be a subset of the one after. The framework must import before and
after. An environment stays in the folder, for ``make wild``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "install.md"
_SAMPLE = ("camel", "langchain", "openai-agents", "old")
_MOST_PACKAGES = 35  # of the base in an empty environment: each further one may move a package of an application
_EMPTY = "(nothing)"
_OURS = "import groundwire.adapters.agents.redirection, groundwire.adapters.tracing.proxy, groundwire.train.runner"
_START, _END = "<!-- environments -->\n", "<!-- end of environments -->"


@dataclass(frozen=True)
class Result:
    """What the installation of the base did to one environment."""

    name: str
    before: int
    after: int
    changed: list[str]
    broken: str = ""
    """What does not import, and when; empty if all does."""

    def row(self) -> str:
        """The row of the table."""
        outcome = self.broken or "yes"
        return f"| {self.name} | {self.before} | {self.after} | {', '.join(self.changed) or '0'} | {outcome} |"


def main() -> int:
    """Check the environments two at a time; the exit status is the number of those that changed or broke."""
    known = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    parser = argparse.ArgumentParser(prog="make environments", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--sample", action="store_true", help=f"only {', '.join(_SAMPLE)}, as in CI")
    parser.add_argument("--folder", type=Path, default=ROOT / ".environments", help="where they are made")
    parser.add_argument("--pip", action="store_true", help="install the base with pip; uv is faster")
    parser.add_argument("--write", action="store_true", help=f"write the result into {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - known.keys()):
        parser.error(f"no environment {unknown[0]!r}; known: {', '.join(known)}")
    names = options.names or (list(_SAMPLE) if options.sample else list(known))
    started, uv, wheel = time.monotonic(), _uv(), _wheel()

    def check(name: str) -> Result:
        environment = _Environment(uv, options.folder / name, with_pip=options.pip)
        if name == _EMPTY:
            return _check_base(environment, wheel)
        return _check(name, known[name], environment, wheel)

    with ThreadPoolExecutor(2) as threads:
        results = []
        for result in threads.map(check, [_EMPTY, *names]):
            results.append(result)
            print(result.row(), flush=True)
    failed = [result for result in results if result.changed or result.broken]
    same = [result.name for result in results if result not in failed]
    print(f"{len(same)} of {len(results)} environments are as they were, {time.monotonic() - started:.0f} s")
    if options.write:
        text = f"No package changed, and all imports work, in {len(same)}: {', '.join(same)}."
        if failed:
            head = "\n\n| environment | packages before | after | changed | imports |\n|---|---|---|---|---|\n"
            text += head + "\n".join(result.row() for result in failed)
        write_table(PAGE, _START, _END, text)
    return len(failed)


class _Environment:
    """An empty environment."""

    def __init__(self, uv: str, folder: Path, *, with_pip: bool) -> None:
        self._uv, self._with_pip, self.python = uv, with_pip, str(folder / "bin" / "python")
        seed = ["--seed"] if with_pip else []
        _run(uv, "venv", "--quiet", "--clear", *seed, "--python", sys.executable, str(folder))

    def install(self, *packages: str) -> None:
        """Install ``packages``, in their newest versions."""
        _run(self._uv, "pip", "install", "--quiet", "--python", self.python, *packages)

    def install_base(self, wheel: str) -> None:
        """Install our base as a user does."""
        if self._with_pip:
            _run(self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        else:
            self.install(wheel)

    def packages(self) -> dict[str, str]:
        """The version of each package."""
        lines = _run(self._uv, "pip", "list", "--format", "freeze", "--python", self.python).splitlines()
        return dict(line.split("==", 1) for line in lines)

    def failure(self, statements: str) -> str:
        """The last line of the error of ``statements``; empty if they work."""
        done = subprocess.run(
            [self.python, "-c", statements], check=False, capture_output=True, text=True, env=_clean()
        )
        return done.stderr.strip().rpartition("\n")[2] if done.returncode else ""


def _check(name: str, application: dict[str, Any], environment: _Environment, wheel: str) -> Result:
    environment.install(*application["packages"])
    before = environment.packages()
    broken = [("before", environment.failure(application["imports"]))]
    environment.install_base(wheel)
    after = environment.packages()
    broken += [("after", environment.failure(application["imports"])), ("groundwire", environment.failure(_OURS))]
    changed = [
        f"{package} {version} → {after.get(package)}"
        for package, version in before.items()
        if after.get(package) != version
    ]
    return Result(
        name, len(before), len(after), changed, "; ".join(f"{when}: {error}" for when, error in broken if error)
    )


def _check_base(environment: _Environment, wheel: str) -> Result:
    """The base in an empty environment."""
    environment.install_base(wheel)
    packages = environment.packages().keys() - {"groundwire", "pip"}
    many = f"{len(packages)} packages, more than {_MOST_PACKAGES}" if len(packages) > _MOST_PACKAGES else ""
    return Result(_EMPTY, 0, len(packages) + 1, [], many or environment.failure(_OURS))


def _uv() -> str:
    """The command uv, which is installed if it is missing."""
    beside = Path(sys.executable).parent / "uv"
    if not (uv := shutil.which("uv") or (str(beside) if beside.exists() else "")):
        _run(sys.executable, "-m", "pip", "install", "--quiet", "uv")
    return uv or str(beside)


def _wheel() -> str:
    folder = ROOT / "build" / "environments"
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    return str(next(folder.glob("*.whl")))


def write_table(page: Path, start: str, end: str, table: str) -> None:
    """Replace what is between two marks of a page."""
    head, _, rest = page.read_text().partition(start)
    page.write_text(f"{head}{start}\n{table}\n\n{end}{rest.partition(end)[2]}")


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=_clean())
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
