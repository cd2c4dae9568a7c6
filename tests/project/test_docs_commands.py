"""Every command of every page is run: two shells make its arguments, and the program that it names gets them.

What trains or evaluates for long is run in a shorter form (``SHORTER``). What the pages assume is in
``page_reader.py``, what cannot be here is named in ``MISSING``, and what is not run in ``OTHERS`` and ``OTHER_PYTHON``.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from page_commands import FILE_PROGRAMS, Command, blocks, commands
from page_reader import SETTINGS, Reader, prepare
from programs import ROOT

from groundwire.train.cli.app import COMMANDS

PAGES = sorted(
    page
    for place in (*ROOT.glob("*.md"), *ROOT.glob("*.txt"), *(ROOT / name for name in ("docs", "examples", "train")))
    for page in (place.rglob("*.md") if place.is_dir() else [place])
    if page.name != "CHANGELOG.md" and "node_modules" not in page.parts  # the first also has what is gone
)
CHINESE = (ROOT / "README.zh.md", *(ROOT / "docs" / "zh").glob("*.md"))
"""They have the commands of the English pages (test_docs.py)."""
FIRST = ("README.md", "README.zh.md", "install.md", "first-run.md", "first-hour.md", "tutorials.md", "serve.md")
"""Read first, and pasted into any terminal: a zsh that was not configured takes comments for arguments."""

OTHERS = {
    **dict.fromkeys(("pip", "trainer/bin/pip", "python3", "uv", "uvx", "conda", "git"), "needs a network"),
    **dict.fromkeys(("docker", "ray", "vllm", "nvidia-smi", "ollama", "rm"), "changes the machine, or needs a GPU"),
}
"""Programs that are not run, and why. A command of groundwire in their arguments is."""
OTHER_PYTHON = {
    "-m pip": "needs a network",
    "-m pytest -q": "a test that the reader names",
    "-m dev.settings_page": "writes a page, which test_docs.py compares",
    "-m dev.commands_page": "writes a page, which test_docs.py compares",
    "evaluation.py": "Spider's official evaluator",
    "train_sql_agent.py": "Agent Lightning's; test_published_commands.py tries what is named as equivalent",
    "sql_agent.py": "Agent Lightning's; test_published_commands.py tries what is named as equivalent",
    "app.py": "the reader's own program",
    "llama.cpp/": "a converter of llama.cpp",
    "own_task.py": "trains a real model; test_examples.py runs it with the starter",
    "examples/own_task/": "trains a real model; test_examples.py runs it with the starter",
}
"""Beginnings of Python's arguments that are not run, and why."""
PROGRAMS = ("groundwire", "python", ".venv/bin/python", "make", *OTHERS)

SHORTER = {
    "run": ["--print-config"],
    "train": ["--print-config"],
    "learn": ["--no-rl", "sft.epochs=0.01"],
    "sft": ["epochs=0.001", "val_tasks=2", "tokens_per_step=500"],
    "evaluate": ["--val-tasks", "2"],
    "audit": ["--limit", "5"],
    "audit --attack": ["--limit", "5", "--minutes", "0"],
    "serve": ["--port", "0"],
    "store": ["--port", "0"],
    "report --watch": ["--port", "0"],
    "mcp-sql --transport": ["--port", "0"],
    "dev": ["--help"],
    "benchmarks": ["--help"],
    "domains": ["--help"],
}
"""What is added to a command, by its kind. A program has read its other arguments before it shows its help."""
VERDICTS = {"learn": (0, 3, 4), "audit --attack": (0, 1)}
"""Exit codes that say what was found."""
SERVERS = ("serve", "store", "runner", "report --watch", "mcp-sql --transport")
"""They go on until the reader stops them: at the end of the page."""
AT_ONCE = ("dev.medical_data", "benchmarks.variants")
"""Programs of ``dev`` and ``benchmarks`` that take no time."""
WITH_A_CLIENT = ("examples/mcp/", "examples/langgraph_without_training.py")
"""Programs that call the reader's model."""
MISSING = {
    r"sees no GPU|there is no GPU here": "a GPU",
    r"verl is not installed|not installed: vllm, verl|trainer: verl cannot run here": "verl",
    r"--track wandb: its package is not installed": "Weights & Biases",
    r"needs the package '(autogen_agentchat|llama_index)'": "frameworks that `make frameworks` installs",
    r"MongoDB cannot be used: uri:27017": "a server of MongoDB",
    r"there is no program 'llm'": "the program llm",
}
"""What is not here, by the sentence with which a command that needs it ends."""


