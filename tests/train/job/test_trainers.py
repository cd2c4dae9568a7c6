"""What differs between the trainers is said by their classes."""

from __future__ import annotations

import pytest
from no_data import NoData

from groundwire.domains import TaskData
from groundwire.train.api.evaluation import check_endpoint
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.job.job import Job, ModelEndpoint
from groundwire.train.job.trainer import trainer_of


def _job(trainer: str, *, base_url: str = "", model: str = "m") -> Job:
    config = resolve("starter" if trainer == "verl" else "fast", trainer=trainer, model=model)
    endpoint = ModelEndpoint(base_url) if base_url else None
    data = TaskData(train=[], validation=[], source="test")
    return Job(config=config, data=data, domain=NoData(), backend=None, reward=None, endpoint=endpoint)  # type: ignore[arg-type]


def test_each_trainer_says_what_it_needs() -> None:
    traits = {
        name: (trainer.in_process, trainer.updates_model, trainer.takes_endpoint)
        for name in ("local", "verl", "gepa")
        for trainer in [trainer_of(name)]
    }
    assert traits == {"local": (True, True, False), "verl": (False, True, False), "gepa": (True, False, True)}
    assert _job("gepa").trainer.steps_shown(_job("gepa").config) == 1


@pytest.mark.parametrize(
    ("trainer", "base_url", "model", "dev", "problem"),
    [
        ("local", "http://h/v1", "m", False, "--base-url needs --dev or --trainer gepa"),
        ("verl", "", "m", True, "--dev with --trainer verl starts no model"),
        ("gepa", "http://h/v1", "starter", False, "needs the name of its model"),
        ("gepa", "http://h/v1", "m", False, ""),
        ("local", "http://h/v1", "m", True, ""),
    ],
)
def test_where_the_model_must_be_follows_from_the_trainer(
    trainer: str, base_url: str, model: str, dev: bool, problem: str
) -> None:
    job = _job(trainer, base_url=base_url, model=model)
    if not problem:
        check_endpoint(job, dev=dev)
    else:
        with pytest.raises(ConfigError, match=problem):
            check_endpoint(job, dev=dev)
