"""Every setting is an option, KEY=VALUE and a key of a file; a wrong one is refused in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from groundwire.rewards import JudgeSettings
from groundwire.train import fit
from groundwire.train.algorithms.model_size import rl_learning_rate, sft_learning_rate
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.gone import OF_RUN
from groundwire.train.config.overrides import merge_overrides, parse_overrides, read_settings
from groundwire.train.config.presets import PRESETS, VERL_PRESETS
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.config.verl_names import SHARED
from groundwire.train.run import app
from groundwire.train.verl.hydra_config import flat_config

JUDGED = ("--reward", "rule_judge_hybrid", "--judge-model", "m")


def _printed(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["--print-config", *arguments])


def _config(*arguments: str) -> dict[str, Any]:
    result = _printed(*arguments)
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output[result.output.index("{") :]))


def _given(*arguments: str) -> dict[str, Any]:
    return merge_overrides({}, parse_overrides(arguments))


PLAIN = [name for name in RunConfig.model_fields if name not in ("agent_options", "judge", "verl")]


@pytest.mark.parametrize("name", PLAIN)
def test_every_setting_is_an_option_and_a_name(name: str) -> None:
    value = getattr(resolve("fast"), name)
    value = {"agent": "m:f", "reward": "executes", "data_dir": "d", "agent_match": "x"}.get(name, value)
    value = "http://h:1" if name == "external_store_address" else value
    assert _given(f"{name}={json.dumps(value)}") == {name: value}
    [option] = [each for each in typer.main.get_command(app).params if each.name == name]
    assert f"--{name.replace('_', '-')}" in option.opts


@pytest.mark.parametrize("preset", [*PRESETS.values(), *VERL_PRESETS.values()])
def test_every_setting_of_a_preset_can_be_given(preset: dict[str, Any]) -> None:
    names = {name: value for name, value in preset.items() if "." not in name}
    options = {f"agent_options.{name}": value for name, value in names.get("agent_options", {}).items()}
    given = {name: value for name, value in names.items() if name != "agent_options"}
    assert merge_overrides({}, {**given, **options}) == names


def test_learning_rates_fit_the_size_of_the_model() -> None:
    rates = [rl_learning_rate(parameters) for parameters in (1_100_000, 135_000_000, 7_000_000_000)]
    assert rates == pytest.approx([2e-4, 1e-5, 1e-6], rel=0.1)
    assert rl_learning_rate(7_000_000_000, lora=True) == 1e-5
    assert sft_learning_rate(135_000_000) == pytest.approx(5e-4, rel=0.1)
    assert sft_learning_rate(7_000_000_000) == 2e-5
    assert (rl_learning_rate(1000), sft_learning_rate(1000)) == (2e-4, 2e-3)


def test_the_preset_hf_has_a_learning_rate_for_the_models_size() -> None:
    hf = ("--trainer", "local", "--config", "hf")
    assert _config(*hf)["learning_rate"] == pytest.approx(2e-4, rel=0.1)
    assert _config(*hf, "--lora-rank", "8")["learning_rate"] == pytest.approx(2e-3, rel=0.1)
    assert _config(*hf, "--learning-rate", "3e-6")["learning_rate"] == 3e-6
    assert _config("--trainer", "local")["learning_rate"] == 4e-4


def test_a_setting_as_option_and_by_name_is_one_setting() -> None:
    assert _config("--trainer", "local", "--learning-rate", "1e-4")["learning_rate"] == 1e-4
    assert _config("--trainer", "local", "--steps", "3", "steps=3")["steps"] == 3
    assert _config("--trainer", "local", "--allow-shared")["allow_shared"] is True


def test_options_of_the_agent_join_those_of_the_preset() -> None:
    given = ("--agent-option", "show_keys=false", "--agent-option", "max_turns=5", "agent_options.prompt_profile=short")
    options = _config("--config", "hf", *given)["agent_options"]
    assert (options["show_keys"], options["max_turns"], options["prompt_profile"]) == (False, 5, "short")
    assert options["execution_truncate"] == 2048


@pytest.mark.parametrize("given", ["--max-turns=3", "--no-show-keys", "max_turns=3", "keys=true", "--check-last"])
def test_a_setting_that_is_an_option_of_the_agent_says_so(given: str) -> None:
    result = _printed("--trainer", "local", given)
    assert result.exit_code == 2
    name = {"--max-turns=3": "max_turns", "max_turns=3": "max_turns", "--check-last": "check_last"}.get(
        given, "show_keys"
    )
    assert f"is no setting any more: it is an option of the SQL agents: --agent-option {name}=VALUE" in " ".join(
        re.sub("[│╭╰─╮╯]", "", result.output).split()
    )


@pytest.mark.parametrize("name", OF_RUN)
def test_a_name_that_is_gone_gives_one_sentence_wherever_it_is_given(name: str, tmp_path: Path) -> None:
    sentence = f"{name} is no setting any more: {OF_RUN[name]}"
    file = tmp_path / "run.toml"
    file.write_text(f'{name} = "1"\n')
    option = f"--{name.replace('_', '-')}"
    for arguments in ([f"{name}=1"], ["--config", str(file)], [option, "1"]):
        result = _printed("--trainer", "local", *arguments)
        assert result.exit_code == 2
        assert sentence.replace(name, option if arguments[0] == option else name, 1) in " ".join(
            re.sub("[│╭╰─╮╯]", "", result.output).split()
        )
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        fit(len, [{"question": "a"}, {"question": "b"}], lambda task, answer: 1.0, **{name: 1})


def test_both_trainers_replace_as_many_groups_as_the_budget_says() -> None:
    assert resolve("fast", tasks_per_step=10, sampling_budget=1.2).most_groups == 12


def test_there_are_few_settings() -> None:
    tables = {"agent_options", "judge", "verl"}
    assert len(RunConfig.model_fields.keys() - tables - {"config"}) <= 72
    assert len(SFTSettings.model_fields.keys() - tables) <= 20
    assert len(JudgeSettings.model_fields) <= 15


def test_old_names_are_accepted() -> None:
    config = _config("--trainer", "local", "--judge", "swap=true", *JUDGED)
    assert config["judge"]["swap_order"] is True


def test_a_setting_of_the_judge_by_its_name() -> None:
    config = _config("--trainer", "local", "judge.temperature=0.5", "judge.samples=3", *JUDGED)
    assert (config["judge"]["temperature"], config["judge"]["samples"]) == (0.5, 3)


def test_a_setting_by_its_name_wins_over_the_presets() -> None:
    config = _config("--trainer", "local", "--config", "hf", "learning_rate=1e-4", "group_size=16", "allow_shared=true")
    assert (config["learning_rate"], config["group_size"], config["allow_shared"]) == (1e-4, 16, True)
    assert config["max_tokens"] == 512


def test_a_setting_of_the_run_sets_the_one_of_verl() -> None:
    given = _given("learning_rate=1e-5", "data.shuffle=false", "val_every=-1")
    chosen = flat_config(resolve("fast", trainer="verl", **given))
    assert chosen[SHARED["learning_rate"]] == 1e-5
    assert chosen[SHARED["val_every"]] == -1
    assert chosen["data.shuffle"] is False
    given = _given("learning_rate=1e-5", f"{SHARED['learning_rate']}=1e-6")
    with pytest.raises(ConfigError, match="lr=1e-06 but learning_rate is 1e-05: they are one setting"):
        resolve("fast", trainer="verl", **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["learning_rat=1"], "unknown setting learning_rat; did you mean learning_rate?"),
        (["mystery=1"], "unknown setting mystery; docs/settings.md lists all settings"),
        (["learning_rate=high"], "learning_rate is 'high'; it must be a number"),
        (["learning_rate=NaN"], "learning_rate is nan; it must be a finite number"),
        (["group_size=2.5"], "group_size is 2.5; it must be a whole number"),
        (["group_size=true"], "group_size is True; it must be a whole number"),
        (["allow_shared=1"], "allow_shared is 1; it must be true or false"),
        (["group_size=4", "group_size=5"], "group_size is given twice"),
        (["group_size=1"], "group_size is 1; it must be at least 2"),
        (["--steps", "4", "steps=3"], "steps=3 but --steps 4: they are one setting, give it once"),
        (["--judge-model", "m", "judge.model=n"], "judge.model=n but --judge model=m: they are one setting"),
        (["--config", "nope.toml"], "nope.toml cannot be read: No such file"),
        (["data.seed=3"], "data.seed=… is a setting of verl's: it needs --trainer verl"),
        (["verl={}"], "unknown setting verl"),
        (["--tasks", "50"], "domain is 50: --tasks takes a file of tasks; how many are validated is --val-tasks"),
    ],
)
def test_a_wrong_setting_is_a_one_line_error(arguments: list[str], message: str) -> None:
    result = _printed("--trainer", "local", *arguments)
    assert result.exit_code == 2
    assert re.search(f"^error: {re.escape(message)}", result.output, re.MULTILINE)
    assert "Traceback" not in result.output


def test_a_resumed_run_keeps_its_settings_except_changed_ones(tmp_path: Path) -> None:
    begun = resolve("hf", learning_rate=3e-5, group_size=4)
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=begun.to_dict())
    config = _config("--resume", str(run.path), "learning_rate=1e-5")
    assert (config["learning_rate"], config["group_size"]) == (1e-5, 4)


def test_a_resumed_verl_run_takes_a_new_value_under_either_name() -> None:
    from groundwire.train.api.resume import config_for_resume

    class Stored:
        path = Path("a-run")

        def config(self) -> dict[str, Any]:
            return resolve("fast", trainer="verl", verl={SHARED["learning_rate"]: 1e-4}).to_dict()

    config = config_for_resume(Stored(), _given("learning_rate=1e-5"))  # type: ignore[arg-type]
    assert (config.learning_rate, dict(config.verl)) == (1e-5, {})


TOML = """
config = "hf"
steps = 7
track = ["tensorboard"]
[agent_options]
show_keys = false
[judge]
temperature = 0.5
[verl]
data.shuffle = false
"""
YAML = """
config: hf
steps: 7
learning_rate: 1e-5
judge: {temperature: 0.5}
"""


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML)])
def test_the_command_line_overrides_a_file(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text.partition("[verl]")[0])
    given = ("--trainer", "local", "--config", str(tmp_path / name), "--judge", "max_tokens=99", *JUDGED)
    config = _config(*given, "steps=8")
    assert (config["config"], config["steps"], config["max_tokens"]) == ("hf", 8, 512)
    assert (config["judge"]["temperature"], config["judge"]["max_tokens"]) == (0.5, 99)
    assert _config(*given)["steps"] == 7
    assert _config(*given, "--ci-fast")["steps"] == 1


def test_a_file_may_have_settings_of_verl(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    assert read_settings(tmp_path / "a.toml")["verl"] == {"data.shuffle": False}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "stepz = 3", "a.toml: unknown setting stepz; did you mean steps"),
        ("a.toml", "steps = '3'", "a.toml: steps is '3'; it must be a whole number"),
        ("a.toml", "steps = ", "a.toml is not valid TOML: Invalid value"),
        (
            "a.yaml",
            "steps: [",
            "a.yaml is not valid YAML: expected the node content, but found",
        ),
        ("a.yaml", "- steps", "a.yaml holds no settings"),
        (
            "a.yaml",
            "judge: {modle: x}",
            "a.yaml: unknown judge setting 'modle'; did you mean model? docs/settings.md lists",
        ),
        ("a.yaml", "config: nope", "unknown config 'nope'; known: fast, hf"),
        ("a.yaml", "seed: 1\nseed: 2", "a.yaml is not valid YAML: 'seed' is given twice: keep one"),
        ("a.yaml", "judge: {seed: 1, 'seed': 2}", "a.yaml is not valid YAML: 'seed' is given twice"),
        ("a.yaml", "judge.samples: 1\njudge: {samples: 2}", "'judge.samples' is given twice"),
        ("a.toml", "seed = 1\nseed = 2", "a.toml is not valid TOML: Cannot overwrite a value"),
        ("a.toml", "'judge.samples' = 1\n[judge]\nsamples = 2", "'judge.samples' is given twice"),
    ],
)
def test_a_wrong_file_is_a_one_line_error(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    result = _printed("--trainer", "local", "--config", str(tmp_path / name))
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_no_table_has_a_key_twice_wherever_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "prompts.json").write_text('{"system": "a", "system": "b"}')
    for arguments in (["--prompts", str(tmp_path / "prompts.json")], ['agent_options.a={"b": 1, "b": 2}']):
        result = _printed("--trainer", "local", *arguments)
        assert result.exit_code == 2
        assert "is given twice: keep one" in result.output
