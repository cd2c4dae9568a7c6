"""A legacy completion samples its prompt as it is, and is traced token by token."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from wire import Bench, bench, policy

from groundwire.adapters.tracing.scripted_server import END, Reply, encode

__all__ = ["bench", "policy"]


async def ask(b: Bench, stream: bool = False, **options: Any) -> tuple[str, Any]:
    """The text, and the whole completion or the chunks."""
    async with openai.AsyncOpenAI(base_url=b.url, api_key="none", max_retries=0) as client:
        answer = await client.completions.create(model="m", stream=stream, **{"prompt": "Once upon", **options})
        chunks = [chunk async for chunk in answer] if stream else [answer]
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices), chunks


@pytest.mark.parametrize("prompt", ["Once upön", ["Once upön"], encode("Once upön"), [encode("Once upön")]])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_is_sampled_as_it_is(bench: Any, stream: bool, prompt: Any) -> None:
    b = await bench(Reply(text=" a time", logprobs=[-0.25] * 8))
    text, chunks = await ask(b, stream, prompt=prompt, temperature=0.5)
    assert (text, chunks[-1].choices[0].finish_reason, chunks[0].object) == (" a time", "stop", "text_completion")
    [call] = await b.calls()
    assert call.wire_api == "completions"
    assert (call.prompt_ids, call.response_ids) == (encode("Once upön"), [*encode(" a time"), END])
    assert (call.logprobs, call.reply["content"], call.untrainable_reason) == ([-0.25] * 8, " a time", "")
    assert call.messages[0]["content"] in ("Once upön", str(encode("Once upön")))
    [asked] = b.server.requests
    assert (asked["temperature"], asked["max_tokens"]) == (0.5, 16)


async def test_logprobs_are_sent_on_request_only(bench: Any) -> None:
    b = await bench(Reply(text="ab", logprobs=[-0.5, -1.0, -2.0]), "c")
    _, [completion] = await ask(b, logprobs=0)
    assert completion.choices[0].logprobs.token_logprobs == [-0.5, -1.0, -2.0]
    _, [completion] = await ask(b)
    assert completion.choices[0].logprobs is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": ["a", "b"]}, "prompt must be one text or one list of token ids, not \\['a', 'b'\\]"),
        ({"prompt": ""}, "prompt must be one text"),
        ({"prompt": [True]}, "prompt must be one text"),
        ({"echo": True}, "echo is not served: replies do not repeat the prompt"),
        ({"suffix": "x"}, "suffix is not served"),
    ],
)
async def test_what_is_not_served_is_refused(bench: Any, options: Any, message: str) -> None:
    b = await bench("x")
    with pytest.raises(openai.BadRequestError, match=message):
        await ask(b, **options)
    assert b.server.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_the_embedded_policy_samples_a_text_and_its_ids_alike(policy: Any, stream: bool) -> None:
    ids = policy.tokenizer("select the name", add_special_tokens=False)["input_ids"]
    texts = [(await ask(policy, stream, prompt=each, seed=3, max_tokens=8))[0] for each in ("select the name", ids)]
    assert texts[0] == texts[1]
    await policy.proxy.flush()
    first, second = await policy.store.calls(policy.rollout_id)
    assert first.prompt_ids == second.prompt_ids == ids
    assert first.response_ids == second.response_ids
    assert first.untrainable_reason == second.untrainable_reason == ""


@pytest.mark.parametrize("prompt", [[10**6], [-1]])
async def test_ids_that_are_no_tokens_are_refused(policy: Any, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="the prompt's token ids must be from 0 to"):
        await ask(policy, prompt=prompt)
