"""``sft``, ``why``, ``report``, ``learn``, ``read_traces``: the commands of these names for a script or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groundwire.tools.errors import named_layer
from groundwire.train.api.functions import complete_settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from groundwire.train.api.replay import ReplayedRollout
    from groundwire.train.api.typed_settings import SFT, Settings
    from groundwire.train.learn.pipeline import LearnResult
    from groundwire.train.traces.read import Traces


class Explanation(str):
    """Lines of text."""

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self)}</pre>"


@dataclass(frozen=True)
class Page:
    """The report of a run; a notebook shows it."""

    path: Path

    def _repr_html_(self) -> str:
        page = escape(self.path.read_text(encoding="utf-8"))
        return f'<iframe srcdoc="{page}" width="100%" height="640"></iframe>'


@named_layer("train")
def sft(*, resume: str | Path | None = None, quiet: bool = False, **settings: Unpack[SFT]) -> Path:
    """Fine-tune a model on gold answers, chats or accepted rollouts, as ``groundwire sft`` does; returns its folder.

    The ``settings`` are those of docs/settings.md for it; ``resume`` is the folder of a run that is continued. Raises
    errors derived from :class:`groundwire.tools.errors.UserError`.
    """
    from groundwire.train.config.sft_settings import SFTSettings
    from groundwire.train.sft.run import train_and_print

    given: dict[str, Any] = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    return train_and_print(SFTSettings(**given), resume=Path(resume) if resume else None, given=given, quiet=quiet)


@named_layer("train")
def why(run_dir: str | Path | None = None, rollout_id: str | None = None) -> Explanation:
    """Why a rollout, or those of a whole run (by default the last), taught nothing, as ``groundwire why`` says it."""
    from groundwire.train.artifacts.run_dir import LAST_RUN, RunDir
    from groundwire.train.why import explain

    lines, damaged = explain(RunDir.open(run_dir or LAST_RUN), rollout_id)
    return Explanation("\n".join([*lines, *(f"warning: {message}" for message in damaged)]))


@named_layer("train")
def replay(
    run_dir: str | Path | None = None,
    agent: Any = None,
    tasks: Any = None,
    reward: str | Callable[..., Any] | None = None,
    *,
    rollout_id: str | None = None,
    failed: bool = False,
    count: int = 0,
    **settings: Unpack[Settings],
) -> list[ReplayedRollout]:
    """Run an agent again on rollouts of a run with every call answered from the record, as ``groundwire replay`` does.

    ``agent``, ``tasks`` and ``reward`` are those of :func:`groundwire.train.fit`, by default the run's. The rollout of
    an id, those that ``failed``, or ``count`` are taken; 0 is all. Each has a ``difference``, None if it went as
    recorded. Raises errors derived from :class:`groundwire.tools.errors.UserError`.
    """
    from groundwire.adapters.agents.changes import given_back
    from groundwire.train.api import replay as replays
    from groundwire.train.artifacts.run_dir import LAST_RUN, RunDir
    from groundwire.train.job.job import parse_arguments

    run = RunDir.open(run_dir or LAST_RUN)
    given, objects = parse_arguments(agent, tasks, reward, settings)
    with given_back():
        job = replays.replay_job(run, given, objects)
        chosen, _ = replays.choose_rollouts(run, rollout_id=rollout_id, failed=failed, count=count)
        return [ended for batch in replays.replay(job, run, chosen) for ended in batch]


@named_layer("train")
def report(run_dir: str | Path | None = None) -> Page:
    """Write ``report.html`` into the folder of a run, as ``groundwire report`` does; by default of the last."""
    from groundwire.train.artifacts.checkpoints import atomic_write
    from groundwire.train.artifacts.run_dir import LAST_RUN, RunDir
    from groundwire.train.report.build import build

    run = RunDir.open(run_dir or LAST_RUN)
    page = run.path / "report.html"
    with atomic_write(page) as file:
        file.write_text(build(run).html, encoding="utf-8")
    return Page(page)


@named_layer("train")
def learn(
    *files: str | Path,
    agent: Any = None,
    tasks: Any = None,
    reward: str | Callable[..., Any] | None = None,
    sft: Mapping[str, Any] | None = None,
    trained_agent: str = "",
    trained_model: str = "",
    rl: bool = True,
    mask: bool = True,
    resume: str | Path | None = None,
    quiet: bool = False,
    **settings: Unpack[Settings],
) -> LearnResult:
    """Train on exported traces and test what came of it, as ``groundwire learn`` does.

    Args:
        files: files or folders of traces.
        agent: as in :func:`.fit`; without it replies are compared.
        tasks: as in :func:`.fit`; by default those of the traces.
        reward: as in :func:`.fit`; by default one that is made of the traces.
        sft: settings of the fine-tuning, as of :func:`sft`.
        trained_agent: a regular expression; only calls of agents of this name are learned.
        trained_model: the same for models.
        rl: whether GRPO follows the fine-tuning.
        mask: whether keys and personal data are replaced.
        resume: the folder that is continued, with the same agent, tasks and reward, and without files.
        quiet: print nothing.
        **settings: those of :func:`.fit`; ``model`` is the one that learns.

    Raises errors derived from :class:`groundwire.tools.errors.UserError`.
    """
    from groundwire.tools.terminal import console
    from groundwire.train.job.job import parse_arguments
    from groundwire.train.learn.pipeline import LearnRequest, learn_from

    given, objects = parse_arguments(agent, tasks, reward, settings)
    own: dict[str, Any] = {"sft": dict(sft or {}), "rl": rl, "mask": mask}
    own |= {"trained_agent": trained_agent, "trained_model": trained_model}
    request = None if resume and not files else LearnRequest(files=list(map(str, files)), given=given, **own)
    return learn_from(request, resume=Path(resume) if resume else None, output=console(quiet=quiet), objects=objects)


@named_layer("train")
def read_traces(*files: str | Path, mask: bool = True) -> Traces:
    """The rollouts in exported traces, as ``groundwire traces`` reads them (:func:`.traces.read.read_traces`)."""
    from groundwire.train.traces import read

    return read.read_traces(*files, mask=mask)


if "IPython" in sys.modules:
    from groundwire.train.config.run_config import RunConfig
    from groundwire.train.config.sft_settings import SFTSettings

    complete_settings([sft], SFTSettings)
    complete_settings([learn, replay], RunConfig)
