"""A setting out of range is refused with its name and value."""

from __future__ import annotations

import math

import pytest
from typer.testing import CliRunner

from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluate import app


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_runners": 0}, "n_runners is 0; it must be at least 1"),
        ({"n_runners": -1, "external_store_address": "http://h:1"}, "n_runners is -1; it must be at least 0"),
        ({"val_tasks": -1}, "val_tasks is -1; it must be at least 0"),
        ({"val_every": -1}, "val_every is -1; it must be at least 0"),
        (
            {"max_turns": 3},
            "max_turns is no setting any more: it is an option of the SQL agents: --agent-option max_turns=VALUE",
        ),
        ({"val_temperature": -1.0}, r"val_temperature is -1.0; it must be at least 0"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be above 0"),
        ({"group_size": 1}, "group_size is 1; it must be at least 2"),
    ],
)
def test_a_setting_out_of_range_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve("fast", trainer="local", **given)


@pytest.mark.parametrize(
    "name", [name for name, field in RunConfig.model_fields.items() if isinstance(field.default, float)]
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_must_be_finite(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}; it must be a finite number"):
        resolve("fast", **{name: value})


def test_the_discount_is_1_but_for_the_credit_that_would_have_no_effect_with_it() -> None:
    assert resolve("fast").credit_discount == 1.0
    assert resolve("fast", credit="discount").credit_discount == 0.9
    assert resolve("fast", credit="discount", credit_discount=0.5).credit_discount == 0.5
    with pytest.raises(ConfigError, match="credit is discount with a credit_discount of 1: all calls would weigh the"):
        resolve("fast", credit="discount", credit_discount=1.0)


def test_with_verl_minus_one_means_never() -> None:
    assert resolve("fast", trainer="verl", val_every=-1, checkpoint_every=-1).val_every == -1


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--n-runners=0", "n_runners is 0"),
        ("--temperature=nan", "error: --temperature is nan"),
        ("--val-tasks=-1", "error: val_tasks is -1; it must be at least 0"),
        ("temperature=-1", "error: temperature is -1; it must be at least 0"),
        ("val_tasks=x", "val_tasks is 'x'; it must be a whole number"),
        ("learning_rate=1", "unknown setting learning_rate"),
        ("judge.samples=0", "judge.samples is 0; it must be at least 1"),
    ],
)
def test_evaluate_refuses_settings_out_of_range(argument: str, message: str) -> None:
    done = CliRunner().invoke(app, [argument])
    assert done.exit_code == 2
    assert message in done.stderr
