"""Sampling speed of the embedded engine beside transformers' ``generate``, on one checkpoint.

    python -m benchmarks.server [--model FOLDER]

Prompts come in groups of eight, as in GRPO, and every reply has the same number of tokens. "Beside busy Python" has
another thread of pure Python in the process, as an event loop full of agents is.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks._results import record
from groundwire.train.policy import STARTER
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.model import count_parameters, load_policy
from groundwire.train.policy.server import PolicyServer
from groundwire.train.policy.types import Sampling

PROMPT_TOKENS, REPLY_TOKENS, GROUP_SIZE = 150, 20, 8
SIZES, REPEATS = (1, 8, 96), 3


def prompts(count: int, vocabulary: int, rng: random.Random) -> list[list[int]]:
    """``count`` random prompts; every eight in a row are equal."""
    groups = [[rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(-(-count // GROUP_SIZE))]
    return [groups[place // GROUP_SIZE] for place in range(count)]


def fastest(run: Callable[[Any], int], batches: Iterator[Any]) -> float:
    """Tokens per second of the fastest of three runs, after one that is not counted."""
    rates = []
    for batch in itertools.islice(batches, 1 + REPEATS):
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


def with_engine(engine: LocalEngine, batch: list[list[int]]) -> int:
    """All requests of the batch at once, from this thread."""
    futures = [engine.submit(prompt, Sampling(max_tokens=REPLY_TOKENS)) for prompt in batch]
    return sum(len(future.result().token_ids) for future in futures)


def over_http(loop: asyncio.AbstractEventLoop, url: str, batch: list[str]) -> int:
    """The batch as chat completions with token ids and logprobs, one connection each, on the server's event loop."""
    import aiohttp

    async def ask(session: aiohttp.ClientSession, text: str) -> int:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": REPLY_TOKENS}
        body |= {"return_token_ids": True, "logprobs": True}
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            return len((await response.json())["choices"][0]["token_ids"])

    async def ask_all() -> int:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return sum(await asyncio.gather(*(ask(session, text) for text in batch)))

    return loop.run_until_complete(ask_all())


def beside_python(run: Callable[[], int]) -> int:
    """``run`` while another thread computes in pure Python."""
    stop = threading.Event()

    def compute() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        return run()
    finally:
        stop.set()
        thread.join()


def main() -> None:
    """Print tokens/s by batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(STARTER), help="a checkpoint's folder; default: the starter")
    path = parser.parse_args().model
    if not Path(path).is_dir():
        sys.exit(f"no folder {path}")
    model, tokenizer = load_policy(path)
    vocabulary = len(tokenizer) - 16
    print(f"{count_parameters(model) / 1e6:.2f} M parameters, {len(tokenizer)} ids, torch {torch.__version__}")
    print(f"{PROMPT_TOKENS} prompt tokens in groups of {GROUP_SIZE}, {REPLY_TOKENS} sampled tokens each; tokens/s\n")
    print(f"{'':28}" + "".join(f"{f'batch {size}':>10}" for size in SIZES))
    rng = random.Random(1)

    def row(name: str, run: Callable[[Any], int], convert: Callable[[list[int]], Any] = list) -> list[float]:
        rates = []
        for size in SIZES:
            batches = ([convert(ids) for ids in prompts(size, vocabulary, rng)] for _ in itertools.count())
            rates.append(fastest(run, batches))
        print(f"{name:28}" + "".join(f"{rate:10,.0f}" for rate in rates), flush=True)
        return rates

    theirs, ours = [], []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        theirs.append(row(f"transformers, threads={threads}", partial(with_transformers, model)))
    for threads in (1, 2):
        engine = LocalEngine(model, tokenizer, max_model_len=512, threads=threads)
        engine._ends = frozenset()  # every reply has its full length
        run = partial(with_engine, engine)
        ours.append(row(f"engine, threads={threads}", run))
        row("  beside busy Python", lambda batch, run=run: beside_python(partial(run, batch)))
        loop, server = asyncio.new_event_loop(), PolicyServer(engine)
        loop.run_until_complete(server.start())
        row("  through HTTP", partial(over_http, loop, server.url), tokenizer.decode)
        loop.run_until_complete(server.stop())
        loop.close()
        engine.close()
    for place, size in enumerate(SIZES):
        best, other = (max(rates[place] for rates in each) for each in (ours, theirs))
        record(f"sampling, batch {size}", best, unit="tokens/s", against="transformers' generate", theirs=other)


if __name__ == "__main__":
    main()
