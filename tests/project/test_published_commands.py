"""The commands of the published tutorials do what their readers expect, or name the equivalent."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shlex
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT
from spider_folder import make_spider
from typer.testing import CliRunner

from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.tools.errors import CommandError
from groundwire.tools.startup import read_env_file
from groundwire.train import run
from groundwire.train.api.training import make_job
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import parse_overrides
from groundwire.train.config.presets import VERL_PRESETS
from groundwire.train.config.resolve import differences, resolve
from groundwire.train.job.prepare import check_store_settings
from groundwire.train.store.__main__ import app as store_app
from groundwire.train.store.errors import StoreAddressError
from groundwire.train.verl.hydra_config import flat_config

PAGE = (ROOT / "docs" / "published.md").read_text(encoding="utf-8")


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
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert errors == result.stderr.splitlines()[-1:]
    return errors[0]


def test_an_env_file_names_the_folder_with_spider(tmp_path: Path) -> None:
    make_spider(tmp_path / "data")
    Path(".env").write_text("# the tutorial's\nexport VERL_SPIDER_DATA_DIR='data'\n")
    assert configured().startswith("data: VERL_SPIDER_DATA_DIR data: train 1 tasks")


def test_the_environment_wins_over_an_env_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONE_API_KEY", "mine")
    monkeypatch.setenv("TWO_API_KEY", "")
    monkeypatch.delenv("TWO_API_KEY")
    Path(".env").write_text("ONE_API_KEY=file\nTWO_API_KEY=file\n")
    read_env_file()
    assert [os.environ[f"{name}_API_KEY"] for name in ("ONE", "TWO")] == ["mine", "file"]
    Path(".env").write_bytes(b"KEY=\xff\n")
    with pytest.raises(CommandError, match="save it as UTF-8"):
        read_env_file()


def test_an_env_file_loads_no_code_into_our_process_and_sends_no_key_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = ["LD_PRELOAD", "PYTHONPATH_", "PYTHONSTARTUP", "PATH_", "WANDB__EXECUTABLE", "GROUNDWIRE_USERS_PYTHONPATH"]
    taken = ["HF_TOKEN", "MY_KEY", "WANDB_BASE_URL"]
    for name in (*others, *taken, "OPENAI_BASE_URL", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    Path(".env").write_text("".join(f"{name}=file\n" for name in (*others, *taken, "OPENAI_BASE_URL", "PATH")))
    path = os.environ["PATH"]
    read_env_file(names=["MY_KEY"])
    assert not {*others, "OPENAI_BASE_URL"} & os.environ.keys()
    assert [os.environ[name] for name in (*taken, "PATH")] == ["file", "file", "file", path]
    assert f"and rewards, not {', '.join(others[:5])} and 2 more (docs/security.md)" in capsys.readouterr().err
    monkeypatch.setenv("GROUNDWIRE_TOKEN", "mine")
    Path(".env").write_text("OPENAI_BASE_URL=${OPENAI_API_KEY}file\nOPENAI_API_KEY=${GROUNDWIRE_TOKEN}file\n")
    monkeypatch.delenv("OPENAI_API_KEY")
    read_env_file()
    assert (os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]) == ("file", "file")


def test_a_preset_may_be_named_alone() -> None:
    text = configured("hf")
    assert json.loads(text[text.index("{") :])["agent_options"]["max_turns"] == 3
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
    found = {name: settings[name] for name in ("agent_match", "steps", "proxy_host", "track", "verl")}
    assert found == {"agent_match": "write", "steps": 1, "proxy_host": "127.0.0.1:9999", "track": [], "verl": {}}
    assert "the local trainer has grpo alone" in refused("--trainer", "local", "algorithm.adv_estimator=gae")


def test_the_published_arguments_have_their_meaning_for_verl() -> None:
    given = ["algorithm.adv_estimator=grpo", "agentlightning.port=9999", "trainer.logger=[console,wandb,swanlab]"]
    config = resolve("fast", trainer="verl", verl=parse_overrides(given))
    assert (config.proxy_address[1], config.track) == (9999, ["wandb", "swanlab"])
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
    assert "agent_options.table_info_truncate: 4000, published 2048" in configured("--trainer", "local", "--diff")


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


# -- every line of docs/published.md, one by one


def settings_of(*arguments: str) -> dict[str, Any]:
    """The settings that ``train.run ... --print-config`` prints, with the local trainer."""
    text = configured(*arguments)
    return dict(json.loads(text[text.index("{") :]))


def _presets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("qwen", "fast", "llama"):
        lines = configured("--trainer", "verl", name, "--diff").splitlines()
        other = [line for line in lines if line.startswith("model: ")]
        assert bool(other) == (name in ("fast", "llama")), name


def _npu(monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (("npu",), ("--config", "npu"), ("--trainer", "verl", "--config", "npu")):
        assert "the preset npu is gone, as it never ran on an Ascend device" in refused(*arguments)


def _active_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of("--active-agent", "write")["agent_match"] == "write"
    assert settings_of("--agent-match", "write")["agent_match"] == "write"


def _ci_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings_of("--ci-fast")
    assert (found["steps"], found["val_tasks"]) == (1, 32)


def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("fast", trainer="verl")
    assert (config.model, config.steps, config.val_tasks) == ("Qwen/Qwen2.5-Coder-0.5B-Instruct", 1, 0)


def _llm_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of("--llm-proxy") == settings_of("llm_proxy=true") == settings_of()


def _external_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_MANAGED_STORE", "0")
    with pytest.raises(
        CommandError, match="AGL_MANAGED_STORE=0 asks for an external store: give --external-store-address"
    ):
        check_store_settings(None)
    address = "http://127.0.0.1:9"
    assert settings_of("--external-store-address", address)["external_store_address"] == address
    with pytest.raises(StoreAddressError, match=f"no store answers at {address}"):
        check_store_settings(address, wait_s=0.0)  # test_external.py has a run with one


def _store(monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(store_app, ["--port", "4747"])
    assert "give one of --path FILE, --memory" in result.stderr  # test_external.py starts stores, agl's also


def _debugging(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start() -> ScriptedPolicyServer:
        server = ScriptedPolicyServer(lambda body: f"```sql\nSELECT {len(str(body))}\n``` CORRECT", model="big")
        await server.start()
        return server

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result()
        result = CliRunner().invoke(run.app, ["--dev", "--base-url", server.base_url, "--model", "big"])
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
    assert result.exit_code == 0, result.output
    for node in ("write_query", "check_query"):
        assert result.stdout.count(node) >= 10
    assert result.stdout.count("reward") >= 10


def _data_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    make_spider(Path("data"))
    assert configured("--data-dir", "data").startswith(f"data: --data-dir {Path('data').resolve()}: train 1 tasks")
    for name in ("SPIDER_DATA_DIR", "VERL_SPIDER_DATA_DIR"):
        with monkeypatch.context() as environment:
            environment.setenv(name, "data")
            assert configured().startswith(f"data: {name} data: train 1 tasks")


def _files(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("data.train_files", "data.val_files"):
        assert f"{key} cannot be set: give the folder" in refused("--config", "fast", f"{key}=x.parquet")


def _estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of("algorithm.adv_estimator=grpo")["verl"] == {}
    given = parse_overrides(["algorithm.adv_estimator=rloo"])
    assert flat_config(resolve("qwen", trainer="verl", verl=given))["algorithm.adv_estimator"] == "rloo"


def _port(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of("agentlightning.port=9999")["proxy_host"] == "127.0.0.1:9999"


def _logger(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("qwen", trainer="verl", verl=parse_overrides(["trainer.logger=[console,wandb,swanlab]"]))
    assert config.track == ["wandb", "swanlab"]


def _verls_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve("qwen", trainer="verl", verl=parse_overrides(["trainer.n_gpus_per_node=1"]))
    assert flat_config(config, n_gpus=8)["trainer.n_gpus_per_node"] == 1


def _runners(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of("--n-runners", "10")["n_runners"] == 10


def _agent(monkeypatch: pytest.MonkeyPatch) -> None:
    row = PAGE[PAGE.index("LitSQLAgent(") :]
    options = dict(re.findall(r"(\w+)=(\d+)", row[: row.index("|")]))
    found = settings_of(*shlex.split(row.split("`")[2]))
    assert {name: str(found["agent_options"][name]) for name in options} == options


WALK: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "python train_sql_agent.py qwen": _presets,
    "python train_sql_agent.py npu": _npu,
    "--active-agent write": _active_agent,
    "python train_sql_agent.py fast": _fast,
    "--ci-fast": _ci_fast,
    "--llm-proxy": _llm_proxy,
    "--external-store-address URL": _external_store,
    "agl store --port 4747": _store,
    "python sql_agent.py": _debugging,
    "VERL_SPIDER_DATA_DIR": _data_dir,
    "data.train_files=...": _files,
    "algorithm.adv_estimator=grpo": _estimator,
    "agentlightning.port=9999": _port,
    "trainer.logger=[console,wandb,swanlab]": _logger,
    "trainer.n_gpus_per_node=1": _verls_own,
    "Trainer(n_runners=10)": _runners,
    'Trainer(adapter={"agent_match": "write"})': _active_agent,
    "LitSQLAgent(max_turns=3, table_info_truncate=2048, execution_truncate=2048)": _agent,
}
"""What a reader types, by the first part of each line of the page's table, and a check that it means the same here."""


def test_every_line_of_the_page_is_tried() -> None:
    table = PAGE.split("\n## ")[2]
    assert table.startswith("Commands and settings")
    assert re.findall(r"^\| `([^`]+)`", table, re.MULTILINE) == list(WALK)


@pytest.mark.parametrize("published", WALK)
def test_a_published_line_means_here_what_it_meant(published: str, monkeypatch: pytest.MonkeyPatch) -> None:
    WALK[published](monkeypatch)


def test_every_command_of_an_accuracy_is_a_preset_with_its_model() -> None:
    rows = re.findall(r"^\| ([A-Z][\w.-]+) \| .*`python -m train.run ([\w-]+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for model, preset in rows:
        assert VERL_PRESETS[preset]["model"].endswith(f"/{model}")
