"""Writes what tests compare with verl 0.9.1 where verl is not installed: run it where it is.

    python tests/data/make_verl.py

``verl_0_9_1_keys.json``: every setting of its composed configuration. ``verl_0_9_1_groups.json``: the advantages that
it gives to rollouts of several trajectories.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def settings() -> list[str]:
    from train.verl.config import compose, keys

    return sorted(keys(compose({})))


def groups() -> list[dict[str, Any]]:
    import numpy as np
    import torch
    from tensordict import TensorDict
    from verl.protocol import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    chance, cases = random.Random(7), []
    for _ in range(6):
        keys, uids, rewards, lengths = [], [], [], []
        for uid in ("a", "b", "c"):
            for session in range(chance.randint(2, 5)):
                reward = chance.choice([0.0, 1.0, 0.25])
                for index in range(chance.randint(1, 5)):
                    keys.append(f"{uid}_{session}_{index}")
                    uids.append(uid)
                    rewards.append(reward)
                    lengths.append(chance.randint(1, 6))
        mask = torch.tensor([[1] * length + [0] * (6 - length) for length in lengths])
        scores = torch.zeros(mask.shape)
        for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
            scores[row, length - 1] = reward
        fields = {"token_level_rewards": scores, "token_level_scores": scores, "response_mask": mask}
        data = DataProto(
            batch=TensorDict(fields, batch_size=len(keys)), non_tensor_batch={"uid": np.array(uids, dtype=object)}
        )
        data = compute_advantage_for_multi_trajectories(data, batch_keys=keys, adv_estimator="grpo", config={})
        cases.append(
            {"keys": keys, "rewards": rewards, "lengths": lengths, "advantages": data.batch["advantages"].tolist()}
        )
    return cases


if __name__ == "__main__":
    (HERE / "verl_0_9_1_keys.json").write_text(json.dumps(settings(), indent=0) + "\n")
    (HERE / "verl_0_9_1_groups.json").write_text(json.dumps(groups()) + "\n")
