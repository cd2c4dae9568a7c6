"""Writes lightning_spans.json: one conversation as Agent Lightning 0.3 itself traces it.

    python tests/data/make_lightning_spans.py runner    # by AgentOpsTracer in its own runner, in front of our proxy
    python tests/data/make_lightning_spans.py proxy     # by its own LLM proxy

Each is a process of its own, because both patch the OpenAI client and LiteLLM for good.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": "sk-none"}

import agentlightning as agl
import openai
from agentlightning.store.memory import InMemoryLightningStore
from agentlightning.tracer.agentops import AgentOpsTracer
from agentlightning.utils.server_launcher import PythonServerLauncherArgs

from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.train.store.memory import MemoryStore

PATH = Path(__file__).with_name("lightning_spans.json")
KEPT = ("openai.chat.completion", "agentlightning.annotation", "raw_gen_ai_request", "litellm_request")


async def converse(base_url: str, **options: Any) -> None:
    """Two calls of one conversation, with a reward for the first."""
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key="sk-none", max_retries=0) as client:
        for reward in (0.25, None):
            reply = await client.chat.completions.create(model="m", messages=messages, **options)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}]
            messages += [{"role": "user", "content": "Go on."}]
            if reward is not None and not options:
                agl.emit_reward(reward)


@agl.rollout
async def agent(task: Any, llm: agl.ProxyLLM, rollout: Any) -> float:
    await converse(llm.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id))
    return 0.5


async def by_runner(url: str, store: Any) -> None:
    async with LLMProxy(upstreams=[url], sink=MemoryStore()) as proxy:
        model = agl.ProxyLLM(endpoint=f"http://127.0.0.1:{proxy.port}/v1", model="m")
        runner: Any = agl.LitAgentRunner(tracer=AgentOpsTracer())
        with runner.run_context(agent=agent, store=store):
            await runner.step({}, resources={"main_llm": model})


async def by_proxy(url: str, store: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    served = {"model": "hosted_vllm/m", "api_base": url, "api_key": "none"}
    proxy = agl.LLMProxy(
        store=store,
        model_list=[{"model_name": "m", "litellm_params": served}],
        launcher_args=PythonServerLauncherArgs(
            host="127.0.0.1", port=port, launch_mode="thread", healthcheck_url="/health/liveliness"
        ),
    )
    await proxy.start()
    started = await store.start_rollout(input={})
    ids = f"rollout/{started.rollout_id}/attempt/{started.attempt.attempt_id}"
    await converse(f"http://127.0.0.1:{port}/{ids}/v1", logprobs=True)
    await asyncio.sleep(2)  # its spans arrive some time after the replies
    await proxy.stop()


async def main(which: str) -> None:
    store = InMemoryLightningStore(thread_safe=True)
    async with ScriptedPolicyServer(replies=["hello", "world"]) as server:
        await {"runner": by_runner, "proxy": by_proxy}[which](server.base_url, store)
    spans = [
        json.loads(span.model_dump_json(exclude={"resource"}))
        for rollout in await store.query_rollouts()
        for span in await store.query_spans(rollout.rollout_id)
        if span.name in KEPT or span.name.endswith(".session")
    ]
    known = json.loads(PATH.read_text()) if PATH.exists() else {}
    PATH.write_text(json.dumps({**known, which: spans}, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
