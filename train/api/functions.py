"""``fit``, ``look`` and ``evaluate``: the commands of these names for a script or a notebook.

They block until they are done. They can be called while an event loop runs, as in a notebook: agents, rewards
and servers run on the event loop of another thread.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from groundwire.tools.errors import named_layer

if TYPE_CHECKING:
    from pydantic import BaseModel
    from typing_extensions import Unpack

    from groundwire.train.api.results import EvaluationResult, LookResult, TrainingResult
    from groundwire.train.api.typed_settings import Settings
    from groundwire.train.job.job import Job


@named_layer("train")
def fit(
    agent: Any = None,
    tasks: Any = None,
    reward: str | Callable[..., Any] | None = None,
    *,
    validation: Any = None,
    resume: str | Path | None = None,
    quiet: bool = False,
    **settings: Unpack[Settings],
) -> TrainingResult:
    """Train the model behind ``agent``, as ``groundwire run`` does.

    Args:
        agent: a LangGraph graph, an agent of the OpenAI Agents SDK, a function of the task (sync or async), a
            ``LitAgent`` of Agent Lightning, a :class:`groundwire.adapters.Backend`, or the name of one
            (``module:name``). Without it, the setting ``backend`` names one that ships with the project.
        tasks: dicts, a data frame, a parquet, CSV, TSV, JSON or JSONL file, or the name of a domain. A task has a
            ``question``. Columns that the reward reads, or that are named like a gold answer, reach the reward only;
            the setting ``agent_columns`` names exceptions.
        reward: a function of (task, answer) or (task, answer, steps), sync or async, that returns a number or a dict
            of numbers; or the name of a registered reward. Without it, the domain's own. A ``LitAgent`` has its own.
        validation: the share of the tasks that is held out (default 0.2), by question and by database, document or
            group; or validation tasks.
        resume: the directory of a run that is continued, with the same agent, tasks and reward.
        quiet: print no progress.
        **settings: every setting of docs/settings.md; ``agent_input`` and ``agent_output`` may be functions.

    Returns:
        The accuracy before and after training with 95 % intervals, the checkpoint, the rollouts.

    Raises:
        groundwire.tools.errors.UserError: an argument is wrong, or training failed; the message says what to do.
        KeyboardInterrupt: the run was stopped; its last complete step is saved.
    """
    from groundwire.adapters.agents.changes import given_back
    from groundwire.tools.terminal import console, show_line
    from groundwire.train.api.training import make_job, train
    from groundwire.train.artifacts.run_dir import RunDir
    from groundwire.train.job.job import parse_arguments

    given, objects = parse_arguments(agent, tasks, reward, settings, validation=validation)
    run = RunDir.open(resume) if resume is not None else None
    with given_back():
        job = make_job(given, resumed=run, objects=objects)
        if run is None:
            _check_model(job, given)
        output = console(quiet=quiet)
        for note in job.notes:
            show_line(output, note)
        run = train(job, run, output)
    from groundwire.train.api.results import training_result

    return training_result(run)


@named_layer("train")
def look(
    agent: Any = None,
    tasks: Any = None,
    reward: str | Callable[..., Any] | None = None,
    *,
    base_url: str | None = None,
    quiet: bool = False,
    **settings: Unpack[Settings],
) -> LookResult:
    """Run ten tasks without training, and say whether training can work, as ``groundwire look`` does.

    The arguments are those of :func:`fit`; ``base_url`` is an OpenAI-compatible endpoint that has the model, whose key
    is OPENAI_API_KEY. Raises as :func:`fit` does. A notebook shows the result, and no call.
    """
    from groundwire.adapters.agents.changes import given_back
    from groundwire.tools.terminal import console, in_notebook
    from groundwire.train.api.evaluation import check_endpoint, find_endpoint, run_dev
    from groundwire.train.api.results import LookResult
    from groundwire.train.api.training import make_job
    from groundwire.train.job.job import parse_arguments

    given, objects = parse_arguments(agent, tasks, reward, settings)
    with given_back():
        job = make_job(given, objects=objects, dev=True, endpoint=find_endpoint(base_url, given))
        check_endpoint(job)
        if job.endpoint is None:
            _check_model(job, given)
        rollouts, verdict = run_dev(job, console(quiet=quiet), details=not in_notebook())
    return LookResult(rollouts=rollouts, verdict=verdict)


def _check_model(job: Job, given: dict[str, Any]) -> None:
    """Raise :class:`ConfigError` if no model is named, and the usual one cannot do the tasks."""
    from groundwire.train.config.errors import ConfigError
    from groundwire.train.config.resolve import with_file

    if job.config.model == "starter" and job.view.answers.name != "sql" and not with_file(dict(given)).get("model"):
        raise ConfigError(
            "these tasks need a model: the starter, the usual one, writes SQL only. Give model='smollm2' (135 million "
            "parameters, for a laptop), a model of the hub ('Qwen/Qwen2.5-0.5B-Instruct'), a GGUF file, or a folder "
            "saved by transformers; model='starter' only shows that everything works"
        )


@named_layer("train")
def evaluate(
    agent: Any = None,
    tasks: Any = None,
    reward: str | Callable[..., Any] | None = None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    samples: int = 1,
    quiet: bool = False,
    **settings: Unpack[Settings],
) -> EvaluationResult:
    """Evaluate a model under ``agent``, as ``groundwire evaluate`` does.

    Args:
        agent: as in :func:`fit`.
        tasks: the questions, as in :func:`fit`. All of them are asked; of a domain, its validation questions.
        reward: as in :func:`fit`.
        base_url: an OpenAI-compatible endpoint that has the model.
        api_key: the endpoint's key.
        samples: rollouts per question.
        quiet: print no progress.
        **settings: every setting of docs/settings.md that an evaluation has. ``model`` is a run directory (its newest
            checkpoint), a folder in Hugging Face's format, or the endpoint's name of it; by default the starter. A
            run's model has the settings of its run.

    Raises:
        groundwire.tools.errors.UserError: an argument is wrong, or no rollout could be judged.
        KeyboardInterrupt: the evaluation was stopped; the samples that were complete are saved.
    """
    from groundwire.adapters.agents.changes import given_back
    from groundwire.tools.terminal import console
    from groundwire.train.api.evaluation import make_evaluation_job, run_evaluation
    from groundwire.train.job.job import ModelEndpoint, parse_arguments

    given, objects = parse_arguments(agent, tasks, reward, settings, train=False)
    endpoint = ModelEndpoint(base_url, api_key) if base_url else None
    with given_back():
        job = make_evaluation_job(given, endpoint, objects=objects)
        run, entry = run_evaluation(job, samples=samples, output=console(quiet=quiet))
    from groundwire.train.api.results import Accuracy, EvaluationResult

    return EvaluationResult(run_dir=run.path.resolve(), accuracy=Accuracy.of(entry["after"]), figures=entry["after"])


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        """Python sets a submodule as an attribute: ``evaluate`` and ``serve`` would replace the functions."""
        if name not in self.__all__ or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


def keep_functions(package: str) -> None:
    """Let no submodule of ``package`` replace a name in its ``__all__``."""
    sys.modules[package].__class__ = _Package


def complete_settings(functions: Iterable[Any], record: type[BaseModel]) -> None:
    """Name the settings of ``record`` in the signatures, from which notebooks complete; editors read annotations."""
    for function in functions:
        own = inspect.signature(function).parameters
        shown = [parameter for parameter in own.values() if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
        shown += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            for name in record.model_fields.keys() - own.keys()
        ]
        function.__signature__ = inspect.Signature(shown)


if "IPython" in sys.modules:
    from groundwire.train.config.run_config import RunConfig

    complete_settings([fit, look, evaluate], RunConfig)