@pytest.fixture(params=PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def page(request: pytest.FixtureRequest) -> Path:
    return request.param


def test_sh_and_zsh_make_the_same_of_a_page(page: Path, tmp_path: Path) -> None:
    """zsh takes brackets and stars for names of files; where nothing is set up, also comments for arguments."""
    if not shutil.which("zsh"):
        pytest.skip("no zsh here")
    typed = ("-i", "+o", "promptsp", "+o", "promptcr") if page.name in FIRST else ()
    for number, block in enumerate(blocks(page)):
        made = [
            commands(block, tmp_path / f"{number}-{shell[0]}", PROGRAMS, *shell)
            for shell in (("sh", "-eu"), ("zsh", "-feu", *typed))
        ]
        assert made[0] == made[1]


def test_the_commands_of_a_page_run(page: Path, tmp_path: Path, shared_folder: Any) -> None:
    made = [
        command
        for number, block in enumerate(blocks(page))
        for command in commands(block, tmp_path / str(number), PROGRAMS, "sh", "-eu")
    ]
    named = re.findall(r"`groundwire ([a-z][\w-]*)", page.read_text(encoding="utf-8"))
    assert set(named) <= COMMANDS.keys()
    if not made or page in CHINESE:
        return
    reader = Reader(page, shared_folder("pages", prepare), tmp_path / "reader")
    looked, problems = False, list[str]()
    for command in dict.fromkeys(made):
        if not (words := _python(command, reader)):
            continue
        kind = _kind(words)
        if kind == "look":  # one of a page runs ten tasks, others end before them
            kind, looked = "run" if looked else "look", True
        problems += _problem(reader, command, kind, words)
    reader.stop()
    assert not problems, "\n\n".join(problems)


def _python(command: Command, reader: Reader) -> list[str]:
    """The arguments of Python that do what the command does; none if that is done, or is not to be run."""
    program, *words = command.words[0], *reader.own_words([*command.words[1:]])
    if command.words == ("pip", "install", "-e", "."):
        reader.install()
    elif program in FILE_PROGRAMS or (program == "make" and shutil.which("make")):
        # make -n also ends with an error if there is no such target
        made = [program, "-n", *words] if program == "make" else [program, *words]
        folder = ROOT if program == "make" else reader.app / command.folder
        subprocess.run(made, cwd=folder, check=True, capture_output=True)
    elif program == "groundwire":
        return ["-m", "groundwire", *words]
    elif program.endswith("python") and not " ".join(words).startswith(tuple(OTHER_PYTHON)):
        return words
    elif program in OTHERS and "groundwire" in words[:-1] and words[words.index("groundwire") + 1] in COMMANDS:
        return ["-m", *words[words.index("groundwire") :]]
    return []


def _kind(words: Sequence[str]) -> str:
    """That of Python's arguments: the command of groundwire, with an option that changes it, or a program's package."""
    if words[0] != "-m":
        return "run" if {"--ci-fast", "--steps"} & {*words} else "program"
    module, *arguments = words[2 if words[1] == "groundwire" else 1 :]
    module = module.removeprefix("train.")
    if "--dev" in arguments:
        return "look"
    for option in ("--watch", "--transport", "--compare", "--attack"):
        if option in arguments and module != "train":
            return f"{module} {option}"
    of_runs = module == "evaluate" and arguments[:1] and arguments[0][0] != "-"
    if "--help" in arguments or module in AT_ONCE or of_runs:
        return "program"
    return module.partition(".")[0]


def _problem(reader: Reader, command: Command, kind: str, words: Sequence[str]) -> list[str]:
    if kind == "init":
        for name in SETTINGS:
            (reader.app / name).unlink(missing_ok=True)
    if kind == "store":
        reader.stop()
    variables = dict(command.variables)
    if words[0].startswith(WITH_A_CLIENT):
        variables["OPENAI_BASE_URL"] = reader.endpoint()
    end = words.index("--") if "--" in words else len(words)
    words = [*words[:end], *SHORTER.get(kind, []), *words[end:]]
    program = reader.start(*words, folder=command.folder, variables=variables)
    places = [f"http://127.0.0.1:{port}" for option, port in pairwise(command.words) if option == "--port"]
    if kind in SERVERS and reader.serves(program, *places):
        return []
    done = program.wait(600)
    said = re.findall(r"^(?:error|failure|verdict).*", done.stdout + done.stderr, re.MULTILINE)
    expected = [*MISSING, *(["^verdict:"] if kind == "look" else [])]
    if done.returncode in VERDICTS.get(kind, (0,)) or (
        said and all(any(re.search(each, line) for each in expected) for line in said)
    ):
        return []
    return [f"{' '.join(words)}\n{done.stdout[-600:]}{done.stderr[-600:]}"]
