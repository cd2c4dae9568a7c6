"""One run with verl, from the command line's point of view: write the tasks, start verl, put its results together.

verl's trainer runs in a process of Ray's; the agents and the store run in the same one
(:mod:`groundwire.train.verl.agent_loop_manager`). The run's folder is the same as the local trainer's: ``config.json``,
``metrics.jsonl``, ``rollouts.parquet``, ``curve.png``, ``summary.json``; ``verl.jsonl`` has all that verl measured,
``model`` is the newest checkpoint in Hugging Face's format, and ``error.txt`` the traceback where verl broke down.
"""

from __future__ import annotations

import importlib.util
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from groundwire.domains import Task, TaskData
from groundwire.tools.step_timer import PHASES
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.run_config import ConfigError, RunConfig
from groundwire.train.evaluation.validation import choose_tasks
from groundwire.train.policy import STARTER
from groundwire.train.verl.hub import check_hub
from groundwire.train.verl.hydra_config import compose, on_npu, values
from groundwire.train.verl.lora import merge_adapters, peft_problem

__all__ = ["TrainingError", "check", "collect", "export", "following", "resolved", "train"]


class TrainingError(Exception):
    """verl's training ended with an error."""


def resolved(config: RunConfig, data: TaskData, run_dir: str) -> dict[str, Any]:
    """verl's keys for this run on this machine."""
    return values(
        config,
        run_dir=run_dir,
        model=str(STARTER) if config.model == "starter" else _absolute(config.model),
        n_gpus=max(1, _gpus(npu=on_npu(config))),
        epoch_steps=len(data.train) // config.tasks_per_step,
    )


def check(config: RunConfig, data: TaskData) -> None:
    """Refuse what cannot be trained before anything of the run is written. Raises :class:`ConfigError`."""
    if len(data.train) < config.tasks_per_step:
        raise ConfigError(f"{len(data.train)} training tasks, but tasks_per_step is {config.tasks_per_step}")
    composed = compose(resolved(config, data, "RUN_DIR"))
    if composed.trainer.nnodes == 1 and "RAY_ADDRESS" not in os.environ:  # else Ray knows of more than this host
        _check_gpus(composed.trainer.n_gpus_per_node, npu=on_npu(config))
    if config.model != "starter" and not Path(config.model).exists():
        check_hub(config.model)
    if composed.trainer.v1.trainer_mode == "separate_async" and not composed.actor_rollout_ref.rollout.nnodes:
        raise ConfigError("separate_async samples on GPUs of its own: docs/verl.md says which settings give it some")
    if composed.actor_rollout_ref.model.lora_rank > 0 and (problem := peft_problem()):
        raise ConfigError(": ".join(problem))
    backend = composed.actor_rollout_ref.rollout.checkpoint_engine.backend
    if backend == "nccl" and importlib.util.find_spec("cupy") is None:
        raise ConfigError("checkpoint_engine.backend is nccl, which verl uses through cupy: pip install cupy-cuda13x")
    try:
        import ray  # noqa: F401 (train() starts it)
        from verl.trainer.main_ppo import run_ppo  # noqa: F401 (as above)
        from verl.trainer.ppo.utils import need_critic, need_reference_policy
        from verl.utils.config import validate_config
        from verl.utils.device import auto_set_device
    except ImportError as error:
        raise ConfigError(f"verl cannot be imported: {error}. python -m train.doctor says what is missing") from error
    auto_set_device(composed)
    try:
        validate_config(
            config=composed, use_reference_policy=need_reference_policy(composed), use_critic=need_critic(composed)
        )
    except (AssertionError, ValueError) as error:
        raise ConfigError(f"verl refuses this configuration: {error}") from error


