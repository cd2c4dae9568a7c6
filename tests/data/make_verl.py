"""Writes what tests compare with verl 0.9.1 where verl is not installed: run it where it is.

    python tests/data/make_verl.py

``verl_0_9_1_keys.json``: every setting of its composed configuration. ``verl_0_9_1_groups.json``: the advantages that
it gives to rollouts of several trajectories. ``verl_0_9_1_losses.json``: its losses, their gradients and the KL terms.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def settings() -> list[str]:
    from omegaconf import OmegaConf

    from groundwire.train.verl.hydra_config import _dotted_keys, compose

    return sorted(_dotted_keys(OmegaConf.to_container(compose({}), resolve=False)))


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


def losses() -> list[dict[str, Any]]:
    import torch
    from verl.trainer.ppo.core_algos import get_policy_loss_fn, kl_penalty
    from verl.workers.config import FSDPActorConfig

    means = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")
    cases = []
    for loss_mode, mean in [*(("vanilla", mean) for mean in means), ("gspo", means[1])]:
        generator = torch.Generator().manual_seed(len(cases))
        mask = torch.tensor([[1] * length + [0] * (5 - length) for length in (3, 5, 0, 4)])
        new = (-2 * torch.rand(4, 5, generator=generator)).round(decimals=3).requires_grad_()
        old = (new.detach() + 0.5 * torch.randn(4, 5, generator=generator)).round(decimals=3)
        advantages = torch.tensor([1.5, -0.5, 0.3, -1.0])[:, None].expand(4, 5).contiguous()
        config = FSDPActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.3, ppo_micro_batch_size_per_gpu=1, rollout_n=1)
        config.global_batch_info["loss_scale_factor"] = 16
        loss, _ = get_policy_loss_fn(loss_mode)(
            old_log_prob=old,
            log_prob=new,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=mean,
            config=config,
        )
        loss.backward()
        tensors = {"mask": mask, "new": new, "old": old, "advantages": advantages, "grad": new.grad}
        tensors["kl"] = kl_penalty(new, old, "low_var_kl")
        values = {name: [[round(v, 7) for v in row] for row in tensor.tolist()] for name, tensor in tensors.items()}
        cases.append({"loss_mode": loss_mode, "loss_agg_mode": mean, "loss": loss.item(), **values})
    return cases


if __name__ == "__main__":
    (HERE / "verl_0_9_1_losses.json").write_text(json.dumps(losses()) + "\n")
    (HERE / "verl_0_9_1_keys.json").write_text(json.dumps(settings(), indent=0) + "\n")
    (HERE / "verl_0_9_1_groups.json").write_text(json.dumps(groups()) + "\n")
