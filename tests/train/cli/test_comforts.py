"""What all commands share: completion, a version, progress bars and colours on terminals only."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from fork_server import Forked
from programs import ROOT, run, run_command

from groundwire.tools.terminal import version
from groundwire.train.cli.app import COMMANDS

MODULES = [module.removesuffix(".__main__") for module, _ in COMMANDS.values() if ":" not in module]
NAMED = [("-m", "train.cli.app", name) for name in COMMANDS]
WITH_SETTINGS = ("look", "train", "run")
SCREEN = 50  # lines
ESCAPE = "\x1b"


def _environment(**more: str) -> dict[str, str]:
    """As a person's shell has it: CI systems have variables that ask for colours in pipes."""
    unwanted = ("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE")
    return {**{k: v for k, v in os.environ.items() if k not in unwanted}, "TERM": "xterm-256color", **more}


def _run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    return run(*command, environment=_environment(**more))


def _on_a_terminal(*command: str, **more: str) -> str:
    """All that a command writes to its terminal."""
    terminal, end = pty.openpty()
    environment = _environment(**more)
    if "--help" in command:  # typer looks for colours while it is imported: nothing is forked
        program = [sys.executable, *command]
        ended = subprocess.Popen(program, cwd=ROOT, env=environment, stdin=end, stdout=end, stderr=end).wait
    else:
        process = Forked(run_command, command, folder=str(ROOT), environment=environment, files=(end, end, end))
        ended = process.wait
    os.close(end)
    written = b""
    try:
        while chunk := os.read(terminal, 65536):
            written += chunk
    except OSError:  # how Linux says that the other end was closed
        pass
    os.close(terminal)
    assert ended(60) == 0, written
    return written.decode()


