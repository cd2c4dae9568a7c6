"""How the agent and the reward of a run are called: checked and said before the first rollout.

With ``runner_python`` they are asked in their own environment, where this module is the program.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from groundwire import adapters, rewards
from groundwire.domains import ANSWER_KINDS, Task
from groundwire.tools.errors import UserError
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import AgentSettings, RunConfig
from groundwire.train.rollouts.agent_python import ask
from groundwire.train.rollouts.agent_view import AgentView
from groundwire.train.rollouts.factory import make_backend

_MODULE = "groundwire.train.rollouts.call_notes"
_MOST = 20


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
    given = json.dumps(
        [settings, [{**asdict(question), "answers": question.form} for question in questions], examples], default=str
    )
    return [str(note) for note in ask(config.runner_python, "-m", _MODULE, given=given)]


def _describe(backend: Any, reward: Any, questions: Iterable[adapters.Question], tasks: Iterable[Task]) -> list[str]:
    agent = _first(backend.describe_call, questions)
    function = _first(lambda task: rewards.describe_call(reward, task), tasks)
    return [f"{part}: called as {call}" for part, call in (("agent", agent), ("reward", function)) if call]


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
    given, questions, tasks = json.load(sys.stdin)
    try:
        settings = AgentSettings(**given)
        reward = rewards.get(settings.reward) if settings.reward and ":" in settings.reward else None
        asked = [
            adapters.Question(**{**question, "answers": ANSWER_KINDS[question["answers"]]}) for question in questions
        ]
        notes = _describe(make_backend(settings), reward, asked, tasks)
    except UserError as error:
        sys.exit(str(error))
    print(json.dumps(notes))


if __name__ == "__main__":
    _main()
