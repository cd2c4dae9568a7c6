"""Nothing that others wrote steers a terminal: each text of ours goes there through one of two functions."""

from __future__ import annotations

import ast
import io
import logging
import sys
from pathlib import Path

import pytest
from rich.console import Console

from groundwire.tools.errors import UserError, exit_on_user_error
from groundwire.tools.secrets import say, terminal_text
from groundwire.tools.terminal import format_table, progress, show_line, spinner
from groundwire.train.cli.progress import ProgressDisplay, show_summary, verdict_lines
from groundwire.train.evaluation.verdict import AgentVerdict

ROOT = Path(__file__).parents[2]
STEERING = "\x1b[2J\x1b]0;title\x07 \x9b31m \r\b \u202e\u2066 \x7f\0 [red]x[/red] [/nothing] :bomb:"
VISIBLE = r"\x1b[2J\x1b]0;title\x07 \x9b31m \r\x08 \u202e\u2066 \x7f\x00 [red]x[/red] [/nothing] :bomb:"
_ELSEWHERE = {
    "adapters/agents/process/child.py": "the runner reads it",
    "tools/secrets.py": "say",
    "tools/terminal.py": "show_line and spinner",
    "train/gepa/trainer.py": "a file",
    "train/rollouts/agent_python.py": "the trainer reads it",
}


def test_all_output_goes_through_one_place() -> None:
    writers = {"print", "typer.echo", "typer.secho", "click.echo", "rich.print"}
    ends = (".print", ".status", ".stdout.write", ".stderr.write")
    direct = set()
    for folder in ("adapters", "domains", "rewards", "tools", "train"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call):
                    continue
                given = [ast.unparse(value) for value in (node.func, *node.args[:1])]
                if given[0].endswith(ends) or writers & {*given}:
                    direct.add(path.relative_to(ROOT).as_posix())
    assert direct == _ELSEWHERE.keys()


def test_a_text_with_what_steers_a_terminal_is_shown_and_any_other_stays() -> None:
    assert terminal_text(STEERING) == VISIBLE
    others = "a\tb\nc é \u00a0 中文 👩\u200d🚀 \ue000"
    assert terminal_text(others) == others
    assert terminal_text("a\nb", one_line=True) == r"a\nb"


def test_what_a_command_says_logs_and_ends_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a command that has not set up logging
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    say(STEERING)
    say(STEERING, err=True)
    with exit_on_user_error():
        logging.getLogger("groundwire.x").warning("task %s", STEERING + "\n2")
    with pytest.raises(SystemExit), exit_on_user_error():
        raise UserError(STEERING)
    printed = capsys.readouterr()
    assert printed.out == f"{VISIBLE}\n"
    assert printed.err == f"{VISIBLE}\ntask {VISIBLE}\\n2\nerror: {VISIBLE}\n"


def test_lines_bars_and_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    terminal = Console(file=out, width=300, force_terminal=True, color_system=None)
    show_line(terminal, STEERING, "bold")
    monkeypatch.setattr("groundwire.tools.terminal.console", lambda **_: terminal)
    with progress(STEERING, 2) as advance:
        advance(STEERING + "!")
    with spinner(STEERING):
        pass
    shown = out.getvalue()  # a bar itself moves the cursor
    assert "\x1b[2J" not in shown
    assert not set("\x07\x9b\b\u202e\u2066\x7f\0") & set(shown)
    assert shown.count("[red]x[/red] [/nothing] :bomb:") >= 2
    table = format_table(["id"], [[STEERING + "\n2"]], "text")
    assert table.splitlines() == ["id", VISIBLE + r"\n2"]


def test_what_is_shown_of_a_run_and_its_rollouts() -> None:
    out = io.StringIO()
    console = Console(file=out, width=1000)
    display = ProgressDisplay(console, 3)
    display.on_note(STEERING)
    result = {"ci95": [0, 1], "metric_name": STEERING, "accuracy": 0.5, "n": 4}
    display.on_step_end({"step": 1, "wall_time_s": 1, "failures": {STEERING: 1}, "validation": result})
    for line in verdict_lines([], AgentVerdict([STEERING], [STEERING], "")):
        show_line(console, line)
    summary = {"domain": "spider", "untrained": STEERING, "note": STEERING, "validation": {}, "validation_sampled": {}}
    show_summary(console, {**summary, "wall_time_s": 1, "peak_memory_mb": 1, "rollouts": 4}, STEERING)
    assert out.getvalue().count(VISIBLE) >= 8
    assert not set("\x1b\x07\x9b\r\b\u202e\u2066\x7f\0") & set(out.getvalue())