def train(config: RunConfig, data: TaskData, run: RunDir) -> None:
    """Train until verl ends, what :func:`check` passed. Raises :class:`TrainingError`, ``KeyboardInterrupt``."""
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo
    from verl.utils.device import auto_set_device

    folder = run.path / "tasks"
    folder.mkdir(exist_ok=True)
    _write_tasks(folder / "train.parquet", data.train, config.domain)
    _write_tasks(folder / "validation.parquet", choose_tasks(data.validation, config.val_tasks), config.domain)
    _keep_metrics(run)
    composed = compose(resolved(config, data, str(run.path.resolve())))
    auto_set_device(composed)
    try:
        with following(run), _job_of_its_own():
            run_ppo(composed, task_runner_class=TaskRunnerV1)
    except ray.exceptions.RayError as error:
        (run.path / "error.txt").write_text(str(error))  # with the tracebacks of Ray's processes
        raise TrainingError(_cause(error)) from error
    except SystemExit as error:  # Ray takes SIGTERM for itself and answers with sys.exit
        raise KeyboardInterrupt from error
    except Exception as error:
        if ray.is_initialized():
            raise
        raise TrainingError(f"Ray did not start on this machine: {error}") from error
    finally:
        ray.shutdown()


@contextmanager
def _job_of_its_own() -> Iterator[None]:
    """Number the Ray job that begins inside by this process, if it is the first one of its Ray.

    verl 0.9 names the socket in ``/tmp`` through which it hands weights to vLLM by that number, and the first job of
    each Ray is number 1: two runs on one host, each with its Ray, that hand them over at one moment waited for ever.
    """
    import ray
    from ray._private import state

    numbered: Any = getattr(state, "next_job_id", None)
    if numbered is None:  # another Ray: the number stays as it is
        yield
        return
    first, own = ray.JobID.from_int(1), ray.JobID.from_int(os.getpid())

    def number() -> Any:
        given = numbered()
        return own if given == first else given

    state.next_job_id = number
    try:
        yield
    finally:
        state.next_job_id = numbered


def collect(run: RunDir) -> None:
    """Make ``metrics.jsonl`` out of what verl and the rollouts wrote, and ``model`` out of the newest checkpoint."""
    _write_metrics(run)
    export(run.path)


