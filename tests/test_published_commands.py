"""The commands of the published tutorials do what their readers expect, or name the equivalent."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
from spider_folder import make_spider
from typer.testing import CliRunner

from groundwire.tools.env_file import read_env_file
from groundwire.tools.errors import CommandError
from groundwire.train import run
from groundwire.train.api.training import make_job
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import parse_overrides
from groundwire.train.config.published import differences
from groundwire.train.config.resolve import resolve
from groundwire.train.config.verl_presets import VERL_PRESETS
from groundwire.train.verl.hydra_config import flat_config


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("SPIDER_DATA_DIR", "VERL_SPIDER_DATA_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def configured(*arguments: str) -> str:
    """What ``train.run ... --print-config`` prints, its notes first."""
    result = CliRunner().invoke(run.app, [*arguments, "--print-config"])
    assert result.exit_code == 0, result.output
    return result.stderr + result.stdout


def refused(*arguments: str) -> str:
    """The one-line error of ``train.run``."""
    result = CliRunner().invoke(run.app, [*arguments, "--print-config"])
    assert result.exit_code != 0, result.output
    notes = [line for line in result.stderr.splitlines() if not line.startswith("data: ")]
    assert len(notes) == 1
    assert notes[0].startswith("error: ")
    return notes[0]


def test_an_env_file_names_the_folder_with_spider(tmp_path: Path) -> None:
    make_spider(tmp_path / "data")
    Path(".env").write_text("# the tutorial's\nexport VERL_SPIDER_DATA_DIR='data'\n")
    assert configured().startswith("data: VERL_SPIDER_DATA_DIR data: train 1 tasks")


def test_the_environment_wins_over_an_env_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUNDWIRE_TEST_ONE", "mine")
    monkeypatch.setenv("GROUNDWIRE_TEST_TWO", "")
    monkeypatch.delenv("GROUNDWIRE_TEST_TWO")
    Path(".env").write_text("GROUNDWIRE_TEST_ONE=file\nGROUNDWIRE_TEST_TWO=file\n")
    read_env_file()
    assert [os.environ[f"GROUNDWIRE_TEST_{name}"] for name in ("ONE", "TWO")] == ["mine", "file"]
    Path(".env").write_bytes(b"KEY=\xff\n")
    with pytest.raises(CommandError, match="save it as UTF-8"):
        read_env_file()


def test_a_preset_may_be_named_alone() -> None:
    text = configured("hf")
    assert json.loads(text[text.index("{") :])["max_turns"] == 3
    assert "hf but --config fast: give one preset" in refused("hf", "--config", "fast")


def test_a_preset_of_verl_alone_asks_for_verl() -> None:
    if importlib.util.find_spec("verl") is None:
        assert "verl is not installed" in refused("qwen")


def test_the_published_arguments_have_their_meaning_for_the_local_trainer() -> None:
    text = configured(
        *("--trainer", "local", "--active-agent", "write", "--ci-fast", "--llm-proxy", "algorithm.adv_estimator=grpo"),
        *("agentlightning.port=9999", "trainer.logger=[console]"),
    )
    settings = json.loads(text[text.index("{") :])
    found = {name: settings[name] for name in ("agent_match", "steps", "proxy_port", "track", "verl")}
    assert found == {"agent_match": "write", "steps": 1, "proxy_port": 9999, "track": [], "verl": {}}
    assert "the local trainer has grpo alone" in refused("--trainer", "local", "algorithm.adv_estimator=gae")


def test_the_published_arguments_have_their_meaning_for_verl() -> None:
    given = ["algorithm.adv_estimator=grpo", "agentlightning.port=9999", "trainer.logger=[console,wandb,swanlab]"]
    config = resolve("fast", trainer="verl", verl=parse_overrides(given))
    assert (config.proxy_port, config.track) == (9999, ["wandb", "swanlab"])
    flat = flat_config(config)
    assert flat["trainer.logger"] == ["console", "wandb", "swanlab", "file"]
    assert "agentlightning.port" not in flat


@pytest.mark.parametrize("trainer", ["local", "verl"])
def test_files_of_tasks_are_refused_with_the_equivalent(trainer: str) -> None:
    message = refused("--trainer", trainer, "--config", "fast", "data.train_files=data/train_spider.parquet")
    assert "data.train_files cannot be set: give the folder of its files with --data-dir" in message


def test_the_reference_preset_is_the_published_recipe() -> None:
    config = resolve("qwen", trainer="verl")
    assert [line.partition(":")[0] for line in differences(config, flat_config(config))] == [
        "algorithm.adv_estimator",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "trainer.project_name",
    ]


def test_the_differences_from_the_published_recipe_are_printed_without_verl() -> None:
    text = configured("--trainer", "verl", "--config", "llama3b", "--diff")
    assert "model: meta-llama/Llama-3.2-3B-Instruct, published Qwen/Qwen2.5-Coder-1.5B-Instruct" in text
    assert "table_info_truncate" not in text
    assert "table_info_truncate: 4000, published 2048" in configured("--trainer", "local", "--diff")


def test_fast_is_one_step_with_the_whole_validation() -> None:
    config = resolve("fast", trainer="verl")
    assert (config.steps, config.val_tasks, config.val_every) == (1, 0, 1)


def test_every_published_experiment_is_a_preset() -> None:
    names = {
        f"qwen3b-turns{turns}-chars{chars}{check}"
        for turns in (1, 3)
        for chars in (2048, 4096)
        for check in ("", "-check")
    }
    assert {"qwen", "qwen3b", "llama", "llama3b", *names} <= VERL_PRESETS.keys()
    config = resolve("qwen3b-turns1-chars4096-check", trainer="verl")
    found = (config.max_turns, config.table_info_truncate, config.execution_truncate, config.agent_match)
    assert found == (1, 4096, 4096, "write|check")


def test_another_agent_than_the_sql_graph_has_no_agent_match_of_a_preset() -> None:
    assert resolve("qwen", trainer="verl").agent_match == "write"
    for given in ({"backend": "openai-agents"}, {"agent": "my_app:graph"}, {"domain": "medical"}):
        assert resolve("qwen", trainer="verl", **given).agent_match is None


def test_a_presets_tracker_is_used_if_somebody_is_logged_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found("json" if name == "wandb" else name))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert make_job({"config": "qwen", "trainer": "verl"}).config.track == []
    with pytest.raises(ConfigError, match="--track wandb: nobody is logged in: run wandb login, or set WANDB_API_KEY"):
        make_job({"trainer": "local", "track": ["wandb"]})
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert make_job({"config": "qwen", "trainer": "verl"}).config.track == ["wandb"]


def test_dev_with_verl_names_the_endpoint_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_BASE_URL", "OPENAI_API_BASE"):
        monkeypatch.delenv(name, raising=False)
    message = refused("--trainer", "verl", "--config", "qwen", "--dev")
    assert "--dev with --trainer verl starts no model: give an endpoint that has one with --base-url URL" in message
    assert "needs the name of its model" in refused("--dev", "--base-url", "http://127.0.0.1:9/v1")