def _complete(words: str) -> list[str]:
    """What bash is offered for the last of ``words``."""
    asked = {"_GROUNDWIRE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    return _run("-m", "train.cli.app", **asked).stdout.split()


def test_a_shell_completes_commands_and_their_options() -> None:
    assert _complete("groundwire re") == ["report", "replay", "rescore"]
    assert set(_complete("groundwire ")) == set(COMMANDS)
    assert _complete("groundwire evaluate --comp") == ["--compare"]
    assert "--judge-model" in _complete("groundwire run --ju")
    assert "--host" in _complete("groundwire store --")
    assert "--max-rows" in _complete("groundwire mcp-sql --ma")


def test_a_shell_completes_values(tmp_path: Path) -> None:
    for name in ("20260101-a", "20260102-b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").touch()
    (tmp_path / "runs" / "latest").symlink_to("20260102-b")
    runs = ["runs/latest", "runs/20260102-b", "runs/20260101-a"]

    def complete(words: str) -> list[str]:
        asked = {"_GROUNDWIRE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        environment = _environment(PYTHONPATH=str(ROOT / "src"), **asked)
        return run("-m", "groundwire", folder=tmp_path, environment=environment).stdout.split()

    elsewhere = _environment(PYTHONPATH=str(ROOT / "src"))
    assert complete("groundwire why ") == runs == complete("groundwire report runs/")
    none = run("-m", "groundwire", "why", folder=tmp_path / "runs", environment=elsewhere)
    assert "or begin with groundwire train" in none.stderr
    assert complete("groundwire run --resume runs/2026010") == runs[1:]
    assert complete("groundwire train --backend lang") == ["langgraph"]
    assert complete("groundwire train --model s") == ["starter", "smollm2"]
    assert "spider" in complete("groundwire look --domain ")
    assert "spider_exec_match" in complete("groundwire audit --reward sp") + complete("groundwire run --reward sp")
    assert {"fast", "hf"} <= set(complete("groundwire evaluate --config "))


def test_completion_can_be_installed(tmp_path: Path) -> None:
    named = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # the shell is named here
    done = _run("-m", "train.cli.app", "--install-completion", "bash", **named)
    assert done.returncode == 0, done.stderr
    script = (tmp_path / ".bash_completions" / "groundwire.sh").read_text()
    assert "_GROUNDWIRE_COMPLETE=complete_bash" in script
    assert "groundwire.sh" in (tmp_path / ".bashrc").read_text()


@pytest.mark.parametrize("command", [*NAMED, *(("-m", module) for module in MODULES)])
def test_every_command_has_a_version(command: Sequence[str]) -> None:
    done = _run(*command, "--version")
    assert (done.returncode, done.stdout) == (0, f"groundwire {version()}\n"), done.stderr


@pytest.mark.parametrize("command", NAMED)
def test_help_shows_the_whole_name_of_every_option_at_80_columns(command: Sequence[str]) -> None:
    shown = _run(*command, "--help-all" if command[-1] in WITH_SETTINGS else "--help", COLUMNS="80").stdout
    assert "--help" in shown
    assert "…" not in shown


@pytest.mark.parametrize("command", NAMED)
def test_help_fits_two_screens_and_says_what_more_there_is(command: Sequence[str]) -> None:
    shown = _run(*command, "--help", COLUMNS="100").stdout
    assert shown.count("\n") <= 2 * SCREEN
    if command[-1] in WITH_SETTINGS:
        everything = _run(*command, "--help-all", COLUMNS="100").stdout
        assert "--help-all also lists" in shown
        assert "--sampling-budget" not in shown
        assert "--sampling-budget" in everything
        assert "36; fast 44; tuned 44; hf 200" in shown  # the presets' own defaults


def test_the_commands_are_the_modules_that_python_runs() -> None:
    listed = _run("-m", "train.cli.app", "--help").stdout
    assert all(f"│ {name} " in listed for name in COMMANDS)
    for command in ("train.cli.app", "groundwire"):
        assert _run("-m", command, "--version").stdout == f"groundwire {version()}\n"
    here, there = (_run(*command, "why", "no/such/run") for command in (("-m", "train.cli.app"), ("-m", "train.why")))
    assert here.returncode == there.returncode == 2
    done = _run("-m", "train.cli.app", "mcp-sql", "--port", "x")
    assert done.returncode == 2
    assert "Invalid value for '--port'" in done.stderr


STARTS = [("groundwire", "runs"), *((module.partition(":")[0],) for module, _ in COMMANDS.values()), ("train.run",)]


@pytest.mark.parametrize("program", sorted({*STARTS}), ids=" ".join)
def test_a_ctrl_c_while_a_command_is_imported_ends_with_a_word(program: Sequence[str], tmp_path: Path) -> None:
    """It comes in the middle of imports, one of them where Python would print a KeyboardInterrupt and go on."""
    (tmp_path / "sitecustomize.py").write_text(
        "import _signal, os, sys, weakref\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == os.environ['WHERE']:\n"
        "            kept = Finder()\n"
        "            weak = weakref.ref(kept, lambda _: os.kill(os.getpid(), _signal.SIGINT))\n"
        "            del kept\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    path = os.pathsep.join((str(tmp_path), str(ROOT / "src"), str(ROOT)))
    for where in ("groundwire.tools.errors", "typer.core"):
        command = [sys.executable, "-m", *program, "nothing"]
        environment = _environment(PYTHONPATH=path, WHERE=where)
        done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


def test_a_library_leaves_ctrl_c_to_its_application() -> None:
    program = "import groundwire, groundwire.train, signal; print(signal.getsignal(signal.SIGINT).__name__)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True, check=True)
    assert done.stdout == "default_int_handler\n"


def test_an_agent_in_the_working_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("async def answer(question, endpoint): ...")
    # The path as a console script has it.
    program = "import sys; sys.path.remove(''); from groundwire.train.cli.app import app; app()"
    arguments = ("run", "--backend", "custom", "--agent", "mine:answer", "--print-config", "--trainer", "local")
    environment = _environment(PYTHONPATH=str(ROOT))
    done = run("-c", program, *arguments, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    assert '"agent": "mine:answer"' in done.stdout


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("train.cli.app", ("groundwire.adapters", "groundwire.rewards", "groundwire.train.run", "torch", "pandas")),
        ("train.run", ("agents", "aiohttp", "httpx", "langchain", "openai", "opentelemetry", "pandas", "torch")),
    ],
)
def test_help_imports_nothing_heavy(module: str, names: tuple[str, ...]) -> None:
    heavy = f"[name for name in sys.modules if name.startswith({names})]"
    program = f"import sys; from groundwire.{module} import app; app(['--help'], standalone_mode=False); print({heavy})"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


AUDIT = ("-m", "train.audit", "--limit", "4")


def test_progress_bars_appear_on_terminals_only() -> None:
    shown = _on_a_terminal(*AUDIT)
    assert ESCAPE in shown
    assert "Auditing" in shown
    for plain in (_on_a_terminal(*AUDIT, NO_COLOR="1"), (piped := _run(*AUDIT)).stdout + piped.stderr):
        assert ESCAPE not in plain
        assert "Auditing" not in plain
        assert plain.startswith("data: ")
        assert "fit to train on" in plain


def test_colours_appear_on_terminals_without_no_color() -> None:
    listed = ("-m", "train.cli.app", "--help")
    assert ESCAPE in _on_a_terminal(*listed)
    assert ESCAPE not in _on_a_terminal(*listed, NO_COLOR="1")
    assert ESCAPE not in _run(*listed).stdout
    assert ESCAPE not in _on_a_terminal("-m", "train.doctor", NO_COLOR="1")
