"""The local trainer's update on one GPU at the shape that agents have: ``python -m dev.gpu.update``.

64 groups of 8 rollouts; prompts of 886 tokens in the mean and 2,265 at most, shared by a group; replies of 42 in the
mean: the shape of the SQL agent on real Spider. The weights are random, because the time does not depend on them. The
alternative to blocks of a mask that are skipped is a dense mask for each row; both compute a shared prompt once. It
also compares log-probabilities with those of a plain forward pass of each sequence.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from groundwire.adapters.tracing import LLMCall, Trajectory
from groundwire.train.algorithms.credit import TrainingGroup, training_items
from groundwire.train.algorithms.speed import peak_flops
from groundwire.train.config.run_config import RunConfig
from groundwire.train.local.grpo import GRPO, GRPOConfig
from groundwire.train.local.packing import Row, pack, packed_logits
from groundwire.train.policy.attention import TREE
from groundwire.train.sft.data.examples import Example
from groundwire.train.store.rollout import Outcome, Rollout


def _qwen(width: int, feed_forward: int, layers: int, heads: int) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=151936,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )


SHAPES: dict[str, Any] = {
    "135m": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    ),
    "0.5b": _qwen(896, 4864, 24, 14),
    "1.5b": _qwen(1536, 8960, 28, 12),
}


def make_groups(vocabulary: int, groups: int, size: int) -> list[TrainingGroup]:
    """Groups of rollouts of one call each with random ids and random rewards of 0 and 1."""
    rng = random.Random(0)
    rollouts = []
    for group in range(groups):
        length = min(2265, max(230, int(rng.lognormvariate(6.62, 0.55))))
        prompt = [rng.randrange(vocabulary) for _ in range(length)]
        for index in range(size):
            count = min(96, max(10, int(rng.lognormvariate(3.55, 0.5))))
            call = LLMCall(
                rollout_id="",
                attempt_id="",
                sequence=1,
                prompt_ids=prompt,
                response_ids=[rng.randrange(vocabulary) for _ in range(count)],
                logprobs=[-10.0] * count,
            )
            outcome = Outcome(reward=float(index % 2))
            rollouts.append(Rollout(task={"id": str(group)}, group=str(group), outcome=outcome, calls=[call]))
    return training_items(rollouts, RunConfig(), least=0.0)


def new_model(shape: str) -> Any:
    """A model of a shape with random weights, on the GPU."""
    torch.manual_seed(0)
    config = SHAPES[shape]
    model_class = LlamaForCausalLM if isinstance(config, LlamaConfig) else Qwen2ForCausalLM
    return model_class._from_config(config, attn_implementation="sdpa", dtype=torch.float32).cuda()


def measure(shape: str, batch: list[TrainingGroup], *, dense: bool, settings: dict[str, Any]) -> dict[str, float]:
    """Seconds and peak GB of the second update; the first one compiles kernels."""
    model = new_model(shape)
    trainer = GRPO(model, GRPOConfig(minibatches=1, **settings))
    if dense:
        model.set_attn_implementation("sdpa")
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        metrics = trainer.update(batch)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    tokens = sum(len(item.trajectory) for group in batch for item in group.items)
    peak = peak_flops(torch.cuda.get_device_name())
    mfu = {"update_mfu": metrics["update_flops"] / min(times[1:]) / peak} if peak else {}
    return {
        **mfu,
        "first_s": times[0],
        "update_s": min(times[1:]),
        "peak_gb": torch.cuda.max_memory_allocated() / 2**30,
        "tokens": tokens,
        "tokens_per_s": tokens / min(times[1:]),
        "tokens_trained": metrics.get("tokens_trained", 0),
        "tokens_computed": metrics["tokens_computed"],
        "loss": metrics.get("loss", 0),
    }


@torch.no_grad()
def differences(shape: str, batch: list[TrainingGroup]) -> dict[str, float]:
    """Largest and mean difference of log-probabilities (nats) in bf16, and what bf16 itself costs."""
    model = new_model(shape).eval()
    found = [item.trajectory for group in batch for item in group.items][:16]

    def plain(dtype: torch.dtype) -> torch.Tensor:
        parts = []
        for trajectory in found:
            ids = torch.tensor([[*trajectory.prompt_ids, *trajectory.response_ids]], device="cuda")
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                logits = model(ids, use_cache=False).logits[0, len(trajectory.prompt_ids) - 1 : -1].float()
            targets = ids[0, len(trajectory.prompt_ids) :, None]
            parts.append(torch.log_softmax(logits, -1).gather(1, targets)[:, 0])
        return torch.cat(parts)

    exact, half = plain(torch.float32), plain(torch.bfloat16)
    model.set_attn_implementation(TREE)
    groups: dict[tuple[int, ...], list[Trajectory]] = {}
    for trajectory in found:
        groups.setdefault(tuple(trajectory.prompt_ids), []).append(trajectory)
    rows = [
        Row(members[0].prompt_ids, [Example(each.prompt_ids, each.response_ids) for each in members])
        for members in groups.values()
    ]
    packed = pack(rows, one_row=True, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        logits = packed_logits(model, packed)
    tree = torch.log_softmax(logits, -1).gather(1, packed.targets[:, None])[:, 0]
    return {
        "tree_against_plain_max": float((tree - half).abs().max()),
        "tree_against_plain_mean": float((tree - half).abs().mean()),
        "bf16_against_float32_max": float((half - exact).abs().max()),
        "bf16_against_float32_mean": float((half - exact).abs().mean()),
    }


def main() -> int:
    """Measure the chosen shapes; print the figures, and write them to a file."""
    parser = argparse.ArgumentParser(prog="python -m dev.gpu.update", description=__doc__)
    parser.add_argument("--shapes", default="135m", help=f"comma-separated, of {', '.join(SHAPES)}")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--size", type=int, default=8, help="rollouts of a group; default: 8")
    parser.add_argument("--settings", default="{}", help="JSON with fields of GRPOConfig")
    parser.add_argument("--dense-mask", action="store_true", help="also measure rows with a dense mask")
    parser.add_argument("--json", help="file for the figures")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch finds none")
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for shape in options.shapes.split(","):
        groups = make_groups(SHAPES[shape].vocab_size, options.groups, options.size)
        part: dict[str, Any] = {"differences": differences(shape, groups)}
        for dense in (False, True) if options.dense_mask else (False,):
            name = "dense mask" if dense else "tree"
            try:
                part[name] = measure(shape, groups, dense=dense, settings=json.loads(options.settings))
            except torch.OutOfMemoryError as error:
                part[name] = {"error": str(error).splitlines()[0]}
            torch.cuda.empty_cache()
            print(shape, name, json.dumps(part[name]), flush=True)
        print(shape, json.dumps(part["differences"]), flush=True)
        results[shape] = part
        if options.json:
            with open(options.json, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
