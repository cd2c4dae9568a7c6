"""The trainer on GPUs: checks a run before it starts, writes the tasks, starts verl, and collects its results.

verl's trainer runs in a Ray process with :mod:`.agent_loop_manager`; the agents, their stores and their proxies run in
others (:mod:`.rollout_workers`). Beside the local trainer's files the run directory has ``verl.jsonl`` (verl's log),
``model`` (a link to the newest checkpoint in Hugging Face's format) and, if verl failed, ``error.txt``.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from groundwire.domains import Task, TaskData
from groundwire.tools.files import give_usual_mode
from groundwire.tools.secrets import mask_secrets, say
from groundwire.tools.terminal import installed_version, spinner
from groundwire.train.algorithms.model_size import MemoryPlan
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluation.validation import choose_tasks
from groundwire.train.job.graceful_shutdown import GracefulShutdown
from groundwire.train.job.job import Job
from groundwire.train.job.trainer import Trainer, TrainingError
from groundwire.train.policy.pretrained.locate import check_hub, find_model, is_hub_name
from groundwire.train.verl.hydra_config import (
    check_context_length,
    chooses_old_logprobs,
    compose,
    compose_for_run,
    count_gpus,
    flat_config,
    other_estimator,
)
from groundwire.train.verl.memory_plan import plan_run
from groundwire.train.verl.metrics import archive_verl_log, follow_verl_log, write_metrics
from groundwire.train.verl.patches import changed_functions
from groundwire.train.verl.ray_job import ray_job


class VerlTraining(Trainer):
    """``--trainer verl``."""

    in_process = False
    disk_gb = 50

    def model_folder(self, config: RunConfig) -> Path | None:
        """The folder of the model; None for one of the hub, which verl downloads."""
        if is_hub_name(config.model):
            return None
        with spinner("reading the model"):
            return find_model(config.model)

    def check(self, job: Job) -> None:
        """Also warns on stderr about settings without an effect. Nothing is written."""
        with spinner("starting"):
            _check(job.config, job.data)

    def train(self, job: Job, run: RunDir, callback: Any, shutdown: GracefulShutdown) -> None:
        """Train until verl ends. verl prints its own progress."""
        import ray
        from verl.trainer.main_ppo import run_ppo
        from verl.utils.device import auto_set_device

        from groundwire.train.verl.samplers import TaskRunner

        config, data, path = job.config, job.data, str(run.path.resolve())
        validated = choose_tasks(data.validation, config.val_tasks)
        for name, tasks in (("train", data.train), ("validation", validated)):
            write_tasks(run.path / "tasks" / f"{name}.parquet", tasks, config.domain)
        archive_verl_log(run)
        composed, _ = compose_for_run(config, data, path)
        auto_set_device(composed)
        try:
            with follow_verl_log(run, callback.on_note), ray_job(path):
                run_ppo(composed, task_runner_class=ray.remote(TaskRunner))
        except ray.exceptions.RayError as error:
            (run.path / "error.txt").write_text(mask_secrets(str(error)))  # with the tracebacks of Ray's processes
            cause = getattr(error, "cause", None) or error
            message = str(cause).strip() or repr(cause)
            raise TrainingError(f"verl stopped: {type(cause).__name__}: {message.splitlines()[-1]}") from error
        except SystemExit as error:  # Ray handles SIGTERM itself, with sys.exit
            raise KeyboardInterrupt from error
        except Exception as error:
            if ray.is_initialized():
                raise
            raise TrainingError(f"Ray did not start on this machine: {error}") from error
        finally:
            ray.shutdown()

    def collect(self, run: RunDir) -> None:
        """Write ``metrics.jsonl`` and link ``model`` to the newest checkpoint."""
        write_metrics(run)
        link_newest_model(run.path)

    def own_settings(self, config: RunConfig) -> Mapping[str, Any]:
        return flat_config(config, n_gpus=max(1, count_gpus()))

    def describe(self, job: Job, run_dir: str) -> str:
        """verl's whole configuration as YAML. Raises :class:`ConfigError`."""
        composed, _ = compose_for_run(job.config, job.data, run_dir)
        from omegaconf import OmegaConf

        return mask_secrets(OmegaConf.to_yaml(composed, resolve=True))

    def plan_memory(self, config: RunConfig, available: int) -> tuple[MemoryPlan, Mapping[str, Any]]:
        """The memory of a run on each GPU, and the settings of verl that cannot be checked without it."""
        check_context_length(config)
        flat = flat_config(config)
        installed = importlib.util.find_spec("verl") is not None
        if installed:
            compose(flat)
        plan = plan_run(config, flat, available)
        if plan is None:
            raise ConfigError(
                f"the memory of {config.model} with these settings of verl is not known: models with Llama's layers "
                "are planned, trained with FSDP and without padding"
            )
        if installed:
            return plan, {}
        known = flat_config(config.model_copy(update={"verl": {}})).keys()
        return plan, {name: value for name, value in config.verl.items() if name not in known and name[0] != "+"}


