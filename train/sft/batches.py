"""Batches without padding: replies to the same prompt share it, and a step has as many examples as tokens allow."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from groundwire.train.local.update.packing import Branch
from groundwire.train.sft.data.examples import Example

__all__ = ["Row", "Step", "forwards", "make_rows", "make_steps", "prefetch"]

_SHARED = 0.5
"""Examples are packed after a common prefix of at least this share of their prompt."""


class Row(NamedTuple):
    """A shared prefix, and the branches after it."""

    prefix: list[int]
    branches: list[Branch]

    @property
    def tokens(self) -> int:
        """The number of tokens."""
        return len(self.prefix) + sum(len(ids) for ids, _ in self.branches)

    @property
    def targets(self) -> int:
        """The number of tokens to learn."""
        return sum(sum(mask) for _, mask in self.branches)


class Step(NamedTuple):
    """One optimizer step."""

    rows: list[Row]
    progress: float
    """The share of the whole training that comes before it."""
    groups: int
    """Groups of turns up to its end, since the start of the training."""


def make_rows(examples: Sequence[Example], most_tokens: int) -> list[Row]:
    """Rows of at most ``most_tokens`` tokens; an example that is longer is a row by itself.

    Sorted, examples with long common prefixes are neighbours.
    """
    rows: list[Row] = []
    group: list[Example] = []
    shared = tokens = 0
    for example in sorted(examples, key=lambda each: each.prompt_ids):
        common = _common_prefix(group[0].prompt_ids[:shared], example.prompt_ids) if group else 0
        added = len(example) - common
        if group and common >= _SHARED * len(example.prompt_ids) and tokens + added <= most_tokens:
            tokens += added + (len(group) * (shared - common))
            shared, group = common, [*group, example]
            continue
        rows += [_row(group, shared)] if group else []
        group, shared, tokens = [example], len(example.prompt_ids), len(example)
    return [*rows, _row(group, shared)] if group else rows


def make_steps(groups: Iterable[list[Row]], tokens_per_step: int, *, first: int, total: int) -> Iterator[Step]:
    """Steps of about ``tokens_per_step`` tokens; a group of rows is never divided.

    ``groups`` begin with the group of number ``first`` of ``total``.
    """
    rows: list[Row] = []
    begin = end = first
    for group in groups:
        if rows and sum(each.tokens for each in (*rows, *group)) > tokens_per_step:
            yield Step(rows, begin / total, end)
            rows, begin = [], end
        rows = rows + group
        end += 1
    if rows:
        yield Step(rows, begin / total, end)


def forwards(rows: Sequence[Row], tokens_per_forward: int, *, one_row: bool) -> Iterator[list[Row]]:
    """The rows that are computed together.

    With ``one_row`` they have at most ``tokens_per_forward`` tokens; else they are padded to the longest one.
    """
    batch: list[Row] = []
    for row in rows if one_row else sorted(rows, key=lambda each: each.tokens):
        size = sum(each.tokens for each in batch) + row.tokens if one_row else row.tokens * (len(batch) + 1)
        if batch and size > tokens_per_forward:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def prefetch(items: Iterable[Step], size: int = 8) -> Iterator[Step]:
    """The same items, made ahead by another thread."""
    ready: queue.Queue[tuple[Step | None, BaseException | None]] = queue.Queue(size)
    stopped = threading.Event()

    def put(item: Step | None, error: BaseException | None) -> None:
        while not stopped.is_set():
            try:
                return ready.put((item, error), timeout=0.1)
            except queue.Full:
                continue

    def produce() -> None:
        try:
            for item in items:
                put(item, None)
                if stopped.is_set():
                    return
            put(None, None)
        except BaseException as error:
            put(None, error)

    thread = threading.Thread(target=produce, name="sft-batches", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        stopped.set()
        thread.join()


def _row(group: list[Example], shared: int) -> Row:
    branches: list[Branch] = [
        (each.prompt_ids[shared:] + each.reply_ids, [0] * (len(each.prompt_ids) - shared) + [1] * len(each.reply_ids))
        for each in group
    ]
    return Row(group[0].prompt_ids[:shared], branches)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    length = min(len(a), len(b))
    return next((i for i in range(length) if a[i] != b[i]), length)
