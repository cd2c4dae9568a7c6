"""mkdocs: what a page links to outside of docs/ becomes a page, and roles of Sphinx in docstrings become plain code."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)")
_TREE = re.compile(r"<p>([^<]*[├└]──[^<]*)</p>")
_LANGUAGES = {".mjs": "js", ".py": "python", ".sh": "sh", ".json": "json", ".txt": "text", ".toml": "toml"}


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each file and folder of the repository that a page links to."""
    waiting = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    while waiting:
        uri, text = waiting.pop()
        for target in _targets(text, uri):
            page = _page_of(target)
            if page.startswith("source/") and files.get_file_from_path(page) is None:
                made = File.generated(config, page, content=_text_of(ROOT / target))
                files.append(made)
                waiting.append((page, made.content_string))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links between files of the repository lead to their pages."""
    here = page.file.src_uri

    def link(found: re.Match[str]) -> str:
        target = _repository_path(found[1], here)
        if not (ROOT / target).exists():
            return found[0]  # code that looks like a link, or a broken link, which mkdocs reports
        return f"]({posixpath.relpath(_page_of(target), posixpath.dirname(here) or '.')}{found[2] or ''})"

    return _LINK.sub(link, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings say :class:`Name`, and have trees of errors without the indentation of code."""
    return _TREE.sub(r"<pre><code>\1</code></pre>", _ROLE.sub("", html))


def _repository_path(target: str, uri: str) -> str:
    """The path in the repository of what the page ``uri`` links to."""
    folder = posixpath.dirname(uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}")
    return posixpath.normpath(posixpath.join(folder, target))


def _page_of(path: str) -> str:
    """The page, or the file in docs/, that shows ``path`` of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"source/{path}" if path.endswith(".md") else f"source/{path}.md"


def _targets(text: str, uri: str) -> list[str]:
    paths = [_repository_path(target, uri) for target, _ in _LINK.findall(text)]
    return [path for path in paths if (ROOT / path).exists()]


def _text_of(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    name = path.relative_to(ROOT).as_posix()
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        parts = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
        return "\n\n".join(_code(text, ".py") if is_code else text for text, is_code in parts)
    inside = sorted(path.iterdir()) if path.is_dir() else [path]
    blocks = [
        f"## {file.name}\n\n{_code(file.read_text(encoding='utf-8'), file.suffix)}"
        for file in inside
        if file.suffix in _LANGUAGES
    ]
    folders = [each.name for each in inside if each.is_dir() and not each.name.startswith(("_", "node_modules"))]
    links = [f"- [{folder}]({path.name}/{folder})" for folder in folders]
    return "\n\n".join([f"# {name}", "\n".join(links), *blocks])


def _code(text: str, suffix: str) -> str:
    return f"```` {_LANGUAGES.get(suffix, 'text')}\n{text.rstrip()}\n````"
