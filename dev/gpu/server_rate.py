"""What limits the calls a second of one vLLM: ``python -m dev.gpu.server_rate --json FILE``.

512 calls at once, 64 groups of 8 with one prompt of 886 tokens, replies of 42 tokens, 0.40 B random weights:

  engine, engine whole  vLLM's AsyncLLM in this process, without HTTP, as verl's server has it. ``whole``: the scheduler
                        of our runs, which sends a reply once (:mod:`groundwire.train.policy.vllm.scheduler`)
  ours                  the local trainer's ``sampler=vllm``, and the policy server over HTTP in front of it
  http N, http N whole  ``vllm serve`` with N API servers, and a bare client in another process

each without log-probabilities, with those of sampled tokens (0), and with one more (1). A line of JSON is printed when
it is measured: calls a second (the median of the rounds after the first), and the share of a processor that each
process takes meanwhile. A process near 1 is the limit; where none is, it is the GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch

from dev.gpu.collect import collect
from dev.gpu.peers import save_model, versions

GROUPS, SIZE, PROMPT, REPLY = 64, 8, 886, 42
CALLS = GROUPS * SIZE
PARTS = ("engine", "engine whole", "ours", "http 1", "http 1 whole", "http 4", "http 4 whole", "http 2")
_WHOLE = "groundwire.train.policy.vllm.scheduler.WholeReplies"
_ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 3072,
    "max_num_seqs": CALLS,
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 12_000_000_000,
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": True,
    # As for the local trainer: ready in seconds.
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512],
    },
}
_PORT = 18_473
_WAIT_S = 240.0


def _prompts(number: int, vocabulary: int = 40_000) -> list[list[int]]:
    """Those of a round, each of them new to the cache."""
    rng = random.Random(number)
    return [[rng.randrange(300, vocabulary) for _ in range(PROMPT)] for _ in range(GROUPS)]


def _processes() -> dict[int, tuple[str, float]]:
    """The name and the CPU seconds of this process and of those below it."""
    found = {}
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            times, words = process.cpu_times(), process.cmdline()
        except psutil.Error:
            continue
        name = "this program" if process == own else " ".join(words)[:200]
        known = ("EngineCore", "APIServer", "Worker", "policy.vllm.process", "vllm.entrypoints")
        name = next((part for part in known if part in name), name[:40])
        found[process.pid] = (name, times.user + times.system)
    return found


async def _measure(part: str, name: str, one_round: Callable[[int], Awaitable[Any]], rounds: int) -> None:
    """Print the figures of rounds; each takes its number, and returns seconds and CPU seconds of a client."""
    seconds: list[float] = []
    shares: dict[str, float] = {}
    for number in range(rounds + 1):
        before, started = _processes(), time.monotonic()
        client = await one_round(number)
        spent = client[0] if client else time.monotonic() - started
        seconds.append(spent)
        shares = {"client": round(client[1] / spent, 2)} if client else {}
        shares |= {
            f"{kind} {pid}": round((cpu_s - before[pid][1]) / spent, 2)
            for pid, (kind, cpu_s) in _processes().items()
            if pid in before and cpu_s - before[pid][1] > 0.05 * spent
        }
    figures = {"calls_per_s": round(CALLS / median(seconds[1:])), "seconds": [round(each, 2) for each in seconds]}
    print(json.dumps({"part": part, "case": name, **figures, "cpu": shares}), flush=True)


async def _engine(part: str, folder: str, rounds: int) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    more = {"scheduler_cls": _WHOLE} if "whole" in part else {}
    arguments: dict[str, Any] = {"model": folder, **_ENGINE, **more}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    numbers = iter(range(1_000_000))
    common = {"max_tokens": REPLY, "ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY}

    async def call(prompt: list[int], options: dict[str, Any]) -> None:
        requested = engine.generate(
            TokensPrompt(prompt_token_ids=prompt), SamplingParams(**common, **options), str(next(numbers))
        )
        reply = [output async for output in requested][-1].outputs[0]
        assert len(reply.token_ids) == REPLY

    first = 0
    cases: dict[str, dict[str, Any]] = {
        "logprobs 0": {"logprobs": 0, "detokenize": False},
        "no logprobs": {"detokenize": False},
        "logprobs 1": {"logprobs": 1, "detokenize": False},
        "logprobs 0, text": {"logprobs": 0},
        "logprobs 0, flat": {"logprobs": 0, "detokenize": False, "flat_logprobs": True},
    }
    for name, options in cases.items():
        first += 100

        async def one_round(number: int, first: int = first, options: dict[str, Any] = options) -> None:
            calls = (call(prompt, options) for prompt in _prompts(first + number) for _ in range(SIZE))
            await asyncio.gather(*calls)

        await _measure(part, name, one_round, rounds)
    engine.shutdown()


async def _ours(part: str, folder: str, rounds: int) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from groundwire.train.policy.server import PolicyServer
    from groundwire.train.policy.types import Sampling
    from groundwire.train.policy.vllm.engine import VLLMEngine

    engine = VLLMEngine(
        Path(folder), device="cuda", max_model_len=3072, max_batch=CALLS, dtype="bfloat16", log=Path(folder, "log")
    )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    engine.attach(model, tokenizer := AutoTokenizer.from_pretrained(folder))
    engine.update_weights(0)

    async def submit(number: int) -> None:
        sampling = Sampling(temperature=1.0, max_tokens=REPLY)
        futures = [engine.submit(prompt, sampling) for prompt in _prompts(number) for _ in range(SIZE)]
        await asyncio.gather(*map(asyncio.wrap_future, futures))

    await _measure(part, "pipe", submit, rounds)
    async with PolicyServer(engine, token="none") as server:
        body = {"model": "policy", "logprobs": True, "max_tokens": REPLY, "return_token_ids": True}

        async def over_http(number: int) -> tuple[float, float]:
            texts = [tokenizer.decode(prompt[: PROMPT * 3 // 4]) for prompt in _prompts(500 + number, len(tokenizer))]
            bodies = [{**body, "messages": [{"role": "user", "content": text}]} for text in texts]
            return await _client(f"{server.url}/v1/chat/completions", bodies, folder)

        await _measure(part, "policy server", over_http, rounds)
    engine.close()


async def _http(part: str, folder: str, rounds: int) -> None:
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--port", str(_PORT)]
    command += ["--served-model-name", "policy", "--api-server-count", part.split()[1], "--disable-uvicorn-access-log"]
    command += ["--scheduler-cls", _WHOLE] if "whole" in part else []
    for name, value in _ENGINE.items():
        option = f"--{name.replace('_', '-')}"
        command += [option] if value is True else [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    server = await asyncio.create_subprocess_exec(*command)
    try:
        await _wait_until_ready(server)
        body = {"model": "policy", "max_tokens": REPLY, "temperature": 1.0, "ignore_eos": True}
        cases: dict[str, dict[str, Any]] = {
            "logprobs 0, ids": {"logprobs": 0, "return_token_ids": True},
            "no logprobs, ids": {"return_token_ids": True},
            "logprobs 0, no ids": {"logprobs": 0},
            "logprobs 1, ids": {"logprobs": 1, "return_token_ids": True},
        }
        for place, (name, options) in enumerate(cases.items()):

            async def one_round(number: int, first: int = 100 * place, options: dict[str, Any] = options) -> Any:
                bodies = [{**body, **options, "prompt": prompt} for prompt in _prompts(first + number)]
                return await _client(f"http://127.0.0.1:{_PORT}/v1/completions", bodies, folder)

            await _measure(part, name, one_round, rounds)
    finally:
        server.terminate()
        await asyncio.wait_for(server.wait(), 60)


async def _wait_until_ready(server: asyncio.subprocess.Process) -> None:
    import aiohttp

    ends = time.monotonic() + _WAIT_S
    async with aiohttp.ClientSession() as session:
        while server.returncode is None and time.monotonic() < ends:
            try:
                async with session.get(f"http://127.0.0.1:{_PORT}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
    raise RuntimeError(f"vllm serve was not ready (exit {server.returncode})")


async def _client(url: str, bodies: list[dict[str, Any]], folder: str) -> tuple[float, float]:
    """Seconds, and CPU seconds, of a process that sends each body ``SIZE`` times at once. Its start is not counted."""
    file = f"{folder}/bodies.json"
    await asyncio.to_thread(lambda: Path(file).write_text(json.dumps(bodies)))
    command = [sys.executable, "-m", "dev.gpu.http_calls", url, file, str(SIZE)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the client ended with {process.returncode}")
    seconds, cpu_s = map(float, output.split()[-2:])
    return seconds, cpu_s


def main() -> int:
    """Measure each part in a process of its own; the exit status is the number of those that failed."""
    parser = argparse.ArgumentParser(
        prog="python -m dev.gpu.server_rate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, default=Path("server_rate.json"), help="default: %(default)s")
    parser.add_argument("--parts", default=",".join(PARTS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="after the first; default: %(default)s")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds for all parts; default: %(default)g")
    parser.add_argument("--only", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := sorted(set(options.parts.split(",")) - set(PARTS)):
        parser.error(f"{', '.join(unknown)}: no part; known: {', '.join(PARTS)}")
    if options.only:
        part, folder = options.only
        measure = _http if part.startswith("http") else _ours if part == "ours" else _engine
        asyncio.run(measure(part, folder, options.rounds))
        return 0
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch finds none")
    result = {"gpu": torch.cuda.get_device_name(), **versions(), "calls": CALLS, "prompt": PROMPT, "reply": REPLY}
    with tempfile.TemporaryDirectory() as folder:
        save_model("0.5b", folder)
        return collect("dev.gpu.server_rate", options.parts.split(","), folder, result, options.json, options.limit)


if __name__ == "__main__":
    sys.exit(main())
