"""Sampling speed of the embedded engine, beside transformers' own ``generate`` on the same checkpoint, in one run.

    python -m benchmarks.bench_server [--model FOLDER]

Prompts come in groups of eight, as GRPO sends them, and every reply has the same number of tokens. "Beside busy Python"
has another thread of pure Python in the process, which is what an event loop full of agents is.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks._results import record
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.model import count_parameters, load_policy, new_policy
from groundwire.train.policy.server import PolicyServer
from groundwire.train.policy.types import Sampling
from groundwire.train.pretrain.tokenizer import train_tokenizer

PROMPT_TOKENS, REPLY_TOKENS, GROUP = 150, 20, 8
SIZES, MAKES = (1, 8, 96), ("engine", "transformers")


def policy(path: str | None):
    """The checkpoint at ``path``, or the default architecture with random weights and about 2,000 ids."""
    if path:
        return load_policy(path)
    draw = random.Random(0)
    words = {"".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(1700)}
    tokenizer = train_tokenizer([" ".join(sorted(words))] * 5, words=sorted(words), min_count=1)
    return new_policy(tokenizer), tokenizer


def prompts(count: int, vocabulary: int, draw: random.Random) -> list[list[int]]:
    """``count`` prompts, of which every eight are the same one."""
    groups = -(-count // GROUP)
    made = [[draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(groups)]
    return [made[i // GROUP] for i in range(count)]


def best(run: Callable[[], int], repeats: int = 3) -> float:
    """Tokens per second of the fastest of ``repeats`` runs, after one that is not counted."""
    run()
    rates = []
    for _ in range(repeats):
        started = time.perf_counter()
        tokens = run()
        rates.append(tokens / (time.perf_counter() - started))
    return max(rates)


def through_transformers(model, batch: list[list[int]]) -> int:
    """One ``generate`` of the whole batch."""
    ids = torch.tensor(batch)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=REPLY_TOKENS,
        min_new_tokens=REPLY_TOKENS, pad_token_id=0,
    )  # fmt: skip
    return len(batch) * (out.shape[1] - PROMPT_TOKENS)


def through_engine(engine: LocalEngine, batch: list[list[int]]) -> int:
    """All of the batch at once, from this thread."""
    futures = [engine.submit(prompt, Sampling(max_tokens=REPLY_TOKENS)) for prompt in batch]
    return sum(len(future.result().token_ids) for future in futures)


async def through_http(url: str, batch: list[str]) -> int:
    """All of the batch as chat completions, one connection each, with ids and log-probabilities as the proxy asks."""
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask(text: str) -> int:
            body = {
                "messages": [{"role": "user", "content": text}], "max_tokens": REPLY_TOKENS,
                "return_token_ids": True, "logprobs": True,
            }  # fmt: skip
            async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                return len((await response.json())["choices"][0]["token_ids"])

        return sum(await asyncio.gather(*map(ask, batch)))


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
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a checkpoint folder; default: random weights")
    path = parser.parse_args().model
    if path and not Path(path).is_dir():
        sys.exit(f"no folder {path}")
    model, tokenizer = policy(path)
    vocabulary = len(tokenizer) - 16
    print(f"{count_parameters(model) / 1e6:.2f} M parameters, {len(tokenizer)} ids, torch {torch.__version__}")
    print(f"prompts of {PROMPT_TOKENS} tokens in groups of {GROUP}, {REPLY_TOKENS} sampled tokens each; tokens/s\n")
    print(f"{'':28}{'batch 1':>10}{'batch 8':>10}{'batch 96':>10}")
    draw = random.Random(1)

    found: dict[str, list[float]] = {}

    def row(name: str, run: Callable[[list[list[int]]], int], sizes: tuple[int, ...] = SIZES) -> None:
        cells = found[name] = [best(lambda size=size: run(prompts(size, vocabulary, draw))) for size in sizes]
        print(f"{name:28}" + "".join(f"{cell:10,.0f}" for cell in cells), flush=True)

    for threads in (1, 2):
        torch.set_num_threads(threads)
        row(f"transformers, threads={threads}", lambda batch: through_transformers(model, batch))
    for threads in (1, 2):
        engine = LocalEngine(model, tokenizer, max_model_len=512, threads=threads)
        engine._ends = frozenset()  # every reply has its full length
        row(f"engine, threads={threads}", lambda batch, engine=engine: through_engine(engine, batch))
        row("  beside busy Python", lambda batch, engine=engine: beside_python(lambda: through_engine(engine, batch)))
        asyncio.run(http_row(engine, threads, tokenizer))
        engine.close()
    for place, size in enumerate(SIZES):
        ours, theirs = (max(cells[place] for name, cells in found.items() if name.startswith(make)) for make in MAKES)
        record(f"sampling, batch {size}", ours, unit="tokens/s", against="transformers' generate", theirs=theirs)


async def http_row(engine: LocalEngine, threads: int, tokenizer) -> None:
    """The same through the server, with client and server on one event loop."""
    server = PolicyServer(engine)
    await server.start()
    draw = random.Random(2)
    cells = []
    for size in SIZES:
        rates = []
        for _ in range(4):
            batch = [tokenizer.decode(ids) for ids in prompts(size, 300, draw)]
            started = time.perf_counter()
            tokens = await through_http(server.url, batch)
            rates.append(tokens / (time.perf_counter() - started))
        cells.append(max(rates[1:]))
    print(f"{'  through HTTP':28}" + "".join(f"{cell:10,.0f}" for cell in cells), flush=True)
    await server.stop()


if __name__ == "__main__":
    main()
