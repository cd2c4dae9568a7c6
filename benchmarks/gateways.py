"""``groundwire conformance`` with gateways that need no GPU: our proxy, Agent Lightning's, OpenEnv's and LiteLLM's.

Each is started as its documentation says, in front of the scripted policy. OpenEnv's and LiteLLM's run in environments
of their own, which uv makes. What is compared is what a gateway gives to training: our trajectories, Agent Lightning's
triplets, OpenEnv's sequences that it calls trainable. LiteLLM's proxy has no such thing, so there it is its replies.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks._processes import free_port, running
from benchmarks.tracing._setup import started
from groundwire.adapters.gateways.conversations import ExportedRow, Played, Policy, Tokens, play
from groundwire.adapters.gateways.sdks import APIS
from groundwire.adapters.tracing import calls_from_spans, trajectories
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.tools.terminal import format_table, installed_version

OPENENV, LITELLM = "openenv==0.10.0", "litellm[proxy]==1.108.7"
_KEY = "sk-conformance-0123456789abcdef"
_START_S, _SETTLE_S = 180.0, 3.0
Export = Callable[[], Awaitable[Sequence[ExportedRow]]]


class Running(NamedTuple):
    """A gateway that answers."""

    url: str
    key: str
    model: str
    export: Export | None = None


def _rows(spans: list[Any]) -> list[ExportedRow]:
    made = trajectories(calls_from_spans(spans))
    return [ExportedRow(each.prompt_ids, each.response_ids, each.loss_mask) for each in made]


def _triplets(spans: list[Any]) -> list[ExportedRow]:
    from agentlightning import LlmProxyTraceToTriplet

    pairs = [(each.prompt["token_ids"], each.response["token_ids"]) for each in LlmProxyTraceToTriplet().adapt(spans)]
    return [ExportedRow(list(prompt), list(ids), [1] * len(ids)) for prompt, ids in pairs]


@asynccontextmanager
async def _proxy(which: str, read: Callable[[list[Any]], list[ExportedRow]], upstream: str) -> AsyncIterator[Running]:
    """Our proxy or Agent Lightning's, with one rollout for all conversations."""
    from agentlightning.types import Span

    with started("proxy", which, upstream, "") as proxy, tempfile.TemporaryDirectory() as folder:

        async def export() -> list[ExportedRow]:
            path = Path(folder) / "spans"
            await asyncio.sleep(_SETTLE_S)
            proxy.ask(str(path))
            return read([Span.model_validate_json(line) for line in path.read_text("utf-8").splitlines()])

        yield Running(proxy.ready["urls"][0], proxy.ready["key"], "policy", export)


@asynccontextmanager
async def ours(upstream: str) -> AsyncIterator[Running]:
    """Our proxy, whose calls become trajectories."""
    async with _proxy("ours", _rows, upstream) as proxy:
        yield proxy


@asynccontextmanager
async def agent_lightning(upstream: str) -> AsyncIterator[Running]:
    """LLMProxy of Agent Lightning 0.3 with its defaults, whose spans its LlmProxyTraceToTriplet reads."""
    async with _proxy("theirs", _triplets, upstream) as proxy:
        yield proxy


@asynccontextmanager
async def openenv(upstream: str) -> AsyncIterator[Running]:
    """OpenEnv's capture proxy; the API key is the name of a session, and each conversation has its own."""
    module, port = "openenv.core.harness.capture.server", free_port()
    command = ["python", "-m", module, "--llm-url", upstream, "--model", "scripted", "--port", str(port)]
    with running(_uv(OPENENV, *command, "--capture-level", "tokens", "--allow-unregistered")):
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:

            async def export() -> list[ExportedRow]:
                rows = []
                for session in (await client.get("/sessions")).json()["sessions"]:
                    document = (await client.get(f"/sessions/{session['session_id']}/rollout")).json()
                    for each in document["sequences"]:
                        if each["trainable"]:
                            ids, start = each["input_ids"], each["prompt_len"]
                            rows.append(ExportedRow(ids[:start], ids[start:], each["loss_mask"][start:]))
                return rows

            await _wait(f"{url}/v1")
            yield Running(f"{url}/v1", "{conversation}", "scripted", export)