def _check(config: RunConfig, data: TaskData) -> None:
    """Raise :class:`ConfigError` if this run cannot be trained on this machine."""
    if estimator := other_estimator(config):
        if config.teacher:
            raise ConfigError(
                f"teacher changes the advantages of tokens, and with algorithm.adv_estimator={estimator} verl "
                "computes them itself: leave one of them out"
            )
        say(
            f"warning: with algorithm.adv_estimator={estimator} verl computes the advantages from the rewards of rows: "
            "credit, credit_discount and call_cost have no effect",
            err=True,
        )
    if len(data.train) < config.tasks_per_step:
        raise ConfigError(f"{len(data.train)} training tasks, but tasks_per_step is {config.tasks_per_step}")
    composed, plan = compose_for_run(config, data, "RUN_DIR")
    if plan:
        say(f"memory: predicted {plan}", err=True)
    if chooses_old_logprobs(config, composed):
        say(
            "old log-probabilities: the sampler's, except in every 20th step and while they differ (docs/verl.md)",
            err=True,
        )
    if refusal := _missing_here(composed):
        raise ConfigError(refusal)
    if is_hub_name(config.model):
        check_hub(config.model)
    try:
        import ray  # noqa: F401 (train() starts it)
        import verl.trainer.main_ppo  # noqa: F401 (as above)
        from verl.trainer.ppo.utils import need_critic, need_reference_policy
        from verl.utils.config import validate_config
        from verl.utils.device import auto_set_device
    except ImportError as error:
        raise ConfigError(f"verl cannot be imported: {error}. groundwire doctor lists what is missing") from error
    if problem := patch_problem():
        say(f"warning: {problem}", err=True)
    auto_set_device(composed)
    try:
        validate_config(
            config=composed, use_reference_policy=need_reference_policy(composed), use_critic=need_critic(composed)
        )
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"verl refuses this configuration: {error}") from error


def _missing_here(composed: Any) -> str:
    """What this machine has not that the run needs; "" if it has all."""
    trainer, rollout = composed.trainer, composed.actor_rollout_ref.rollout
    if trainer.nnodes == 1 and "RAY_ADDRESS" not in os.environ:  # a Ray cluster may have more devices
        if not (available := count_gpus()):
            return (
                "verl trains on GPUs, and torch finds none here: leave out --trainer verl, or run groundwire doctor "
                "--trainer verl for the reason"
            )
        if trainer.n_gpus_per_node > available:
            return f"trainer.n_gpus_per_node is {trainer.n_gpus_per_node}, but torch finds {available} GPUs here"
    if trainer.v1.trainer_mode == "separate_async" and not rollout.nnodes:
        return "separate_async needs GPUs for sampling alone: docs/verl.md lists the settings"
    if composed.actor_rollout_ref.model.lora_rank > 0 and (why_not := peft_problem()):
        return ": ".join(why_not)
    if rollout.checkpoint_engine.backend == "nccl" and importlib.util.find_spec("cupy") is None:
        return "checkpoint_engine.backend is nccl, which verl uses through cupy: pip install cupy-cuda13x"
    return ""


