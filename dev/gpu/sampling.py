"""Sampling at the shape that agents have, on one GPU: ``python -m dev.gpu.sampling``.

48 groups of 8 requests; prompts of 886 tokens in the mean and 2,265 at most, shared by a group; then a second turn with
60 further tokens each; replies of 42 tokens. The weights are random, because the time does not depend on them. It
prints the seconds of both turns, and the milliseconds of one decode step.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dev.gpu.update import SHAPES, make_groups
from groundwire.train.policy import STARTER
from groundwire.train.policy.decoding.decoder import Decoder
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.types import Sampling

_REPLY = 42


def main() -> None:
    """Print one line of JSON for each shape and batch."""
    parser = argparse.ArgumentParser(prog="python -m dev.gpu.sampling", description=__doc__)
    parser.add_argument("--shapes", default="135m")
    parser.add_argument("--max-batch", default="128,384")
    parser.add_argument("--groups", type=int, default=48)
    parser.add_argument("--fp32", action="store_true", help="products in float32")
    parser.add_argument("--plain", action="store_true", help="the decoder of the CPU")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch finds none")
    if options.plain:
        import groundwire.train.policy.engine as engine_module

        engine_module.make_decoder = lambda model, *, max_positions, bf16: Decoder(
            model, max_positions=max_positions, bf16=False
        )
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    for shape in options.shapes.split(","):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(SHAPES[shape]).to("cuda").eval()
        for max_batch in map(int, options.max_batch.split(",")):
            measured = _measure(model, tokenizer, options, max_batch)
            print(json.dumps({"shape": shape, "max_batch": max_batch, **measured}))


def _measure(model: Any, tokenizer: Any, options: argparse.Namespace, max_batch: int) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    engine = LocalEngine(
        model, tokenizer, max_model_len=3072, max_batch=max_batch, bf16=not options.fp32 and not options.plain
    )
    draw = random.Random(0)
    prompts = [
        item.trajectory.prompt_ids for group in make_groups(len(tokenizer), options.groups, 8) for item in group.items
    ]
    seconds = []
    for step in range(3):  # the first one compiles kernels and grows the cache
        engine.update_weights(step)
        turns = []
        for turn in range(2):
            start = time.perf_counter()
            given = [[*prompt, *(draw.randrange(300, 4000) for _ in range(60 * turn))] for prompt in prompts]
            futures = [engine.submit(prompt, Sampling(temperature=1.0, max_tokens=_REPLY)) for prompt in given]
            for future in futures:
                future.result()
            turns.append(round(time.perf_counter() - start, 3))
        seconds.append(turns)
    decode = _decode_step(engine, prompts[: min(max_batch, len(prompts))])
    engine.close()
    torch.cuda.empty_cache()
    return {
        "seconds_of_turns": seconds,
        "decode_ms": decode,
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }


def _decode_step(engine: LocalEngine, prompts: list[Any]) -> float:
    """Milliseconds of one decode step of all prompts, the sampling of tokens included."""
    times = []
    futures = [
        engine.submit(
            prompt,
            Sampling(temperature=1.0, max_tokens=100),
            on_token=(lambda *_: times.append(time.perf_counter())) if place == 0 else None,
        )
        for place, prompt in enumerate(prompts)
    ]
    for future in futures:
        future.result()
    steps = sorted(after - before for before, after in pairwise(times[20:]))
    return round(1000 * steps[len(steps) // 2], 2) if steps else 0.0


if __name__ == "__main__":
    main()