@asynccontextmanager
async def litellm(upstream: str) -> AsyncIterator[Running]:
    """LiteLLM's proxy, which serves Responses by chat completions."""
    port, served = free_port(), {"model": "hosted_vllm/scripted", "api_base": upstream, "api_key": "none"}
    settings = {
        "model_list": [
            {"model_name": "scripted", "litellm_params": {**served, "use_chat_completions_api": True}},
        ],
        "router_settings": {"disable_cooldowns": True, "num_retries": 0},
        "general_settings": {"master_key": _KEY},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(settings))  # which is YAML
        with running(_uv(LITELLM, "litellm", "--config", str(path), "--host", "127.0.0.1", "--port", str(port))):
            url = f"http://127.0.0.1:{port}/v1"
            await _wait(url)
            yield Running(url, _KEY, "scripted")


GATEWAYS: dict[str, tuple[str, Callable[[str], AbstractAsyncContextManager[Running]]]] = {
    "ours": ("groundwire", ours),
    "agent-lightning": (f"Agent Lightning {installed_version('agentlightning')}, LLMProxy", agent_lightning),
    "openenv": (f"OpenEnv {OPENENV.partition('==')[2]}, capture proxy", openenv),
    "litellm": (f"LiteLLM {LITELLM.partition('==')[2]}, proxy", litellm),
}


def main() -> int:
    """Print the table, and what is wrong by conversation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateways", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(GATEWAYS)}; default: all")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - GATEWAYS.keys()):
        parser.error(f"no gateway {unknown[0]!r}; known: {', '.join(GATEWAYS)}")
    rows = []
    for name in options.names or GATEWAYS:
        title, start = GATEWAYS[name]
        results = asyncio.run(_play(start))
        rows.append([title, *(_cell([each for each in results if each.api == api]) for api in APIS)])
        for each in results:
            if each.wrong or each.refused:
                print(f"{name}: {each.key}: {each.refused or (each.tokens, dict(each.problems))}", flush=True)
    print(format_table(("Gateway", *APIS), rows, "markdown"))
    return 0


async def _play(start: Callable[[str], AbstractAsyncContextManager[Running]]) -> list[Played]:
    policy = Policy()
    async with ScriptedPolicyServer(policy.reply) as server, start(server.base_url) as gateway:
        url, key, model, export = gateway
        return await play(url, key=key, model=model, policy=policy, export=export)


def _cell(results: list[Played]) -> str:
    """The sums over the conversations of an API."""
    served = [each for each in results if not each.refused]
    if not served:
        return "not served"
    sampled, counts = sum(each.sampled for each in served), Counter[str]()
    for each in served:
        tokens = each.tokens or Tokens(lost=each.sampled)
        counts.update({"lost": tokens.lost, "masked wrongly": tokens.masked_wrongly, "invented": tokens.invented})
        counts.update({"prompts that break the prefix": each.broken})
    if counts["lost"] == sampled:
        return "served, without ids"
    wrong = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    refused = ", ".join(sorted({each.name for each in results if each.refused}))
    return f"{wrong or 'none'} of {sampled}" + (f"; not served: {refused}" if refused else "")


def _uv(package: str, *command: str) -> list[str]:
    return [sys.executable, "-m", "uv", "run", "--no-project", "--isolated", "--quiet", "--with", package, *command]


async def _wait(url: str) -> None:
    """Wait until the gateway answers."""
    async with httpx.AsyncClient(trust_env=False) as client:
        for _ in range(int(_START_S)):
            try:
                await client.get(f"{url}/models")
                return
            except httpx.RequestError:
                await asyncio.sleep(1.0)
    raise RuntimeError(f"{url} did not answer within {_START_S:g} s")


if __name__ == "__main__":
    sys.exit(main())
