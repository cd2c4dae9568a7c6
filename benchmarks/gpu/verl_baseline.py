"""verl's own single-turn agent loop, for comparison: the same model, prompts, batch size and number of tokens.

python -m benchmarks.gpu.verl_baseline MODEL OUT STEPS [KEY=VALUE ...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.agents import sql_messages
from groundwire import domains
from groundwire.train.config.overrides import parse_overrides
from groundwire.train.config.resolve import resolve
from groundwire.train.verl.hydra_config import compose, flat_config

_OURS = ("groundwire", "agent_loop_manager_class", "custom_sampler", "sync_refill_failed_groups", "gen_batch_size")


def no_reward(*_: Any, **__: Any) -> float:
    """The reward for verl's reward workers; it costs no time."""
    return 0.0


def main(model: str, out: Path, steps: int, arguments: list[str]) -> None:
    """Train for ``steps``; verl's log is ``verl.jsonl`` in ``out``."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from verl.trainer.main_ppo import TaskRunnerV1, run_ppo

    out.mkdir(parents=True, exist_ok=True)
    tasks = domains.get("spider").load(None).train
    rows = [
        {
            "prompt": sql_messages(str(task["question"]), str(task["db_path"])),
            "data_source": "spider",
            "reward_model": {"style": "rule", "ground_truth": json.dumps(task["query"])},
            "extra_info": {"index": index},
        }
        for index, task in enumerate(tasks)
    ]
    (out / "tasks").mkdir(exist_ok=True)
    for name in ("train", "validation"):
        pq.write_table(pa.Table.from_pylist(rows), out / "tasks" / f"{name}.parquet")
    config = resolve("starter", trainer="verl", model=model, steps=steps, verl=parse_overrides(arguments))
    chosen = flat_config(config, run_dir=str(out.resolve()), model=model)
    chosen = {key: value for key, value in chosen.items() if not any(name in key for name in _OURS)}
    chosen["reward.custom_reward_function.path"] = __file__
    chosen["reward.custom_reward_function.name"] = "no_reward"
    chosen["trainer.v1.trainer_mode"] = "sync"
    chosen["actor_rollout_ref.rollout.agent.num_workers"] = 8  # verl's own default
    run_ppo(compose(chosen), task_runner_class=TaskRunnerV1)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
