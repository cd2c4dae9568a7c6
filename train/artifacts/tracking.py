"""A run's figures in the places where teams look at theirs: TensorBoard, Weights & Biases.

The run's folder stays what a run is; here each line of its ``metrics.jsonl`` is told to others, as it is written. verl
has trackers of its own and is only told which (:mod:`groundwire.train.verl.hydra_config`): this is the local
trainer's part. A run that is resumed goes on in the same TensorBoard folder, and as the same run of W&B.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Protocol

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError

__all__ = ["Tracking", "check_trackers", "numbers", "wandb_environment"]

PROJECT = "groundwire"
FOLDER = "tensorboard"


def check_trackers(names: Sequence[str]) -> None:
    """Raise :class:`ConfigError` where the package of one is not installed; nothing is imported."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"--track {name}: its package is not installed: pip install -e '.[track]' in a clone")


def numbers(line: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line of ``metrics.jsonl`` but for its step, under flat names such as ``validation/accuracy``."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and f"{prefix}{name}" != "step":
            yield f"{prefix}{name}", float(value)


def wandb_environment(run: RunDir) -> dict[str, str]:
    """What makes W&B know a run again that is resumed, and keep its files in the run's folder."""
    return {"WANDB_RUN_ID": run.resources_id, "WANDB_RESUME": "allow", "WANDB_DIR": str(run.path.resolve())}


class _Tracker(Protocol):
    def step(self, step: int, figures: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class _TensorBoard:
    def __init__(self, config: Any, run: RunDir, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.path / FOLDER
        # What an earlier life of the run wrote beyond its last checkpoint is done again, and hidden.
        purge = first_step + 1 if folder.exists() and first_step else None
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, config: Any, run: RunDir, first_step: int) -> None:
        import wandb

        known = {name: os.environ.get(name) or value for name, value in wandb_environment(run).items()}
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or PROJECT,
                name=run.path.name,
                id=known["WANDB_RUN_ID"],
                resume="allow",
                dir=known["WANDB_DIR"],
                config=config.to_dict(),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            why = str(error).strip().splitlines()[0]
            raise ConfigError(f"--track wandb: {why} (wandb login, or WANDB_MODE=offline)") from error
        where = self._run.url or f"offline; wandb sync {self._run.settings.sync_dir} sends it"
        print(f"wandb: {where}", file=sys.stderr)

    def step(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        self._run.finish()


_TRACKERS: dict[str, Any] = {"tensorboard": _TensorBoard, "wandb": _Wandb}


class Tracking:
    """The trackers of one life of a run: opened with it, told every line, closed however it ends.

    ``first_step`` is the last step that counts. Raises :class:`ConfigError` where one cannot be opened.
    """

    def __init__(self, config: Any, run: RunDir, *, first_step: int) -> None:
        self._made = config, run, first_step
        self._open = ExitStack()
        self._trackers: list[_Tracker] = []

    def __enter__(self) -> Tracking:
        with ExitStack() as opened:
            for name in self._made[0].track:
                tracker = _TRACKERS[name](*self._made)
                opened.callback(tracker.close)
                self._trackers.append(tracker)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()

    def step(self, line: Mapping[str, Any]) -> None:
        """A line of ``metrics.jsonl`` was written."""
        figures = dict(numbers(line))
        for tracker in self._trackers:
            tracker.step(int(line["step"]), figures)
