"""The configuration of verl: its keys exist, and a setting that run and verl share has one value."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import ROOT
from typer.testing import CliRunner

from groundwire.domains import TaskData
from groundwire.train.api.resume import config_for_resume
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import parse_overrides
from groundwire.train.config.presets import VERL_PRESETS
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.verl_names import ENGINE_VENDOR, SHARED
from groundwire.train.policy import STARTER, attention
from groundwire.train.run import app
from groundwire.train.verl import hydra_config
from groundwire.train.verl.hydra_config import attention_settings, check_context_length, compose, flat_config
from groundwire.train.verl.launch import VerlTraining
from groundwire.train.verl.rollout_workers import run_config

KEYS = set(json.loads((ROOT / "tests" / "data" / "verl_0_9_1_keys.json").read_text()))
HAS_VERL = importlib.util.find_spec("verl") is not None and importlib.util.find_spec("hydra") is not None
needs_verl = pytest.mark.skipif(not HAS_VERL, reason="verl is not installed; its settings are in data/")


def _resolve(preset: str = "fast", *arguments: str, **given: object) -> RunConfig:
    return resolve(preset, trainer="verl", verl=parse_overrides(arguments), **given)


@pytest.mark.parametrize("preset", VERL_PRESETS)
def test_every_key_of_a_preset_is_one_of_verl_or_marked_as_new(preset: str) -> None:
    chosen = flat_config(_resolve(preset))
    unknown = [key for key in chosen if not key.startswith("+") and key not in KEYS]
    assert not unknown
    assert not [key for key in chosen if key.startswith("+") and key[1:] in KEYS]


def test_classes_that_verl_imports_by_name_exist() -> None:
    chosen = flat_config(_resolve())
    module, _, name = chosen["+actor_rollout_ref.rollout.agent.agent_loop_manager_class"].rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    sampler = chosen["trainer.v1.sampler.custom_sampler.path"]
    assert sampler.startswith("pkg://")
    spec = importlib.util.find_spec(sampler.removeprefix("pkg://"))
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())  # importing it needs verl
    assert {"SyncSampler", "AsyncSampler"} <= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def test_vllms_workers_are_extended_for_adapters_alone() -> None:
    key = "engine_kwargs.vllm.worker_extension_cls"
    chosen = flat_config(_resolve("lora"))
    module, _, name = chosen[f"+actor_rollout_ref.rollout.{key}"].rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())  # importing it needs verl and vLLM
    assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert not [name for name in flat_config(_resolve("lora", lora_rank=0)) if key in name]
    own = f"+actor_rollout_ref.rollout.{key}"
    assert flat_config(_resolve("lora", f"{own}=a.B"))[own] == "a.B"


def test_vllm_sends_replies_once_where_nothing_interrupts_them() -> None:
    key = "+actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls"
    module, _, name = flat_config(_resolve("starter"))[key].rpartition(".")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())  # importing it needs vLLM
    assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert key not in flat_config(_resolve("starter", "trainer.v1.trainer_mode=colocate_async"))
    assert flat_config(_resolve("starter", f"{key}=a.B"))[key] == "a.B"


@needs_verl
@pytest.mark.parametrize("preset", VERL_PRESETS)
def test_a_preset_composes_against_verls_own_files(preset: str) -> None:
    from omegaconf import OmegaConf

    config = compose(flat_config(_resolve(preset)))
    assert OmegaConf.to_container(config, resolve=True)["trainer"]["use_v1"] is True


def test_the_manager_gets_the_runs_settings_back() -> None:
    config = _resolve("fast", "data.shuffle=false", credit="last", track=["wandb"])
    assert RunConfig(**flat_config(config)["+groundwire"]["config"]) == config


@needs_verl
def test_the_manager_gets_the_runs_settings_back_from_verls_configuration() -> None:
    config = _resolve("fast", "data.shuffle=false", credit="last", track=["wandb"])
    assert run_config(compose(flat_config(config))) == config


@needs_verl
def test_an_unknown_setting_of_verl_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"did you mean actor_rollout_ref\.rollout\.n\?"):
        compose(flat_config(_resolve("fast", "actor_rollout_ref.rollout.nn=4")))


def test_a_given_setting_of_verl_overrides_the_preset() -> None:
    chosen = flat_config(
        _resolve("fast", "actor_rollout_ref.rollout.gpu_memory_utilization=0.3", "trainer.logger=[wandb]")
    )
    assert chosen["actor_rollout_ref.rollout.gpu_memory_utilization"] == 0.3


def test_rows_are_not_padded_without_flash_attn_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from groundwire.train.policy.attention import VARLEN

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flash_attn" else found(name))
    padding = "actor_rollout_ref.model.use_remove_padding"
    attention = "+actor_rollout_ref.model.override_config.attn_implementation"
    chosen = flat_config(_resolve())
    assert (chosen.get(padding), chosen[attention]) == (None, VARLEN)
    padded = flat_config(_resolve("fast", f"{padding}=false"))
    assert (padded[padding], padded[attention]) == (False, "sdpa")


def _model(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_models_layers_decide_how_rows_are_computed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed = {"flash_attn": False}
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: (installed[name] or None) if name in installed else found(name)
    )

    def settings(name: str, given: dict[str, Any] | None = None, **config: Any) -> list[Any]:
        chosen = attention_settings(given or {}, _model(tmp_path / name, model_type=name.strip("2"), **config))
        keys = ("use_fused_kernels", "use_remove_padding", "override_config.attn_implementation")
        return [chosen.get(next((full for full in chosen if full.endswith(key)), "")) for key in keys]

    assert settings("gpt_oss") == [True, None, "groundwire_varlen"]
    assert settings("gpt_oss2", {"actor_rollout_ref.model.use_remove_padding": False}) == [
        True,
        False,
        "groundwire_tree",
    ]
    assert settings("granite", logits_scaling=8.0) == [False, None, "groundwire_varlen"]
    assert settings("qwen3_next") == [True, False, "sdpa"]
    assert settings("mamba") == [False, False, "eager"]
    assert settings("remote", auto_map={"AutoConfig": "code.Config"}) == [False, False, "sdpa"]
    installed["flash_attn"] = True
    assert settings("llama") == [None, None, None]
    assert settings("jamba") == [None, False, "sdpa"]


def test_a_model_that_transformers_does_not_know_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"its model_type is 'newest', and transformers .* it does not know this type$"
    ):
        attention_settings({}, _model(tmp_path / "a", model_type="newest"))
    with monkeypatch.context() as patch:
        patch.setattr(attention, "MISCOMPUTED", {"mamba2"})
        with pytest.raises(ConfigError, match="computes wrong log-probabilities of models of type mamba2"):
            attention_settings({}, _model(tmp_path / "c", model_type="mamba2"))
    kinds = ["full_attention", "spiral_attention"]
    with pytest.raises(ConfigError, match=r"its model_type is 'qwen3', .*spiral_attention") as refused:
        attention_settings({}, _model(tmp_path / "b", model_type="qwen3", num_hidden_layers=2, layer_types=kinds))
    assert "\n" not in str(refused.value)


def test_verl_finds_the_engine_with_shared_prefixes_unless_another_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "flash_attn" else found(name))
    monkeypatch.delenv("VERL_ENGINE_VENDOR", raising=False)
    library, vendor = (
        "actor_rollout_ref.model.external_lib",
        "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR",
    )
    chosen = flat_config(_resolve())
    assert found(chosen[library]).name == "groundwire.train.verl.shared_prefixes.engine"
    assert chosen[vendor] == ENGINE_VENDOR
    own = "groundwire.train.policy.attention"  # makes the attention without padding, and no engine
    assert flat_config(_resolve("fast", f"{library}={own}"))[library] == own
    assert importlib.import_module(own)
    padded = flat_config(_resolve("fast", "actor_rollout_ref.model.use_remove_padding=false"))
    assert padded[library] == chosen[library]  # for replies to a grammar, also where it shares no prefix
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    assert flat_config(_resolve())[vendor] == "nvidia"


def test_changes_of_the_models_configuration_reach_verl_beside_the_attention() -> None:
    section = "+actor_rollout_ref.model.override_config"
    chosen = flat_config(_resolve("fast", f"{section}.rope_theta=5", f"{section}.attn_implementation=eager"))
    given = {key: value for key, value in chosen.items() if key.startswith(section)}
    assert given == {
        f"{section}.attn_implementation": "eager",
        f"{section}.model_config": {},
        f"{section}.model_config.rope_theta": 5,
    }


@needs_verl
def test_a_checkpoint_names_no_attention_that_others_do_not_have(tmp_path: Path) -> None:
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import HFModelConfig

    chosen = flat_config(
        _resolve("starter", "+actor_rollout_ref.model.override_config.max_position_embeddings=99"), model=str(STARTER)
    )
    model = omega_conf_to_dataclass(compose(chosen).actor_rollout_ref.model, dataclass_type=HFModelConfig)
    assert model.hf_config._attn_implementation in ("groundwire_varlen", "sdpa", "flash_attention_2")
    model.hf_config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "attn_implementation" not in saved
    assert saved["max_position_embeddings"] == 99


def test_verl_takes_models_that_the_embedded_engine_does_not_compute(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mistral", "max_position_embeddings": 4000}')
    check_context_length(_resolve("starter", model=str(tmp_path), max_model_len=4000))
    with pytest.raises(ConfigError, match="has 4000 positions: give at most 4000"):
        check_context_length(_resolve("starter", model=str(tmp_path), max_model_len=4001))


@pytest.mark.parametrize(("name", "key"), SHARED.items())
def test_a_shared_setting_has_one_value(name: str, key: str) -> None:
    config = _resolve("fast")
    assert flat_config(config)[key] == getattr(config, name)


@pytest.mark.parametrize("key", ["max_assistant_turns", "max_user_turns"])
def test_turns_are_limited_by_the_agent(key: str) -> None:
    with pytest.raises(ConfigError, match="an agent has its own limit of turns, such as --agent-option max_turns=3"):
        flat_config(_resolve("fast", f"actor_rollout_ref.rollout.multi_turn.{key}=7"))


def test_epochs_become_steps_once_the_tasks_are_known() -> None:
    assert flat_config(_resolve("qwen"), epoch_steps=100)["trainer.total_training_steps"] == 200
    assert flat_config(_resolve("qwen", steps=3), epoch_steps=100)["trainer.total_training_steps"] == 3


def test_a_whole_trajectory_fits_into_a_micro_batch() -> None:
    chosen = flat_config(_resolve("qwen"))
    assert chosen["data.max_prompt_length"] + chosen["data.max_response_length"] == 6144
    assert chosen["actor_rollout_ref.rollout.max_model_len"] == 6144
    with pytest.raises(ConfigError, match="less than one trajectory"):
        flat_config(_resolve("qwen", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024"))


def test_asynchronous_modes_get_their_sampler_and_mini_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hydra_config, "processors", lambda: 12)
    assert flat_config(_resolve())["trainer.v1.sampler.custom_sampler.name"] == "SyncSampler"
    chosen = flat_config(_resolve("fast", "trainer.v1.trainer_mode=separate_async"))
    assert chosen["trainer.v1.sampler.custom_sampler.name"] == "AsyncSampler"
    assert chosen["+trainer.v1.sampler.sampler_kwargs.workers"] == 9
    monkeypatch.setattr(hydra_config, "processors", lambda: 32)
    processes = [flat_config(_resolve(), n_gpus=gpus)["actor_rollout_ref.rollout.agent.num_workers"] for gpus in (1, 2)]
    assert processes == [16, 24]
    monkeypatch.setattr(hydra_config, "processors", lambda: 12)
    three = flat_config(_resolve("fast", "actor_rollout_ref.rollout.agent.num_workers=3"))
    assert three["+trainer.v1.sampler.sampler_kwargs.workers"] == 3
    remote = {"external_store_address": "http://127.0.0.1:4747"}
    for settings, workers in (
        ({"runner_processes": 4}, 4),
        (remote, 9),
        ({**remote, "proxy_host": "127.0.0.1:8100"}, 1),
    ):
        config = resolve("fast", trainer="verl", **settings)
        assert flat_config(config)["actor_rollout_ref.rollout.agent.num_workers"] == workers
    assert chosen["actor_rollout_ref.actor.ppo_mini_batch_size"] * 4 == chosen["data.train_batch_size"]
    with pytest.raises(ConfigError, match="trainer_mode is 'later'"):
        flat_config(_resolve("fast", "trainer.v1.trainer_mode=later"))


def test_verl_takes_the_advantages_that_the_rows_carry() -> None:
    for credit in ("broadcast", "last", "discount", "turns"):
        assert flat_config(_resolve(credit=credit))["algorithm.adv_estimator"] == "groundwire"
    with pytest.raises(ConfigError, match=r"use_kl_in_reward cannot be set.*use kl_coef"):
        flat_config(_resolve("fast", "algorithm.use_kl_in_reward=true"))


@pytest.mark.parametrize("name", ["grpo", "groundwire"])
def test_the_projects_own_estimator_may_be_named(name: str) -> None:
    assert flat_config(_resolve("fast", f"algorithm.adv_estimator={name}"))["algorithm.adv_estimator"] == "groundwire"


def _check(config: RunConfig, tasks: list[dict[str, str]]) -> None:
    job: Any = SimpleNamespace(config=config, data=TaskData(train=tasks, validation=[], source=""))
    VerlTraining().check(job)


def test_other_estimators_of_verl_are_passed_on_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    config = _resolve("fast", "algorithm.adv_estimator=rloo", "algorithm.use_kl_in_reward=true")
    chosen = flat_config(config)
    assert chosen["algorithm.adv_estimator"] == "rloo"
    assert chosen["algorithm.use_kl_in_reward"] is True
    with pytest.raises(ConfigError, match="0 training tasks"):
        _check(config, [])
    warning = "warning: with algorithm.adv_estimator=rloo verl computes the advantages"
    assert capsys.readouterr().err.startswith(warning)


ACTOR = "actor_rollout_ref.actor"


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        ({}, {f"{ACTOR}.loss_agg_mode": "token-mean", f"{ACTOR}.use_kl_loss": False}),
        ({"loss": "sequence-mean"}, {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}),
        (
            {"loss": "dr-grpo", "max_tokens": 77},
            {
                f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
                f"{ACTOR}.loss_scale_factor": 77,
                "algorithm.norm_adv_by_std_in_grpo": False,
            },
        ),
        (
            {"loss": "gspo"},
            {f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"},
        ),
        (
            {"kl_coef": 0.01},
            {
                f"{ACTOR}.use_kl_loss": True,
                f"{ACTOR}.kl_loss_coef": 0.01,
                f"{ACTOR}.kl_loss_type": "low_var_kl",
            },
        ),
        (
            {"lr_schedule": "cosine", "warmup_steps": 9},
            {f"{ACTOR}.optim.lr_scheduler_type": "cosine", f"{ACTOR}.optim.lr_warmup_steps": 9},
        ),
        (
            {"entropy_coef": 0.1},
            {f"{ACTOR}.entropy_coeff": 0.1},
        ),
    ],
    ids=lambda value: "-".join(value) or "default" if isinstance(value, dict) and "." not in "".join(value) else "",
)
def test_the_options_of_the_loss_are_verls_own(given: dict[str, object], keys: dict[str, object]) -> None:
    chosen = flat_config(_resolve("fast", **given))
    assert {key: chosen[key] for key in keys} == keys
    assert set(keys) <= KEYS


@pytest.mark.parametrize("value", ["-1", "null"])
def test_verls_value_for_no_warm_up_is_taken(value: str) -> None:
    assert _resolve("fast", f"{ACTOR}.optim.lr_warmup_steps={value}").warmup_steps == 0


@pytest.mark.parametrize("preset", VERL_PRESETS)
def test_a_preset_has_verls_own_warm_up_and_weight_decay(preset: str) -> None:
    config = _resolve(preset)
    assert config.warmup_steps == 0
    assert f"{ACTOR}.optim.weight_decay" not in flat_config(config)


def test_importance_sampling_corrects_for_earlier_weights_in_the_asynchronous_modes() -> None:
    key = "algorithm.rollout_correction.rollout_is"
    assert key in KEYS
    assert key not in flat_config(_resolve())
    for mode in ("colocate_async", "separate_async"):
        assert flat_config(_resolve("fast", f"trainer.v1.trainer_mode={mode}"))[key] == "token"
        assert flat_config(_resolve("fast", f"trainer.v1.trainer_mode={mode}", f"{key}=null"))[key] is None


@pytest.mark.parametrize(
    ("given", "argument", "message"),
    [
        (
            {"loss": "gspo"},
            f"{ACTOR}.loss_agg_mode=token-mean",
            "token-mean: it is part of loss gspo, here seq-mean",
        ),
        ({"kl_coef": 0.1}, f"{ACTOR}.kl_loss_coef=0.2", "kl_loss_coef=0.2: it is part of kl_coef 0.1, here 0.1"),
        ({"entropy_coef": 0.1}, f"{ACTOR}.entropy_coeff=0.2", "entropy_coeff=0.2 but entropy_coef is 0.1: they are"),
        ({"lr_schedule": "linear"}, "data.shuffle=true", "lr_schedule is 'linear', which verl does not have"),
        ({"precision": "fp32"}, "data.shuffle=true", "use actor_rollout_ref.actor.fsdp_config.dtype=..., verl's own"),
        ({"loss": "dr-grpo"}, "algorithm.norm_adv_by_std_in_grpo=true", "it is part of loss dr-grpo, here False"),
    ],
)
def test_an_option_that_cannot_hold_is_refused(given: dict[str, object], argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        flat_config(_resolve("fast", argument, **given))


@pytest.mark.parametrize("argument", ["steps", "=3", "+=3"])
def test_an_argument_without_key_and_value_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match="is not key=value"):
        parse_overrides([argument])


def test_settings_of_verl_need_its_trainer() -> None:
    result = CliRunner().invoke(app, ["--trainer", "local", "data.seed=3"])
    assert result.exit_code == 2
    assert "data.seed=… is a setting of verl's: it needs --trainer verl" in result.output


def test_print_config_shows_the_resolved_settings_and_starts_nothing() -> None:
    result = CliRunner().invoke(app, ["--trainer", "local", "--print-config", "--steps", "3"])
    assert result.exit_code == 0
    assert json.loads(result.output[result.output.index("{") :])["steps"] == 3


@pytest.mark.skipif(HAS_VERL, reason="verl is installed here")
@pytest.mark.parametrize("printed", [True, False])
def test_without_verl_its_trainer_tells_what_to_install_and_writes_nothing(printed: bool, tmp_path: Path) -> None:
    arguments = ["--trainer", "verl", "--config", "starter", "--output-dir", str(tmp_path)]
    result = CliRunner().invoke(app, [*arguments, *["--print-config"] * printed])
    assert result.exit_code == 2
    assert "verl is not installed" in result.output
    assert "uv pip install -e '.[verl]'" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("preset", VERL_PRESETS)
def test_every_preset_works_with_an_external_store(preset: str) -> None:
    config = _resolve(preset, external_store_address="http://127.0.0.1:4747", n_runners=0)
    assert config.runner_processes is None


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("actor_rollout_ref.rollout.n=abc", "n is 'abc'; it must be a whole number"),
        ("actor_rollout_ref.rollout.n=2.5", "n is 2.5; it must be a whole number"),
        ("actor_rollout_ref.actor.optim.lr=x", "lr is 'x'; it must be a number"),
        ('actor_rollout_ref.rollout.multi_turn={"max_assistant_turns":9}', "is a whole section"),
        ("data.max_prompt_length=99", "it is max_model_len less max_tokens"),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=abc", "is 'abc', less than one trajectory"),
        ("trainer.v1.separate_async.parameter_sync_step=0", "must be a whole number of at least 1"),
        ("actor_rollout_ref.rollout.agent.num_workers=0", "num_workers is 0; it must be a whole number of at least 1"),
        ("actor_rollout_ref.rollout.multi_turn.format=xml", "is 'xml'; tool calls are read as "),
        ("+trainer.use_v1=false", "cannot be changed"),
        (
            "+trainer.v1.sampler.sampler_kwargs.workers=3",
            "cannot be changed: give actor_rollout_ref.rollout.agent.num_",
        ),
    ],
)
def test_a_wrong_setting_is_refused_before_verl_starts(argument: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        flat_config(_resolve("fast", argument))


def test_separate_async_needs_equal_parts_of_a_batch() -> None:
    with pytest.raises(ConfigError, match="into that many equal parts"):
        flat_config(_resolve("fast", "trainer.v1.trainer_mode=separate_async", "data.train_batch_size=30"))
    chosen = flat_config(_resolve("fast", "+trainer.v1.trainer_mode=colocate_async"))
    assert chosen["trainer.v1.sampler.custom_sampler.name"] == "AsyncSampler"


def test_given_steps_override_the_epochs_of_a_preset() -> None:
    assert flat_config(_resolve("qwen"))["trainer.total_epochs"] == 2
    assert flat_config(_resolve("qwen", steps=500), epoch_steps=56)["trainer.total_epochs"] == 1000
    assert (
        flat_config(_resolve("qwen", "trainer.total_epochs=3", steps=500), epoch_steps=56)["trainer.total_epochs"] == 3
    )
    steps = flat_config(_resolve("qwen", "trainer.total_training_steps=null"), epoch_steps=56)
    assert steps["trainer.total_training_steps"] == 112


def test_the_file_behind_the_metrics_is_always_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "elsewhere.jsonl")
    chosen = flat_config(_resolve("fast", "trainer.logger=[console]"), run_dir="RUN")
    assert chosen["trainer.logger"] == ["console", "file"]
    assert chosen["+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH"] == "RUN/verl.jsonl"


def test_longer_trajectories_get_longer_micro_batches() -> None:
    chosen = flat_config(_resolve("fast", "actor_rollout_ref.rollout.max_model_len=65536"))
    assert chosen["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == 65536


def test_a_resumed_run_takes_a_setting_under_either_name(tmp_path: Path) -> None:
    begun = _resolve("fast", "trainer.total_training_steps=10", "trainer.logger=[console]").to_dict()
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=begun)
    config = config_for_resume(run, {"steps": 20, "track": ["tensorboard"]})
    assert (config.steps, config.track, config.verl) == (20, ["tensorboard"], {})
    names_of_verl = {"trainer.total_training_steps": 30, "actor_rollout_ref.actor.optim.lr": 1e-5}
    config = config_for_resume(run, {"verl": names_of_verl})
    assert (config.steps, config.learning_rate) == (30, 1e-5)
    with pytest.raises(ConfigError, match="one setting"):
        config_for_resume(run, {"steps": 20, "verl": {"trainer.total_training_steps": 30}})


@needs_verl
@pytest.mark.parametrize("given", [(), ("algorithm.rollout_correction.bypass_mode=false",)])
def test_a_run_says_that_its_old_log_probabilities_may_be_the_samplers(
    given: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    config = _resolve("starter", *given, model="starter", tasks_per_step=1)
    with suppress(ConfigError):  # of a machine without a GPU
        _check(config, [{"id": "t", "question": "?"}])
    assert ("old log-probabilities: the sampler's" in capsys.readouterr().err) == (not given)