@contextmanager
def following(run: RunDir, interval_s: float = 2.0) -> Iterator[None]:
    """Keep ``metrics.jsonl`` up with ``verl.jsonl``, for whoever watches the run."""
    ended = threading.Event()

    def follow() -> None:
        seen = 0
        while not ended.wait(interval_s):
            with suppress(FileNotFoundError):
                size = (run.path / "verl.jsonl").stat().st_size
                if size != seen:
                    seen = size
                    _write_metrics(run)

    thread = threading.Thread(target=follow, name="follow-verl", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _write_metrics(run: RunDir) -> None:
    lines = _lines(run.path)
    with run.whole(run.path / "metrics.jsonl") as part:
        part.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def export(run_dir: Path) -> Path | None:
    """Point ``model`` in a run's folder at its newest checkpoint in Hugging Face's format; None where there is none.

    LoRA adapters are merged into the checkpoint's weights, which verl writes beside each other.
    """
    saved = [
        folder / "actor" / "huggingface"
        for folder in (run_dir / "checkpoints").glob("global_step_*")
        if any((folder / "actor" / "huggingface").glob("*.safetensors"))
    ]
    if not saved:
        return None
    newest = max(saved, key=lambda folder: int(folder.parts[-3].removeprefix("global_step_")))
    merge_adapters(newest, newest.parent / "lora_train_meta.json")
    link = run_dir / "model"
    with suppress(FileNotFoundError):
        link.unlink()
    link.symlink_to(os.path.relpath(newest, run_dir))
    return newest


def _write_tasks(path: Path, tasks: Sequence[Task], source: str) -> None:
    """A data set as verl reads it: the question for its logs, and the whole task as one string for the rollouts."""
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
    pq.write_table(pa.Table.from_pylist(rows), path)


def _check_gpus(asked: int, *, npu: bool) -> None:
    found, named = _gpus(npu=npu), "NPUs" if npu else "GPUs"
    if not found:
        raise ConfigError(
            f"verl trains on {named}, and torch sees none here: leave out --trainer verl, or ask "
            "python -m train.doctor --trainer verl why"
        )
    if asked > found:
        raise ConfigError(f"trainer.n_gpus_per_node is {asked}, but torch sees {found} {named} here")


def _gpus(*, npu: bool) -> int:
    with suppress(ImportError):
        import torch

        if npu:
            import torch_npu  # noqa: F401 (torch.npu is there after that)
        return int((torch.npu if npu else torch.cuda).device_count())
    return 0


def _absolute(model: str) -> str:
    """A folder by its whole path (verl's processes start elsewhere); a name on the hub as it is."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def _keep_metrics(run: RunDir) -> None:
    """verl begins its file anew in every process; what an earlier life of the run wrote is put aside."""
    written = run.path / "verl.jsonl"
    if written.exists():
        lines = _both_lives(run.path)
        with run.whole(run.path / "verl-before.jsonl") as part:
            part.write_text("".join(json.dumps(line) + "\n" for line in lines))
        written.unlink()


def _both_lives(run_dir: Path) -> list[dict[str, Any]]:
    """What verl wrote before and since, without the steps before that it went back behind: they are done again."""
    since = _read(run_dir / "verl.jsonl")
    first = min((int(line["step"]) for line in since if "timing_s/step" in line["data"]), default=None)
    before = _read(run_dir / "verl-before.jsonl")
    return [line for line in before if first is None or int(line["step"]) < first] + since


def _lines(run_dir: Path) -> list[dict[str, Any]]:
    """Lines as the local trainer writes them, a step each; of a step that was done again, the last."""
    measured: dict[int, dict[str, Any]] = {}
    for line in _both_lives(run_dir):
        measured.setdefault(int(line["step"]), {}).update(line["data"])
    told: dict[tuple[int, str], dict[str, Any]] = {}
    for line in _read(run_dir / "rollouts.jsonl"):
        told[int(line["step"]), line["partition"]] = line
    lines, wall = [], 0.0
    for step in sorted(measured):
        data = measured[step]
        wall += float(data.get("timing_s/step", 0.0)) + float(data.get("timing_s/testing", 0.0))
        lines.append(_line(step, data, told.get((step, "train")), told.get((step, "val")), wall))
    return lines


def _line(
    step: int,
    data: Mapping[str, Any],
    trained: Mapping[str, Any] | None,
    validated: Mapping[str, Any] | None,
    wall: float,
) -> dict[str, Any]:
    line: dict[str, Any] = {"step": step}
    if step > 0:
        trained = trained or {}
        sampled, seconds = trained.get("tokens_sampled", 0), float(data.get("timing_s/step", 0.0))
        line |= {
            "reward": trained.get("reward_mean"),
            "rollouts": trained.get("ended", 0),
            "failures": {
                name.removeprefix("dropped_"): count for name, count in trained.items() if name.startswith("dropped_")
            },
            "groups_skipped": trained.get("groups_skipped", 0),
            **{name: trained[name] for name in ("groups", "groups_used") if name in trained},
            "retried": trained.get("retried", 0),
            "calls": trained.get("calls", 0),
            "tokens_generated": sampled,
            "tokens_per_s": round(sampled / seconds, 1) if seconds else 0.0,
            "seconds": dict(trained.get("seconds") or dict.fromkeys(PHASES, 0.0)),
        }
    if validated:
        line |= {name: validated[name] for name in ("validation", "validation_sampled") if name in validated}
    line["wall_time_s"] = round(wall, 2)
    return {**line, "verl": dict(data)}


def _read(path: Path) -> list[dict[str, Any]]:
    lines = []
    with suppress(FileNotFoundError):
        for text in path.read_text().splitlines():
            with suppress(ValueError):  # a last line that a kill cut short
                lines.append(dict(json.loads(text)))
    return lines


def _cause(error: BaseException) -> str:
    """What went wrong in a process of Ray's, without the traceback that Ray wraps around it."""
    cause: BaseException = getattr(error, "cause", None) or error
    text = str(cause).strip().splitlines()
    return f"verl stopped: {type(cause).__name__}: {text[-1] if text else cause!r}"
