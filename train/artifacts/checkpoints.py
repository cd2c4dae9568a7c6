"""The checkpoints of a run: ``step-00012/`` and so on, each written completely before it gets its name."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from groundwire.tools.files import read_bytes
from groundwire.train.artifacts.atomic import sync

__all__ = ["Checkpoints", "step_number"]


_KEPT = 2


class Checkpoints:
    """The checkpoints in ``folder``, which the local trainer or verl writes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def write(self, step: int) -> Iterator[Path]:
        """A temporary folder to fill; renamed at the end. All but the newest two checkpoints are then deleted."""
        self.folder.mkdir(exist_ok=True)
        part = self.folder / f".step-{step:05d}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            yield part
            for file in (*part.rglob("*"), part):
                sync(file)
            final = self.folder / f"step-{step:05d}"
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
            sync(self.folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        for old in self.paths()[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)

    def paths(self) -> list[Path]:
        """Complete checkpoints of the local trainer, oldest first."""
        found = [(step_number(path), path) for path in self.folder.glob("step-*") if path.is_dir()]
        return [path for _, path in sorted((step, path) for step, path in found if step is not None)]

    def last_step(self) -> int:
        """The step of the newest checkpoint, the local trainer's or verl's; 0 without one."""
        if paths := self.paths():
            return step_number(paths[-1]) or 0
        with suppress(OSError, ValueError):
            return int(read_bytes(self.folder / "latest_checkpointed_iteration.txt"))
        return 0

    def rename_damaged(self, checkpoint: Path) -> Path:
        """Rename an unreadable checkpoint to ``damaged-<name>``, which :meth:`paths` ignores. Returns the new path."""
        renamed = checkpoint.with_name(f"damaged-{checkpoint.name}")
        shutil.rmtree(renamed, ignore_errors=True)
        return checkpoint.rename(renamed)


def step_number(path: Path) -> int | None:
    """The number in a name like ``step-00012`` or ``step-00012-train.parquet``; None for any other name."""
    found = re.fullmatch(r"step-(\d+)(-.+\.parquet)?", path.name)
    return int(found[1]) if found else None
