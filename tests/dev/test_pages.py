"""Pages that users look at can be read: contrast, and no text beside the screen of a phone."""

from __future__ import annotations

from pathlib import Path

import pytest
from dev import pages
from programs import ROOT

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.report.build import build

pytestmark = pytest.mark.skipif(pages.chromium() is None, reason="needs Chromium")


async def test_the_check_finds_pale_text_in_either_scheme_and_what_is_too_wide(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        "<!doctype html><meta name=viewport content='width=device-width'><style>b { color: #999 } "
        "@media (prefers-color-scheme: dark) { b { color: #333 } } div { width: 800px }</style>"
        "<b>pale</b><div>wide</div>"
    )
    problems = await pages.check([(tmp_path / "a.html").as_uri()], tmp_path)
    said = [problem.rpartition("a.html, ")[2] for problem in problems]
    assert said[0] == "1280 px, light: contrast 2.85: b. pale"
    assert [line.split(",")[0] for line in said] == [
        "1280 px",
        "390 px",
        "390 px",
        "390 px",
    ]  # pale on white only
    assert "overflow" in said[-1]
    assert (tmp_path / "a-390-dark.png").is_file()


async def test_a_report_can_be_read_on_a_phone_in_both_schemes(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=resolve("fast", steps=2).to_dict())
    for step in (1, 2):
        figures = {"gradient_share": 0.5, "truncated_share": 0.4, "entropy": 0.3, "kl": 1e-5, "grad_norm": 1.5}
        line = {"step": step, "reward": 0.25, "failures": {"timeout": step}, "tokens_generated": 4_000_000, **figures}
        run.append_metrics({**line, "seconds": {"update": 1.0, "sampling": 2.0}})
    (tmp_path / "report.html").write_text(build(run).html)
    assert await pages.check([(tmp_path / "report.html").as_uri()]) == []


async def test_the_home_page_of_the_documentation_can_be_read() -> None:
    """The site is there after `make docs`."""
    home = ROOT / "build" / "site" / "index.html"
    if not home.is_file():
        pytest.skip("make docs builds it")
    assert await pages.check([home.as_uri()]) == []
