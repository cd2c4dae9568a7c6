"""Before the first rollout: the interpreter of an agent's own environment (the setting ``runner_python``) is checked,
and it is said how the agent and the reward of the run are called.

With ``runner_python`` they are asked in their own environment, where this module is the program.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from groundwire import adapters, rewards
from groundwire.domains import ANSWER_KINDS, Task
from groundwire.tools.errors import UserError
from groundwire.tools.startup import PACKAGE, activated
from groundwire.tools.terminal import version
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import AgentSettings, RunConfig
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.rollouts.factory import ELSEWHERE, make_backend, no_reward

_TIMEOUT_S = 300.0
"""Of the imports of an agent or a reward."""
_PROBE = """
import groundwire.train.store.remote
from groundwire.tools.terminal import version
print(version())
"""
_MODULE = "groundwire.train.rollouts.agent_python"
_MOST = 20


def find_agent_python(python: str) -> str:
    """The absolute path of the interpreter ``python``, whose environment has the base of this version of groundwire.

    A path keeps its symbolic links: those of a virtual environment name the environment. Raises :class:`ConfigError`.
    """
    path = os.path.expanduser(python)
    absolute = shutil.which(path) if os.sep not in path else os.path.abspath(path)
    if not absolute:
        raise ConfigError(f"runner_python is {python!r}, and there is no such command: give the path of an interpreter")
    try:
        theirs = _last_line(absolute, "-c", _PROBE)
    except ConfigError as error:
        clone = PACKAGE.parents[1]
        source = clone if (clone / "pyproject.toml").is_file() else "groundwire"
        raise ConfigError(
            f"runner_python is {python!r}, and groundwire cannot be imported there ({error}): install it with "
            f"{python} -m pip install {source}"
        ) from error
    if theirs != (ours := version()):
        raise ConfigError(
            f"runner_python is {python!r}, whose groundwire has version {theirs}, and this one {ours}: install the "
            "same version in both environments"
        )
    return absolute


def _last_line(python: str, *arguments: str, stdin: str = "") -> str:
    """What a program of ``python`` prints last. Raises :class:`ConfigError` with its last error."""
    try:
        done = subprocess.run(  # noqa: S603
            [python, *arguments],
            input=stdin,
            check=False,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            env=activated(python),
        )
        failed, printed = done.returncode, done.stderr if done.returncode else done.stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        failed, printed = 1, getattr(error, "strerror", None) or f"no answer within {_TIMEOUT_S:g} s"
    last = printed.strip().rpartition("\n")[2]
    if failed:
        raise ConfigError(f"in the environment of runner_python: {last:.500}")
    return last


def reward_elsewhere(python: str, name: str, judge: rewards.JudgeSettings) -> rewards.Reward:
    """The reward ``name`` of the environment of ``python`` ("": a ``LitAgent``'s): not to be called here, and what
    its code says of itself. Raises :class:`ConfigError`.
    """
    reward = no_reward(ELSEWHERE, rewards.comparison(name, judge=judge))
    form, reads = json.loads(_last_line(python, "-m", _MODULE, name)) if name else (None, [])
    vars(reward).update(form=form, reads=reads)
    return reward


def call_notes(
    config: RunConfig, backend: adapters.Backend, reward: rewards.Reward, view: AgentView, tasks: Iterable[Task]
) -> list[str]:
    """A line about how the agent is called, and one about a function of the user's that is the reward.

    Tasks differ in their columns; one that fits is enough. Raises :class:`ConfigError` if there is none.
    """
    kinds: dict[frozenset[str], Task] = {}
    for task in tasks:
        kinds.setdefault(frozenset(name for name in task if task[name] is not None), task)
    examples = [*kinds.values()][:_MOST]
    questions = [view.question(task, view.domain.database(task)) for task in examples]
    if not config.runner_python:
        return _describe(backend, reward, questions, examples)
    settings = {name: getattr(config, name) for name in AgentSettings.model_fields if name != "judge"}
    stdin = json.dumps(
        [settings, [{**asdict(question), "answers": question.form} for question in questions], examples], default=str
    )
    return json.loads(_last_line(config.runner_python, "-m", _MODULE, stdin=stdin))


def _describe(backend: Any, reward: Any, questions: Iterable[adapters.Question], tasks: Iterable[Task]) -> list[str]:
    note = getattr(backend, "environment_note", "")
    agent = _first(backend.describe_call, questions)
    function = _first(lambda task: rewards.describe_call(reward, task), tasks)
    return [f"{name}: called as {call}" for name, call in (("agent", agent), ("reward", function)) if call] + (
        [f"agent: {note}"] if note else []
    )


def _first(describe: Callable[[Any], str], values: Iterable[Any]) -> str:
    """What ``describe`` says of the first value that it does not refuse."""
    refused: Exception | None = None
    for value in values:
        try:
            return describe(value)
        except (ValueError, rewards.UnusableRewardError) as error:
            refused = refused or error
    if refused is not None:
        raise ConfigError(str(refused)) from refused
    return ""


def _main() -> None:
    """Print as JSON what the code of a reward, the argument, says of itself; else how agent and reward are called."""
    answer: Any
    try:
        if sys.argv[1:]:
            reward = rewards.get(sys.argv[1])
            answer = [getattr(rewards.answers_of(reward), "name", None), sorted(rewards.names_read(reward))]
        else:
            fields, asked, tasks = json.load(sys.stdin)
            settings = AgentSettings(**fields)
            function = rewards.get(settings.reward) if settings.reward and ":" in settings.reward else None
            questions = [adapters.Question(**{**entry, "answers": ANSWER_KINDS[entry["answers"]]}) for entry in asked]
            answer = _describe(make_backend(settings), function, questions, tasks)
    except UserError as error:
        sys.exit(" ".join(str(error).split()))
    print(json.dumps(answer))


if __name__ == "__main__":
    _main()
