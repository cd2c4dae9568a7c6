"""A setting has one way in: its option, or its name; what cannot be is one sentence."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import by_name, parse_overrides, setting_types
from groundwire.train.config.presets import PRESETS
from groundwire.train.config.resolve import resolve
from groundwire.train.config.verl_names import SHARED
from groundwire.train.config.verl_presets import VERL_PRESETS
from groundwire.train.run import app, main
from groundwire.train.verl.hydra_config import flat_config

OPTIONS = inspect.signature(main).parameters.keys()


def _printed(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["--print-config", *arguments])


def _config(*arguments: str) -> dict[str, Any]:
    result = _printed(*arguments)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output[result.output.index("{") :]))


def test_every_setting_has_exactly_one_way_in() -> None:
    for name in setting_types().keys() - {"verl"}:
        arguments = [f"{name}={json.dumps(getattr(resolve('fast'), name), default=list)}"]
        if name in OPTIONS:
            with pytest.raises(ConfigError, match=f"give it as the option --{name.replace('_', '-')}"):
                by_name(parse_overrides(arguments), options=OPTIONS)
        else:
            assert by_name(parse_overrides(arguments), options=OPTIONS) == {
                name: getattr(resolve("fast"), name),
                "verl": None,
            }


@pytest.mark.parametrize("preset", [*PRESETS.values(), *VERL_PRESETS.values()])
def test_whatever_a_preset_changes_the_command_line_can(preset: dict[str, Any]) -> None:
    names = {name for name in preset if "." not in name and name not in OPTIONS}
    assert names <= by_name({name: preset[name] for name in names}, options=OPTIONS).keys()


def test_a_setting_by_its_name_wins_over_the_presets() -> None:
    config = _config("--trainer", "local", "--config", "hf", "learning_rate=1e-4", "group_size=16", "show_keys=false")
    assert (config["learning_rate"], config["group_size"], config["show_keys"]) == (1e-4, 16, False)
    assert config["max_tokens"] == 512


def test_with_verl_it_is_verls() -> None:
    given = by_name(parse_overrides(["learning_rate=1e-5", "data.shuffle=false", "val_every=-1"]), options=OPTIONS)
    chosen = flat_config(resolve("fast", trainer="verl", **given))
    assert chosen[SHARED["learning_rate"]] == 1e-5
    assert chosen[SHARED["val_every"]] == -1
    assert chosen["data.shuffle"] is False
    given = by_name(parse_overrides(["learning_rate=1e-5", f"{SHARED['learning_rate']}=1e-6"]), options=OPTIONS)
    with pytest.raises(ConfigError, match="lr=1e-06 but learning_rate is 1e-05: they are one setting"):
        resolve("fast", trainer="verl", **given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["learning_rat=1"], "unknown setting learning_rat=1; did you mean learning_rate?"),
        (["batch=1"], "unknown setting batch=1; python -m train.run --print-config shows all there are"),
        (["learning_rate=high"], "learning_rate is 'high'; it must be a number"),
        (["learning_rate=NaN"], "learning_rate is nan; it must be a number"),
        (["group_size=2.5"], "group_size is 2.5; it must be a whole number"),
        (["group_size=true"], "group_size is True; it must be a whole number"),
        (["show_keys=1"], "show_keys is 1; it must be true or false"),
        (["group_size=4", "group_size=5"], "group_size is given twice"),
        (["group_size=1"], "group_size is 1; a rollout needs another one"),
        (["steps=3"], "steps=3: give it as the option --steps"),
        (["--steps", "3", "steps=3"], "steps=3: give it as the option --steps"),
        (["data.seed=3"], "data.seed=… is a setting of verl's: it needs --trainer verl"),
        (["verl={}"], "unknown setting verl"),
    ],
)
def test_what_cannot_be_set_is_one_sentence(arguments: list[str], said: str) -> None:
    result = _printed("--trainer", "local", *arguments)
    assert result.exit_code == 2
    assert re.search(f"^error: {re.escape(said)}", result.output, re.MULTILINE)
    assert "Traceback" not in result.output


def test_a_resumed_run_keeps_its_settings_and_may_change_them(tmp_path: Path) -> None:
    begun = resolve("hf", learning_rate=3e-5, group_size=4)
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=begun.to_dict())
    config = _config("--resume", str(run.path), "learning_rate=1e-5")
    assert (config["learning_rate"], config["group_size"]) == (1e-5, 4)


def test_a_resumed_run_of_verls_takes_the_new_value_under_either_name() -> None:
    from groundwire.train.cli.resume import config_for_resume

    class Stored:
        path = Path("a-run")

        def config(self) -> dict[str, Any]:
            return resolve("fast", trainer="verl", verl={SHARED["learning_rate"]: 1e-4}).to_dict()

    none = dict.fromkeys(("trainer", "backend", "agent", "domain", "model", "data_dir", "seed"))
    config = config_for_resume(Stored(), None, {**none, **by_name({"learning_rate": 1e-5}, options=OPTIONS)})  # type: ignore[arg-type]
    assert (config.learning_rate, dict(config.verl)) == (1e-5, {})
