"""verl's own single-turn agent loop, for comparison: the same model, prompts, batch size and number of tokens.

Its best settings: the sampler's old log-probabilities, and rows without padding. Without flash-attn verl pads rows, so
torch's attention is registered for it, as for our runs; actor_rollout_ref.model.use_remove_padding=False is verl alone.

python -m dev.gpu.verl_baseline MODEL OUT STEPS [--spider FOLDER] [KEY=VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from dev.gpu.agents import sql_messages
from groundwire import domains
from groundwire.train.config.overrides import parse_overrides
from groundwire.train.config.resolve import resolve
from groundwire.train.verl.hydra_config import attention_settings, compose, flat_config
from groundwire.train.verl.ray_job import ray_job

_OURS = (
    "groundwire",
    "agent_loop_manager_class",
    "custom_sampler",
    "sync_refill_failed_groups",
    "gen_batch_size",
    "scheduler_cls",
)


def coin(*_: Any, **__: Any) -> float:
    """The reward for verl's reward workers, as :func:`dev.gpu.agents.coin`; it costs no time."""
    return float(random.random() < 0.5)


def main(model: str, out: Path, steps: int, *, spider: str | None, settings: list[str]) -> None:
    """Train for ``steps`` on the bundled data, or on ``spider``; verl's log is ``verl.jsonl`` in ``out``."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    out.mkdir(parents=True, exist_ok=True)
    tasks = domains.get("spider").load(spider).train
    rows = [
        {
            "prompt": sql_messages(str(task["question"]), str(task["db_path"]), full=spider is not None),
            "data_source": "spider",
            "reward_model": {"style": "rule", "ground_truth": json.dumps(task["query"])},
            "extra_info": {"index": index},
        }
        for index, task in enumerate(tasks)
    ]
    (out / "tasks").mkdir(exist_ok=True)
    for name in ("train", "validation"):
        pq.write_table(pa.Table.from_pylist(rows), out / "tasks" / f"{name}.parquet")
    given = parse_overrides(settings)
    best = {"algorithm.rollout_correction.bypass_mode": True, **attention_settings(given, model)}
    length = 3072 if spider else 2048
    config = resolve("starter", trainer="verl", model=model, steps=steps, max_model_len=length, verl={**best, **given})
    chosen = flat_config(config, run_dir=str(out.resolve()), model=model)
    chosen = {key: value for key, value in chosen.items() if not any(name in key for name in _OURS)}
    chosen["algorithm.adv_estimator"] = "grpo"
    chosen["reward.custom_reward_function.path"] = __file__
    chosen["reward.custom_reward_function.name"] = "coin"
    chosen["trainer.v1.trainer_mode"] = "sync"
    chosen["actor_rollout_ref.rollout.agent.num_workers"] = 8  # verl's own default
    with ray_job(str(out.resolve())):
        run_ppo(compose(chosen), task_runner_class=TaskRunnerV1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dev.gpu.verl_baseline", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--spider", metavar="FOLDER", help="real Spider and the longer prompts")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_intermixed_args()
    main(given.model, given.out, given.steps, spider=given.spider, settings=given.settings)
