"""``sft``, ``why``, ``report`` and ``read_traces``: the commands of these names for a script or a notebook."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groundwire.tools.errors import named_layer
from groundwire.train.api.functions import complete_settings

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from groundwire.train.api.typed_settings import SFT
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
def read_traces(*files: str | Path, mask: bool = True) -> Traces:
    """The rollouts in exported traces, as ``groundwire traces`` reads them (:func:`.traces.read.read_traces`)."""
    from groundwire.train.traces import read

    return read.read_traces(*files, mask=mask)


if "IPython" in sys.modules:
    from groundwire.train.config.sft_settings import SFTSettings

    complete_settings([sft], SFTSettings)
