"""A run's folder: written so that a kill at any moment leaves it whole, and readable while the run goes on.

    runs/<time>-<backend>-<domain>/     and runs/latest, a link to the newest
        config.json                     the resolved settings
        metrics.jsonl                   one line a step; line 0 is the validation before training
        rollouts/step-00012.parquet     the rollouts of a step; merged into rollouts.parquet at the end
        checkpoints/step-00012/         what transformers loads, and the optimizer's state
        curve.png, summary.json

A step is written in the order rollouts, metrics, checkpoint, each by renaming a finished file. The checkpoint is what
makes a step count: on resuming, whatever lies beyond the newest one is dropped and done again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

__all__ = ["RunDir", "RunDirError"]


class RunDirError(Exception):
    """The run's folder cannot be used: not there, not a run, or another run's."""


class RunDir:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, root: str | Path, *, backend: str, domain: str, config: Mapping[str, Any]) -> RunDir:
        """A new folder under ``root``, with its settings written and ``latest`` pointing at it."""
        root = Path(root)
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{backend}-{domain}"
        for number in range(100):
            path = root / (name if number == 0 else f"{name}-{number + 1}")
            with suppress(FileExistsError):
                path.mkdir(parents=True)
                break
        run = cls(path)
        run.write_json("config.json", config)
        link = root / f".latest-{os.getpid()}"
        with suppress(OSError):  # a file system without links still has the run
            link.symlink_to(path.name)
            link.replace(root / "latest")
        return run

    @classmethod
    def open(cls, path: str | Path) -> RunDir:
        """An existing run. Raises :class:`RunDirError`."""
        folder = Path(path).resolve()
        if not (folder / "config.json").is_file():
            raise RunDirError(f"{path} is not a run: it has no config.json. Give a folder like runs/latest")
        return cls(folder)

    @property
    def resources_id(self) -> str:
        """What a store shared with other runs knows this one by; a resumed run is the same one."""
        return f"rs-{hashlib.sha256(f'{platform.node()}:{self.path.resolve()}'.encode()).hexdigest()[:12]}"

    def config(self) -> dict[str, Any]:
        """The settings that the run was started with."""
        try:
            return dict(json.loads((self.path / "config.json").read_text()))
        except ValueError as error:
            raise RunDirError(f"{self.path / 'config.json'} is damaged ({error}); the run cannot be resumed") from error

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file in one piece."""
        with self.whole(self.path / name) as part:
            part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    # -- metrics

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``."""
        with open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def amend_metrics(self, line: Mapping[str, Any]) -> None:
        """Write the last line anew: its validation was made up for."""
        lines = [*self.metrics()[:-1], line]
        with self.whole(self.path / "metrics.jsonl") as part:
            part.write_text("".join(json.dumps(each, ensure_ascii=False) + "\n" for each in lines))

    def metrics(self) -> list[dict[str, Any]]:
        """The lines so far; a last line that a kill cut short is left out."""
        lines = []
        with suppress(FileNotFoundError):
            for text in (self.path / "metrics.jsonl").read_text().splitlines():
                with suppress(ValueError):
                    lines.append(dict(json.loads(text)))
        return lines

    def append_rollout_figures(self, line: Mapping[str, Any]) -> None:
        """Add one line to ``rollouts.jsonl``: what became of the rollouts of a step, where verl writes the metrics."""
        with open(self.path / "rollouts.jsonl", "a") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    # -- rollouts

    def write_rollouts(
        self, step: int, rows: Sequence[Mapping[str, Any]], *, kind: str = "train", more: bool = False
    ) -> None:
        """Write the rollouts of one step (``kind``: train or val), or add ``more`` to those that are written."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        path = self.path / "rollouts" / f"step-{step:05d}-{kind}.parquet"
        path.parent.mkdir(exist_ok=True)
        table = pa.Table.from_pylist([dict(row) for row in rows])
        if more and path.exists():
            table = pa.concat_tables([pq.read_table(path), table], promote_options="permissive")
        with self.whole(path) as part:
            pq.write_table(table, part, compression="zstd")

    def merge_rollouts(self) -> None:
        """Put the steps' rollouts into the one file ``rollouts.parquet``, a step at a time."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        parts = sorted((self.path / "rollouts").glob("step-*.parquet"))
        if not parts:
            return
        schema = pa.unify_schemas([pq.read_schema(part) for part in parts], promote_options="permissive")
        with (
            self.whole(self.path / "rollouts.parquet") as whole,
            pq.ParquetWriter(whole, schema, compression="zstd") as out,
        ):
            for part in parts:
                with pq.ParquetFile(part) as file:
                    table = file.read()
                for field in schema:
                    if field.name not in table.column_names:
                        table = table.append_column(field.name, pa.nulls(len(table), field.type))
                out.write_table(table.select(schema.names).cast(schema))

    def rollouts(self, columns: Sequence[str] | None = None) -> tuple[list[dict[str, Any]], list[str]]:
        """The rollouts so far (all columns, or those named), and a sentence for each file that cannot be read.

        Raises :class:`RunDirError` where nothing can be read.
        """
        damaged: list[str] = []
        rows = [row for batch in self.rollout_batches(columns, damaged) for row in batch]
        if not rows:
            why = damaged[0] if damaged else "it has not finished a step yet"
            raise RunDirError(f"{self.path} has no rollouts: {why}")
        return rows, damaged

    def rollout_batches(self, columns: Sequence[str] | None, damaged: list[str]) -> Iterator[list[dict[str, Any]]]:
        """The rollouts so far, one step's or validation's at a time: a long run's do not all fit into memory.

        The steps' own files are read where there are any: they are there while the run goes on, too. A column that a
        file from an older version lacks is missing in its rows. ``damaged`` is given a sentence for each file that
        cannot be read.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        whole = self.path / "rollouts.parquet"
        for path in sorted((self.path / "rollouts").glob("step-*.parquet")) or ([whole] if whole.is_file() else []):
            try:
                with suppress(FileNotFoundError), pq.ParquetFile(path) as file:  # one that resumes drops what it redoes
                    there = [name for name in file.schema_arrow.names if columns is None or name in columns]
                    for group in range(file.num_row_groups):  # in the whole file each is a step's
                        yield file.read_row_group(group, columns=there).to_pylist()
            except (pa.ArrowException, OSError) as error:
                damaged.append(f"{path.name} cannot be read ({str(error).splitlines()[0]})")

    # -- checkpoints

    @contextmanager
    def new_checkpoint(self, step: int, *, keep: int = 2) -> Iterator[Path]:
        """A folder to fill; it gets its name when it is complete, and all but the newest ``keep`` are removed."""
        folder = self.path / "checkpoints"
        folder.mkdir(exist_ok=True)
        part = folder / f".step-{step:05d}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            yield part
            final = folder / f"step-{step:05d}"
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        for old in self.checkpoints()[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    def checkpoints(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted((self.path / "checkpoints").glob("step-*"))

    def rewind(self) -> int:
        """Drop what lies beyond the newest checkpoint; the number of the last step that counts (0 before the first)."""
        checkpoints = self.checkpoints()
        step = int(checkpoints[-1].name.split("-")[1]) if checkpoints else 0
        kept = [line for line in self.metrics() if line["step"] <= step]
        with self.whole(self.path / "metrics.jsonl") as part:
            part.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept))
        for part in (self.path / "rollouts").glob("step-*.parquet"):
            if int(part.name.split("-")[1]) > step:
                part.unlink()
        return step

    @contextmanager
    def whole(self, path: Path) -> Iterator[Path]:
        """A file that appears under its name only when it is complete, and leaves the old one if it is not."""
        part = path.with_name(f".{path.name}.part")
        try:
            yield part
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
