"""What `groundwire conformance` finds: nothing in our proxy, and each fault of a gateway that is broken on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from open_rollouts import OpenRollouts

from groundwire.adapters.gateways.conversations import ExportedRow, Played, Policy, Tokens, compare, play, read_row
from groundwire.adapters.gateways.sdks import APIS
from groundwire.adapters.tracing import trajectories
from groundwire.adapters.tracing.proxy import LLMProxy
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer, encode
from groundwire.tools.errors import CommandError
from groundwire.tools.http.server import HttpServer

INSTALLED = [api for api in APIS if api != "generateContent" or (find_spec("google") and find_spec("google.genai"))]
Spoil = Callable[[list[dict[str, Any]]], None]


class BrokenGateway(HttpServer):
    """Passes chat completions on, and does something to their replies: to the whole one, or the chunks of a stream."""

    def __init__(self, upstream: str, spoil: Spoil, spoil_request: Callable[[Any], None]) -> None:
        super().__init__()
        self._upstream, self._spoil, self._spoil_request = upstream, spoil, spoil_request

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._spoil_request(body)
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{self._upstream}/chat/completions", json=body) as reply,
        ):
            text = await reply.text()
        if not body.get("stream"):
            replies = [json.loads(text)]
            self._spoil(replies)
            return web.json_response(replies[0])
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        self._spoil(chunks)
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        return web.Response(text=f"{events}data: [DONE]\n\n", content_type="text/event-stream")


async def played_with(spoil: Spoil, spoil_request: Callable[[Any], None] = lambda _: None) -> dict[str, Played]:
    policy = Policy()
    async with (
        ScriptedPolicyServer(policy.reply) as server,
        BrokenGateway(server.base_url, spoil, spoil_request) as gateway,
    ):
        results = await play(f"{gateway.url}/v1", key="none", model="any", policy=policy, apis=["chat"])
    return {result.key: result for result in results}


def choices_of(replies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice for reply in replies for choice in reply["choices"]]


@pytest.mark.parametrize("in_process", [True, False])
async def test_our_proxy_gives_training_every_token_of_every_api(in_process: bool) -> None:
    policy, store = Policy(), OpenRollouts()
    async with ScriptedPolicyServer(policy.reply) as server:
        options: dict[str, Any] = {"policy": server} if in_process else {"upstreams": [server.base_url]}
        async with LLMProxy(sink=store, **options) as proxy:
            rollout = await store.start()

            async def export() -> list[ExportedRow]:
                await proxy.flush()
                made = trajectories(call for call in await store.calls(rollout.rollout_id) if not call.failed)
                return [ExportedRow(t.prompt_ids, t.response_ids, t.loss_mask) for t in made]

            url = proxy.base_url(rollout.rollout_id, rollout.attempt.attempt_id)
            results = await play(url, key="none", model="any", policy=policy, export=export, apis=INSTALLED)
    wrong = {each.key: (each.tokens, each.problems) for each in results if each.wrong}
    assert not wrong
    refused = {each.key for each in results if each.refused}
    assert refused <= {"generateContent-choices", "generateContent-choices-stream"}
    assert sum(each.sampled for each in results) == sum(len(each.response_ids) for each in policy.sampled)
    assert all(each.tokens == Tokens() for each in results if not each.refused)


async def test_nothing_is_wrong_with_a_gateway_that_passes_all_on() -> None:
    assert not [each.key for each in (await played_with(lambda _: None)).values() if each.wrong]


async def test_ids_are_found_where_litellms_proxy_passes_them_on() -> None:
    def move(replies: list[dict[str, Any]]) -> None:
        for choice in choices_of(replies):
            if "message" in choice:
                choice["provider_specific_fields"] = {"token_ids": choice.pop("token_ids")}

    assert not [each.key for each in (await played_with(move)).values() if each.wrong]


async def test_ids_that_a_stream_drops_are_lost() -> None:
    def drop(replies: list[dict[str, Any]]) -> None:
        for choice in choices_of(replies)[3:]:
            choice["token_ids"] = choice["logprobs"] = None

    played = await played_with(drop)
    assert played["chat-text"].tokens == Tokens()
    stream = played["chat-text-stream"]  # three replies of eight tokens; the first chunk has none
    assert (stream.sampled, stream.tokens) == (24, Tokens(lost=18))
    assert stream.problems["the server counted 8 sampled tokens and sent the ids of 2"] == 3


async def test_a_chunk_that_is_lost_is_a_loss_and_another_reply() -> None:
    def lose(replies: list[dict[str, Any]]) -> None:
        if len(replies) > 1:
            del replies[2]

    played = (await played_with(lose))["chat-text-stream"]
    assert played.tokens is not None
    assert played.tokens.lost == 3 * 7  # what follows was not sampled after what the row has before it
    assert played.tokens.invented == 3 * 6
    assert "the agent got another reply than was sampled" in played.problems
    assert (played.later, played.broken) == (2, 2)


async def test_a_reply_that_is_tokenized_again_is_lost_and_invented() -> None:
    def tokenize(replies: list[dict[str, Any]]) -> None:
        if "message" in choices_of(replies)[0]:
            for choice in choices_of(replies):
                choice["token_ids"] = encode(choice["message"]["content"])[:8]

    assert (await played_with(tokenize))["chat-text"].tokens == Tokens(lost=24, invented=24)


async def test_choices_that_are_merged_are_lost_and_trained_twice() -> None:
    def merge(replies: list[dict[str, Any]]) -> None:
        choices = choices_of(replies)
        if "message" in choices[0]:
            for choice in choices:
                choice["token_ids"] = choices[0]["token_ids"]

    played = await played_with(merge)
    assert played["chat-choices"].tokens == Tokens(lost=24, masked_wrongly=24)
    assert played["chat-text"].tokens == Tokens()


async def test_a_history_that_is_changed_on_its_way_breaks_the_prefix() -> None:
    def change(body: Any) -> None:
        for message in body["messages"]:
            if message["role"] == "assistant" and message.get("tool_calls"):
                message["content"] = None

    played = await played_with(lambda _: None, change)
    assert (played["chat-text"].broken, played["chat-text"].wrong) == (0, False)
    assert (played["chat-tools"].later, played["chat-tools"].broken) == (
        5,
        3,
    )  # the replies to results are as they were
    assert played["chat-tools"].wrong


async def test_a_cut_off_reply_says_length_and_an_error_of_the_gateway_is_named() -> None:
    def stop(replies: list[dict[str, Any]]) -> None:
        for choice in choices_of(replies):
            choice["finish_reason"] = choice.get("finish_reason") and "stop"

    [(problem, times)] = (await played_with(stop))["chat-cut-off"].problems.items()
    assert (problem.startswith("a reply that max_tokens cut off"), times) == (True, 1)

    def fail(body: Any) -> None:
        raise web.HTTPNotFound if body.get("n") else web.HTTPInternalServerError

    played = await played_with(lambda _: None, fail)
    assert "404" in played["chat-choices"].refused
    assert not played["chat-choices"].wrong
    assert any("500" in problem for problem in played["chat-text"].problems)


async def test_a_mask_that_is_wrong_is_counted() -> None:
    """The rows of a gateway that trains a tool's result, masks a token of a reply, or has a reply in two rows."""
    policy = Policy()
    async with ScriptedPolicyServer(policy.reply) as server:
        await play(server.base_url, key="none", model="any", policy=policy, apis=["chat"])
    first, second, *_ = [each for each in policy.sampled if each.conversation == "chat-tools"]
    between = len(second.prompt_ids) - len(first.context)
    right = ExportedRow(
        prompt_ids=first.prompt_ids,
        response_ids=second.context[len(first.prompt_ids) :],
        loss_mask=[1] * 8 + [0] * between + [1] * 8,
    )

    def counts(*rows: ExportedRow) -> Tokens:
        return compare([first, second], rows)["chat-tools"]

    assert counts(right) == Tokens()
    assert counts(replace(right, loss_mask=[1] * (16 + between))) == Tokens(masked_wrongly=between)
    assert counts(replace(right, loss_mask=[0] * 2 + right.loss_mask[2:])) == Tokens(masked_wrongly=2)
    assert counts(right, right) == Tokens(masked_wrongly=16)
    assert counts() == Tokens(lost=16)


@pytest.mark.parametrize("fields", [{}, [], {"prompt_ids": [1], "response_ids": [2], "loss_mask": [1, 1]}])
def test_a_line_that_is_no_row_is_an_error(fields: Any) -> None:
    with pytest.raises(CommandError):
        read_row(fields)
