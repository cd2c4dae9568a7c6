"""A process of the tracing benchmarks: the upstream, the HTTP store, or one of the two proxies with its store.

It prints one JSON line when it is ready, answers each line on stdin with another, and ends when stdin closes. Prompts
have as many characters as 1,024 tokens have, so both proxies transfer and store realistic sizes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sys
from pathlib import Path
from typing import Any

from benchmarks._processes import free_port
from benchmarks.tracing._http import Server
from groundwire.tools.startup import fast_import

PROMPT_TOKENS, RESPONSE_TOKENS = 1024, 64
ROLLOUTS = 64
MASTER_KEY = "sk-benchmark"


def request_body(api: str = "chat/completions") -> dict[str, Any]:
    """An agent's request, with about four characters per prompt token."""
    words = " ".join(random.Random(0).choices(["column", "table", "SELECT", "integer", "name"], k=620))
    system, user = words[:3200], {"role": "user", "content": words[3200:3600]}
    sampling = {"model": "policy", "temperature": 1.0}
    if api == "responses":
        return {**sampling, "instructions": system, "input": [user], "max_output_tokens": 64}
    if api == "messages":
        return {**sampling, "system": system, "messages": [user], "max_tokens": 64}
    return {**sampling, "messages": [{"role": "system", "content": system}, user], "max_tokens": 64}


def reply_body() -> tuple[bytes, bytes]:
    """vLLM's reply in two parts: the reply's id, which must differ each time, goes between them."""
    rng = random.Random(1)
    tokens = [rng.randrange(151_936) for _ in range(RESPONSE_TOKENS)]
    content = [
        {"token": f"w{i}", "logprob": rng.uniform(-3, 0), "bytes": [119, 48 + i % 10], "top_logprobs": []}
        for i in range(RESPONSE_TOKENS)
    ]
    text = json.dumps(
        {
            "id": "chatcmpl-@",
            "object": "chat.completion",
            "created": 1_790_000_000,
            "model": "policy",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "SELECT name FROM singer " * 10, "tool_calls": []},
                    "logprobs": {"content": content},
                    "finish_reason": "stop",
                    "token_ids": tokens,
                }
            ],
            "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": RESPONSE_TOKENS, "total_tokens": 1088},
            "prompt_token_ids": [rng.randrange(151_936) for _ in range(PROMPT_TOKENS)],
        }
    )
    before, _, after = text.partition("@")
    return before.encode(), after.encode()


async def upstream() -> None:
    """A policy server that answers at once."""
    before, after = reply_body()
    models = json.dumps({"object": "list", "data": [{"id": "policy", "object": "model"}]}).encode()
    replies = 0

    def reply(path: str) -> bytes:
        nonlocal replies
        if path.endswith("/models"):
            return models
        replies += 1
        return before + b"%d" % replies + after

    server = await asyncio.get_running_loop().create_server(lambda: Server(reply), "127.0.0.1", 0, backlog=1024)
    await _serve({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"})


async def store() -> None:
    """Agent Lightning's store over HTTP."""
    from agentlightning import InMemoryLightningStore, LightningStoreServer

    server = LightningStoreServer(InMemoryLightningStore(thread_safe=True), host="127.0.0.1", port=free_port())
    await server.start()
    await _serve({"url": server.endpoint})
    await server.stop()


async def proxy(which: str, upstream_url: str, store_url: str) -> None:
    """Our proxy (``ours``) or Agent Lightning's (``theirs``), with the store at ``store_url``, or its own if empty."""
    with fast_import():  # as our commands do
        from agentlightning import InMemoryLightningStore, LightningStoreClient, LLMProxy
        from agentlightning.utils.server_launcher import PythonServerLauncherArgs

        from groundwire.adapters.tracing import to_span
        from groundwire.adapters.tracing.proxy import LLMProxy as OurProxy
        from groundwire.train.store.agent_lightning import span_json
        from groundwire.train.store.memory import MemoryStore
        from groundwire.train.store.remote import RemoteStore
        from groundwire.train.store.rollout import Rollout

    store: Any
    if which == "ours":
        store = MemoryStore()  # the one that the trainer has
        if store_url:
            store = RemoteStore(store_url)
            await store.start()
        await store.enqueue([Rollout(task={}) for _ in range(ROLLOUTS)])
        attempts = [(r.rollout_id, r.attempts[-1].attempt_id) for r in await store.dequeue(ROLLOUTS)]
    else:
        store = LightningStoreClient(store_url) if store_url else InMemoryLightningStore(thread_safe=True)
        rollouts = [await store.start_rollout(input={}) for _ in range(ROLLOUTS)]
        attempts = [(r.rollout_id, r.attempt.attempt_id) for r in rollouts]
    running: Any
    if which == "ours":
        running = OurProxy(upstreams=[upstream_url], sink=store, model="policy")
        await running.start()
        urls = [running.base_url(*attempt) for attempt in attempts]
    else:
        running = LLMProxy(
            store=store,
            model_list=[
                {
                    "model_name": "policy",
                    "litellm_params": {
                        "model": "hosted_vllm/policy",
                        "api_base": upstream_url,
                        "api_key": "none",
                        "use_chat_completions_api": True,  # for Responses
                    },
                }
            ],
            litellm_config={"router_settings": {"disable_cooldowns": True}},
            launcher_args=PythonServerLauncherArgs(
                host="127.0.0.1",
                port=free_port(),
                launch_mode="mp" if store_url else "thread",
                # /health needs the master key, which the launcher does not send.
                healthcheck_url="/health/liveliness",
            ),
        )
        await running.start()
        port = running.server_launcher_args.port
        urls = [f"http://127.0.0.1:{port}/rollout/{r}/attempt/{a}/v1" for r, a in attempts]

    async def spans_to(path: str) -> dict[str, Any]:
        if which == "ours":
            await running.flush()
            records = [await store.get(rollout_id) for rollout_id, _ in attempts]
            lines = [json.dumps(span_json(to_span(call))) for record in records for call in record.calls]
        else:
            await asyncio.sleep(1.0)  # it has no flush
            found = [span for rollout_id, _ in attempts for span in await store.query_spans(rollout_id)]
            lines = [span.model_dump_json() for span in found]
        await asyncio.to_thread(Path(path).write_text, "\n".join(lines), "utf-8")
        return {"spans": len(lines), "bytes": sum(map(len, lines))}

    await _serve({"urls": urls, "key": MASTER_KEY}, spans_to)
    await running.stop()


async def _serve(ready: dict[str, Any], answer: Any = None) -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    _print_json(ready)
    while line := await lines.readline():
        _print_json(await answer(line.decode().strip()))


def _print_json(value: dict[str, Any]) -> None:
    os.write(REAL_STDOUT, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    os.environ.update(LITELLM_MASTER_KEY=MASTER_KEY, LITELLM_LOG="ERROR")
    # LiteLLM prints to stdout, which is for the parent process alone.
    REAL_STDOUT = os.dup(1)
    os.dup2(2, 1)
    logging.disable(logging.WARNING)
    role, *arguments = sys.argv[1:]
    asyncio.run({"upstream": upstream, "store": store, "proxy": proxy}[role](*arguments))
