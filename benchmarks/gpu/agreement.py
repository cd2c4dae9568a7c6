"""Compares vLLM with the embedded server on one checkpoint: prompt ids, logprobs and greedy replies.

    python -m benchmarks.gpu.agreement MODEL OUT.json

vLLM samples replies in bf16 at temperature 1, and the model scores the same tokens in float32. Then both servers answer
greedily.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import torch

from benchmarks._processes import free_port
from benchmarks.gpu.agents import sql_messages
from groundwire import domains
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.model import load_policy
from groundwire.train.policy.server import PolicyServer

_TASKS = 48
_LENGTH = 1024


def main(model: str, out: Path) -> None:
    """Compare the servers and write ``out``."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "policy", "--max-model-len", str(_LENGTH)]
    command += ["--gpu-memory-utilization", "0.3", "--enforce-eager", "--dtype", "bfloat16"]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    server = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        result = asyncio.run(_ask_both(model, f"http://127.0.0.1:{port}", server))
    finally:
        os.killpg(server.pid, signal.SIGTERM)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(result)


async def _ask_both(model: str, vllm: str, server: subprocess.Popen[bytes]) -> dict[str, Any]:
    policy, tokenizer = load_policy(model)
    policy.to("cuda")
    engine = LocalEngine(policy, tokenizer, max_model_len=_LENGTH)
    embedded = PolicyServer(engine)
    try:
        await embedded.start()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            await _wait_until_healthy(session, vllm, server)
            chosen = domains.get("spider").load(None).validation[:: max(1, 504 // _TASKS)][:_TASKS]
            prompts = [sql_messages(str(task["question"]), str(task["db_path"])) for task in chosen]
            return await _compare(session, vllm, embedded.url, policy, prompts)
    finally:
        await embedded.stop()
        engine.close()


async def _compare(
    session: aiohttp.ClientSession, vllm: str, embedded: str, policy: Any, prompts: list[Any]
) -> dict[str, Any]:
    theirs = await asyncio.gather(*(_chat(session, vllm, each, temperature=1.0) for each in prompts))
    ours = await asyncio.gather(*(_chat(session, embedded, each, temperature=1.0) for each in prompts))
    differences: list[float] = []
    for prompt, ids, logprobs in theirs:
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + ids], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
        scored = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids, device="cuda")[:, None])[:, 0]
        differences += (scored.cpu() - torch.tensor(logprobs)).abs().tolist()
    first = await asyncio.gather(*(_chat(session, vllm, each, temperature=0.0) for each in prompts))
    second = await asyncio.gather(*(_chat(session, embedded, each, temperature=0.0) for each in prompts))
    values = torch.tensor(differences)
    return {
        "prompts": len(prompts),
        "same_prompt_ids": sum(a[0] == b[0] for a, b in zip(theirs, ours, strict=True)),
        "tokens": len(differences),
        "logprob_difference_mean": round(values.mean().item(), 5),
        "logprob_difference_p99": round(values.quantile(0.99).item(), 5),
        "logprob_difference_max": round(values.max().item(), 5),
        "greedy_replies_equal": sum(a[1] == b[1] for a, b in zip(first, second, strict=True)),
    }


async def _chat(
    session: aiohttp.ClientSession, url: str, messages: list[Any], *, temperature: float
) -> tuple[list[int], list[int], list[float]]:
    body = {"model": "policy", "messages": messages, "temperature": temperature, "max_tokens": 64}
    body |= {"logprobs": True, "return_token_ids": True}
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        data = await reply.json()
    choice = data["choices"][0]
    return data["prompt_token_ids"], choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


async def _wait_until_healthy(session: aiohttp.ClientSession, url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"vLLM ended with status {server.returncode}")
        try:
            async with session.get(f"{url}/health") as reply:
                if reply.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(1)
    raise RuntimeError("vLLM was not healthy within 300 s")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
