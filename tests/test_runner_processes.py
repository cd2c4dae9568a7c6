"""Runners in processes of their own do the same work, and end with the run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import domains
from train.config import resolve
from train.local.trainer import LocalTrainer
from train.rundir import RunDir


class _Nobody:
    def phase(self, text: str, total: int) -> None: ...

    def tick(self) -> None: ...

    def step(self, line: dict[str, object]) -> None: ...


def test_rollouts_are_run_in_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NotImplementedError  # as with uvloop's policy

    monkeypatch.setattr(asyncio, "get_child_watcher", none, raising=False)
    monkeypatch.setattr(asyncio.events, "get_child_watcher", none, raising=False)
    config = resolve("fast", runner_processes=2, n_runners=8, seed=1)
    domain = domains.get("spider")
    trainer = LocalTrainer(config, data=domain.load(None), domain=domain, run=RunDir(tmp_path), watcher=_Nobody())
    outcomes = trainer.dev(6)
    assert [outcome.status for outcome in outcomes] == ["succeeded"] * 6
    assert all(outcome.calls for outcome in outcomes)
