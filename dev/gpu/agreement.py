"""Compares vLLM with the embedded server on one checkpoint: prompt ids, logprobs and greedy replies.

    python -m dev.gpu.agreement MODEL OUT.json

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

import httpx
import torch
from benchmarks._processes import free_port

from dev.gpu.agents import sql_messages
from groundwire import domains
from groundwire.tools.http.access_token import access_token
from groundwire.train.evaluation.validation import choose_tasks
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.model import load_policy
from groundwire.train.policy.server import PolicyServer

_PROMPTS, _MAX_MODEL_LEN, _START_S = 48, 1024, 300.0

Reply = tuple[list[int], list[int], list[float]]
"""Prompt ids, response ids, and the logprobs of the latter."""


def main(model: str, out: Path) -> None:
    """Compare the servers and write ``out``."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "policy", "--max-model-len", str(_MAX_MODEL_LEN)]
    command += ["--gpu-memory-utilization", "0.3", "--enforce-eager", "--dtype", "bfloat16"]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    environment = {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    vllm = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        result = asyncio.run(_compare(model, f"http://127.0.0.1:{port}", vllm))
    finally:
        os.killpg(vllm.pid, signal.SIGTERM)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(result)


async def _compare(model: str, vllm_url: str, vllm: subprocess.Popen[bytes]) -> dict[str, Any]:
    policy, tokenizer = load_policy(model)
    policy.to("cuda")
    engine = LocalEngine(policy, tokenizer, max_model_len=_MAX_MODEL_LEN)
    server = PolicyServer(engine)
    tasks = choose_tasks(domains.get("spider").load(None).validation, _PROMPTS)
    prompts = [sql_messages(str(task["question"]), str(task["db_path"])) for task in tasks]
    try:
        await server.start()
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:

            async def ask(url: str, temperature: float) -> list[Reply]:
                return await asyncio.gather(*(_chat(client, url, prompt, temperature) for prompt in prompts))

            await _wait_until_healthy(client, vllm_url, vllm)
            sampled, sampled_here = await ask(vllm_url, 1.0), await ask(server.url, 1.0)
            greedy, greedy_here = await ask(vllm_url, 0.0), await ask(server.url, 0.0)
    finally:
        await server.stop()
        engine.close()
    differences = torch.cat([(_logprobs(policy, reply) - torch.tensor(reply[2])).abs() for reply in sampled])
    return {
        "prompts": len(prompts),
        "same_prompt_ids": sum(a[0] == b[0] for a, b in zip(sampled, sampled_here, strict=True)),
        "tokens": len(differences),
        "logprob_difference_mean": round(differences.mean().item(), 5),
        "logprob_difference_p99": round(differences.quantile(0.99).item(), 5),
        "logprob_difference_max": round(differences.max().item(), 5),
        "greedy_replies_equal": sum(a[1] == b[1] for a, b in zip(greedy, greedy_here, strict=True)),
    }


@torch.no_grad()
def _logprobs(policy: Any, reply: Reply) -> torch.Tensor:
    """float32 [response tokens], on the CPU."""
    prompt, ids, _ = reply
    logits = policy(torch.tensor([prompt + ids], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(ids, device="cuda")[:, None])[:, 0].cpu()


async def _chat(client: httpx.AsyncClient, url: str, messages: list[Any], temperature: float) -> Reply:
    body = {"model": "policy", "messages": messages, "temperature": temperature, "max_tokens": 64}
    body |= {"logprobs": True, "return_token_ids": True}
    headers = {"Authorization": f"Bearer {access_token()}"}
    response = await client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
    data = response.raise_for_status().json()
    choice = data["choices"][0]
    return data["prompt_token_ids"], choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]


async def _wait_until_healthy(client: httpx.AsyncClient, url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"vLLM ended with status {server.returncode}")
        try:
            if (await client.get(f"{url}/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(1)
    raise RuntimeError(f"vLLM was not healthy within {_START_S:g} s")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
