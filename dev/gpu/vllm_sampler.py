"""Proves ``sampler=vllm`` on one GPU: ``python -m dev.gpu.vllm_sampler --out FILE``. Random weights, Llama and Qwen2.

- Log-probabilities of sampler and trainer agree before and after a large change of the weights, and after the way back.
- 50 updates with sleep do not grow the memory.
- A killed trainer leaves no process on the GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dev.gpu.random_model import save_random_model
from groundwire.train.policy.types import Completion, Sampling
from groundwire.train.policy.vllm.engine import VLLMEngine

SHAPES = ("135m", "qwen2-896x24")
_PROMPTS, _PROMPT, _REPLY, _UPDATES = 64, 880, 42, 50


def start(folder: Path) -> VLLMEngine:
    """An engine for the model in a folder."""
    return VLLMEngine(
        folder, device="cuda", max_model_len=2048, max_batch=128, dtype="bfloat16", log=folder / "vllm.log"
    )


def sample(engine: VLLMEngine, vocabulary: int, seed: int) -> list[Completion]:
    """Replies to random prompts."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(100, vocabulary) for _ in range(_PROMPT)] for _ in range(_PROMPTS)]
    futures = [engine.submit(prompt, Sampling(max_tokens=_REPLY, seed=n)) for n, prompt in enumerate(prompts)]
    return [future.result() for future in futures]


@torch.no_grad()
def differences(model: Any, replies: list[Completion]) -> dict[str, float]:
    """Mean and largest |difference| of the sampler's log-probabilities from the model's, in bfloat16."""
    found = []
    for reply in replies:
        ids = torch.tensor([[*reply.prompt_ids, *reply.token_ids]], device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(ids, use_cache=False).logits[0, len(reply.prompt_ids) - 1 : -1].float()
        own = torch.log_softmax(logits, -1).gather(1, ids[0, len(reply.prompt_ids) :, None])[:, 0]
        found.append((own.cpu() - torch.tensor(reply.logprobs)).abs())
    values = torch.cat(found)
    return {"mean": round(float(values.mean()), 5), "largest": round(float(values.max()), 4)}


def used_gb() -> float:
    """The GPU's memory in use, of all processes."""
    free, total = torch.cuda.mem_get_info()
    return round((total - free) / 1e9, 2)


def check(shape: str) -> dict[str, Any]:
    """The figures of one model."""
    folder = Path(tempfile.mkdtemp()) / "model"
    save_random_model(shape, folder)
    began = time.perf_counter()
    engine = start(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    engine.attach(model, AutoTokenizer.from_pretrained(folder))
    engine.update_weights(0)
    found: dict[str, Any] = {"shape": shape, "ready_s": round(time.perf_counter() - began, 1)}
    size = model.config.vocab_size
    before = [weight.detach().clone() for weight in model.parameters()]
    first = sample(engine, size, 1)
    found["before"] = differences(model, first)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * weight.std() * 0.5)
    found["old replies under changed weights"] = differences(model, first)
    engine.sleep()
    found["asleep_gb"] = used_gb()
    engine.update_weights(1)
    found["changed"] = differences(model, sample(engine, size, 2))
    with torch.no_grad():
        for weight, old in zip(model.parameters(), before, strict=True):
            weight.copy_(old)
    engine.update_weights(2)
    found["back"] = differences(model, sample(engine, size, 1))
    memory, seconds, sampling = [], [], []
    for update in range(_UPDATES):
        engine.sleep()
        started = time.perf_counter()
        engine.update_weights(3 + update)
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        sample(engine, size, 10 + update)
        sampling.append(time.perf_counter() - started)
        memory.append(used_gb())
    found |= {"memory_gb": memory[:: _UPDATES // 10], "handover_s": round(sorted(seconds)[_UPDATES // 2], 3)}
    found["sampling_s"] = round(sorted(sampling)[_UPDATES // 2], 3)
    engine.close()
    return found


def killed() -> dict[str, Any]:
    """Kill a process that has an engine: its processes that are left, and when the last one ended."""
    folder = Path(tempfile.mkdtemp()) / "model"
    save_random_model("135m", folder)
    child = subprocess.Popen(
        [sys.executable, "-m", "dev.gpu.vllm_sampler", "--hold", str(folder)], stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    processes = psutil.Process(child.pid).children(recursive=True)
    child.send_signal(signal.SIGKILL)
    started = time.perf_counter()
    _, left = psutil.wait_procs(processes, timeout=30)
    ended_s = round(time.perf_counter() - started, 1)
    return {"processes": len(processes), "left": [process.cmdline() for process in left], "ended_s": ended_s}


def main() -> None:
    """Write the figures of all parts, each when it is done."""
    parser = argparse.ArgumentParser(prog="python -m dev.gpu.vllm_sampler", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("vllm_sampler.json"))
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help="of dev.gpu.random_model; empty: the killed trainer alone"
    )
    parser.add_argument("--hold", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold:
        engine = start(options.hold)
        engine.attach(
            AutoModelForCausalLM.from_pretrained(options.hold).cuda(), AutoTokenizer.from_pretrained(options.hold)
        )
        engine.update_weights(0)
        print("ready", flush=True)
        time.sleep(600)
    results: list[Any] = []
    for part in (*filter(None, options.shapes.split(",")), "killed"):
        try:
            results.append(killed() if part == "killed" else check(part))
        except Exception as error:
            results.append({"part": part, "error": f"{type(error).__name__}: {error}"})
        options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
