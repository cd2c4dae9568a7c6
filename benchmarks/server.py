"""Sampling speed of the embedded engine and of transformers' generate.

Both use one checkpoint. Prompts come in groups of eight, as in GRPO, and every
reply has the same number of tokens.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks._results import record
from groundwire.train.policy import STARTER
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.grammar import calls_and_json
from groundwire.train.policy.model import load_policy
from groundwire.train.policy.types import Sampling

PROMPT_TOKENS, REPLY_TOKENS, GROUP_SIZE = 150, 20, 8
SIZES, REPEATS = (1, 8, 96), 3
LONG_TEXT = calls_and_json({"type": "object", "properties": {"sql": {"type": "string", "minLength": 500}}})


def fastest(run: Callable[[list[list[int]]], int], size: int, vocabulary: int, rng: random.Random) -> float:
    """Tokens per second of the fastest of three runs, after one that is not counted."""
    rates = []
    for _ in range(1 + REPEATS):
        groups = [[rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(-(-size // GROUP_SIZE))]
        batch = [groups[place // GROUP_SIZE] for place in range(size)]
        started = time.perf_counter()
        tokens = run(batch)
        rates.append(tokens / (time.perf_counter() - started))
    return max(rates[1:])


def with_transformers(model, batch: list[list[int]]) -> int:
    """One ``generate`` of the whole batch."""
    ids = torch.tensor(batch)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=REPLY_TOKENS,
        min_new_tokens=REPLY_TOKENS, pad_token_id=0,
    )  # fmt: skip
    return len(batch) * (out.shape[1] - PROMPT_TOKENS)


def with_engine(engine: LocalEngine, batch: list[list[int]], grammar: str = "") -> int:
    """All requests of the batch at once, from this thread."""
    sampling = Sampling(max_tokens=REPLY_TOKENS, grammar=grammar)
    futures = [engine.submit(prompt, sampling) for prompt in batch]
    return sum(len(future.result().token_ids) for future in futures)


def main() -> None:
    """Print tokens/s by batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(STARTER), help="a checkpoint's folder; default: the starter")
    path = parser.parse_args().model
    if not Path(path).is_dir():
        sys.exit(f"no folder {path}")
    model, tokenizer = load_policy(path)
    vocabulary = len(tokenizer) - 16
    print(f"{model.num_parameters() / 1e6:.2f} M parameters, {len(tokenizer)} ids, torch {torch.__version__}")
    print(f"{PROMPT_TOKENS} prompt tokens in groups of {GROUP_SIZE}, {REPLY_TOKENS} sampled tokens each; tokens/s\n")
    print(f"{'':28}" + "".join(f"{f'batch {size}':>10}" for size in SIZES))
    rng = random.Random(1)

    def row(name: str, run: Callable[[list[list[int]]], int]) -> list[float]:
        rates = [fastest(run, size, vocabulary, rng) for size in SIZES]
        print(f"{name:28}" + "".join(f"{rate:10,.0f}" for rate in rates), flush=True)
        return rates

    theirs, ours = [], []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        theirs.append(row(f"transformers, threads={threads}", partial(with_transformers, model)))
    for threads in (1, 2):
        engine = LocalEngine(model, tokenizer, max_model_len=512, threads=threads)
        engine._batch._end_tokens = frozenset()  # every reply has its full length
        ours.append(row(f"engine, threads={threads}", partial(with_engine, engine)))
        if threads == 1:
            constrained = row("the same, constrained to JSON", partial(with_engine, engine, grammar=LONG_TEXT))
        engine.close()
    for place, size in enumerate(SIZES):
        best, other = (max(rates[place] for rates in each) for each in (ours, theirs))
        record(f"sampling, batch {size}", best, unit="tokens/s", against="transformers' generate", theirs=other)
        free = ours[0][place]
        record(f"constrained, batch {size}", constrained[place], unit="tokens/s", against="free replies", theirs=free)


if __name__ == "__main__":
    main()