def patch_problem() -> str:
    """What is to be said about an installed verl or Ray that differs where this project replaces a function of it."""
    if not (changed := changed_functions()):
        return ""
    return (
        f"verl {installed_version('verl')} differs from verl 0.9.1, for which this project is made, in what it "
        f"replaces there: {', '.join(changed)}; train a step and compare, or pip install verl==0.9.1"
    )


def peft_problem() -> tuple[str, str] | None:
    """Why the installed peft cannot train LoRA adapters, and what to do; None if it can."""
    fix = "pip install 'peft<0.21'"
    installed = installed_version("peft")
    if installed is None:
        return "peft is not installed", fix
    if tuple(map(int, installed.split(".")[:2])) < (0, 21):
        return None
    # Its get_peft_model_state_dict() selects modules by name, and FSDP's wrapping changes the names.
    return f"peft {installed} hides adapters from verl 0.9.1, so vLLM would sample without them", fix


def link_newest_model(run_dir: Path) -> None:
    """Link ``model`` in a run directory to its newest checkpoint in Hugging Face's format, if there is one.

    LoRA adapters, which verl writes beside the base weights, are merged first.
    """
    saved = {file.parent for file in run_dir.glob("checkpoints/global_step_*/actor/huggingface/*.safetensors")}
    if not saved:
        return
    newest = max(saved, key=lambda folder: int(folder.parts[-3].removeprefix("global_step_")))
    merge_adapters(newest, newest.parent / "lora_train_meta.json")
    for folder in saved:
        for file in folder.glob("*.safetensors"):
            give_usual_mode(file)
    link = run_dir / "model"
    with suppress(FileNotFoundError):
        link.unlink()
    link.symlink_to(os.path.relpath(newest, run_dir))


def write_tasks(path: Path, tasks: Sequence[Task], source: str) -> None:
    """Write verl's data set: the question, for verl's logs, and the whole task as JSON, for the rollouts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            "prompt": [{"role": "user", "content": str(task["question"])}],
            "data_source": source,
            "task": json.dumps(dict(task), ensure_ascii=False, default=str),
            "extra_info": {"index": index},
        }
        for index, task in enumerate(tasks)
    ]
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def merge_adapters(folder: Path, settings: Path) -> None:
    """Replace each LoRA-adapted weight W of the checkpoint in ``folder`` by W + (alpha / r) B A (Hu et al., 2021).

    verl saves an adapted model under peft's parameter names, which transformers does not know: it would load the folder
    with random weights and a warning. ``settings`` is verl's ``lora_train_meta.json``. The files are replaced
    atomically.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    files = sorted(folder.glob("*.safetensors"))
    if not any(".lora_A." in name for file in files for name in safe_open(file, framework="pt").keys()):  # noqa: SIM118
        return
    lora = json.loads(settings.read_text())
    scale = float(lora["lora_alpha"]) / float(lora["r"])
    state = {
        name.removeprefix("base_model.model.").replace(".default.", "."): value
        for file in files
        for name, value in load_file(file).items()
    }
    merged = {}
    for name, base in state.items():
        if ".lora_" in name:
            continue
        module, weight = name.removesuffix(".base_layer.weight"), base
        if module != name:
            a, b = state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"]
            weight = (base.float() + scale * (b.float() @ a.float())).to(base.dtype)
        merged[name.replace(".base_layer.", ".")] = weight.contiguous()
    unfinished, whole = folder / ".merged.part", folder / "model.safetensors"
    save_file(merged, unfinished, metadata={"format": "pt"})
    unfinished.replace(whole)  # loaders prefer this file to an index, so the folder can be loaded at every moment
    for file in {*files, folder / "model.safetensors.index.json"} - {whole}:
        file.unlink(missing_ok=True)
