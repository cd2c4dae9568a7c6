"""``python -m dev.site_check [PAGE.html]...``: looks at the site of ``make docs`` (or at these pages) in Chromium.

At 390 and 1,280 pixels, light and dark, no text may have a contrast below 4.5, and nothing may be wider than the
page: exit code 1.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from html import unescape
from pathlib import Path

_SCRIPT = """
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
function rgba(css) {
  canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1);
  const pixel = canvas.getImageData(0, 0, 1, 1).data; return [pixel[0], pixel[1], pixel[2], pixel[3] / 255];
}
const over = (top, below) => [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3]));
function luminance(color) {
  const [r, g, b] = color.map(v => (v /= 255) <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * r + .7152 * g + .0722 * b;
}
function background(element, view) {
  const layers = [];
  for (; element; element = element.parentElement) layers.push(rgba(view.getComputedStyle(element).backgroundColor));
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
}
function problems(frame, where) {
  const page = frame.contentDocument, view = frame.contentWindow, found = {};
  if (page.documentElement.scrollWidth > frame.clientWidth + 1) found[where + ': wider than the page'] = 1;
  const walk = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const text = walk.currentNode.textContent.trim(), element = walk.currentNode.parentElement;
    const style = view.getComputedStyle(element), box = element.getBoundingClientRect();
    if (!text || !box.width || !box.height || style.visibility == 'hidden' || style.opacity == '0') continue;
    const below = background(element, view), lights = [over(rgba(style.color), below), below].map(luminance);
    const contrast = (Math.max(...lights) + .05) / (Math.min(...lights) + .05);
    if (contrast < 4.5) found[`${where}: contrast ${contrast.toFixed(2)} of "${text.slice(0, 40)}"`] = 1;
  }
  return Object.keys(found);
}
(async () => {
  const all = [];
  for (const page of PAGES) for (const width of [390, 1280]) {
    const frame = document.createElement('iframe');
    frame.width = width; frame.height = 900; frame.src = page;
    await new Promise(done => { frame.onload = done; document.body.append(frame); });
    const still = frame.contentDocument.createElement('style');
    still.textContent = '* { transition: none !important }';
    frame.contentDocument.head.append(still);
    for (const scheme of ['default', 'slate']) {
      frame.contentDocument.body.dataset.mdColorScheme = scheme;
      await new Promise(done => setTimeout(done, 500));
      all.push(...problems(frame, `${page.split('/').pop()}, ${width} px, ${scheme}`));
    }
    frame.remove();
  }
  const result = document.createElement('pre'); result.id = 'result'; result.textContent = JSON.stringify(all);
  document.body.append(result);
})();
"""


def check(pages: list[Path]) -> list[str]:
    """What is wrong, in words."""
    browser = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
    if browser is None:
        sys.exit("no Chromium here: apt-get install chromium-headless-shell")
    addresses = json.dumps([page.resolve().as_uri() for page in pages])
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "check.html"
        page.write_text(f"<body><script>const PAGES = {addresses};{_SCRIPT}</script></body>", encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-web-security", "--window-size=1400,1000"]
        options += [f"--user-data-dir={folder}/profile", f"--virtual-time-budget={len(pages) * 20_000}", "--dump-dom"]
        command = [browser, *options, page.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout  # noqa: S603
    result = re.search(r'<pre id="result">(.*?)</pre>', shown, re.DOTALL)
    if result is None:
        sys.exit("Chromium showed no result")
    found: list[str] = json.loads(unescape(result[1]))
    return found


def main() -> None:
    """Check the pages, and exit."""
    pages = [Path(name) for name in sys.argv[1:]] or sorted(Path("build/site").rglob("*.html"))
    found = check(pages)
    print("\n".join([*found, f"{len(pages)} pages, {len(found)} problems"]))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
