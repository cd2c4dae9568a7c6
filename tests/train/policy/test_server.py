from __future__ import annotations

import asyncio
import copy
import json
import re
import threading

import pytest

torch = pytest.importorskip("torch")

import aiohttp  # noqa: E402
import openai  # noqa: E402

from groundwire.adapters.tracing.wire.request import RefusedError  # noqa: E402
from groundwire.tools.http.access_token import access_token  # noqa: E402
from groundwire.train.policy.chat.tool_formats import FORMATS  # noqa: E402
from groundwire.train.policy.engine import LocalEngine  # noqa: E402
from groundwire.train.policy.server import PolicyServer  # noqa: E402
from groundwire.train.policy.types import Completion  # noqa: E402

HELLO = [{"role": "system", "content": "select the name"}, {"role": "user", "content": "the age of a singer"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "query",
        "description": "Run it",
        "parameters": {"type": "object", "properties": {"sql": {"type": "string"}}},
    },
}
IDS = {"return_token_ids": True}
HERMES, LLAMA = FORMATS["hermes"].parse, FORMATS["llama3_json"].parse


@pytest.fixture(scope="module")
def engine(tiny_policy):
    engine = LocalEngine(*tiny_policy, max_model_len=400)
    yield engine
    engine.close()


@pytest.fixture
async def server(engine):
    server = PolicyServer(engine)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=access_token(), max_retries=0) as client:
        yield client


class Scripted:
    """An engine that answers with a given text, because a random policy never writes a tool call."""

    def __init__(self, tokenizer, text):
        self.tokenizer, self.max_model_len, self.weights_version = tokenizer, 400, 3
        self.text, self.samplings = text, []

    def detokenize(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def submit(self, prompt, sampling, *, on_token=None):
        from concurrent.futures import Future

        self.samplings.append(sampling)
        ids = [*self.tokenizer(self.text, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        for token in ids if on_token else ():
            on_token(token, -0.5)
        future = Future()
        future.set_result(Completion(prompt, ids, [-0.5] * len(ids), self.detokenize(ids), "stop", 3, 0))
        return future


@pytest.fixture
async def scripted(tiny_policy):
    """A function from a text to (client, engine) of a server whose policy answers with that text."""
    running = []

    async def serve(text):
        engine = Scripted(tiny_policy[1], text)
        server = PolicyServer(engine)
        await server.start()
        running.append(server)
        return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=access_token(), max_retries=0), engine

    yield serve
    for server in running:
        await server.stop()


async def stream(client, **request):
    return [chunk async for chunk in await client.chat.completions.create(stream=True, **request)]


async def until(check):
    while not check():  # noqa: ASYNC110 -- the engine is another thread
        await asyncio.sleep(0.001)


def headers():
    return {"Authorization": f"Bearer {access_token()}", "Content-Type": "application/json"}


async def post(server, **body):
    """The status and error of a request that the openai client would not send."""
    async with aiohttp.request("POST", f"{server.url}/v1/chat/completions", headers=headers(), **body) as response:
        return response.status, (await response.json())["error"]


def streamed_text(chunks, index=0):
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


async def test_a_chat_has_the_ids_and_logprobs_that_training_needs(client, engine, tiny_policy):
    model, tokenizer = tiny_policy
    reply = await client.chat.completions.create(
        model="policy", messages=HELLO, temperature=0.8, max_tokens=9, logprobs=True, seed=4, extra_body=IDS
    )
    (choice,) = reply.choices
    rendered = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    assert reply.prompt_token_ids == tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert choice.message.content == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert reply.usage.prompt_tokens == len(reply.prompt_token_ids)
    assert reply.usage.completion_tokens == len(choice.token_ids)
    assert reply.weights_version == engine.weights_version
    assert choice.finish_reason == ("stop" if choice.token_ids[-1] == tokenizer.eos_token_id else "length")
    with torch.inference_mode():
        ids = torch.tensor([[*reply.prompt_token_ids, *choice.token_ids]])
        logits = model(ids).logits[0, len(reply.prompt_token_ids) - 1 : -1]
    expected = torch.log_softmax(logits / 0.8, -1).gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0]
    given = torch.tensor([entry.logprob for entry in choice.logprobs.content])
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=0)


def test_the_synchronous_client_works_too(engine):
    async def serve(ready, done):
        server = PolicyServer(engine)
        await server.start()
        ready.set_result(server.url)
        await done.wait()
        await server.stop()

    async def main():
        ready, done = asyncio.get_running_loop().create_future(), asyncio.Event()
        task = asyncio.create_task(serve(ready, done))
        url = await ready

        def ask():
            with openai.OpenAI(base_url=f"{url}/v1", api_key=access_token()) as client:
                assert [model.id for model in client.models.list()] == ["policy"]
                return client.chat.completions.create(model="policy", messages=HELLO, max_tokens=3)

        reply = await asyncio.to_thread(ask)
        done.set()
        await task
        return reply

    assert asyncio.run(main()).choices[0].message.role == "assistant"


async def test_ids_and_logprobs_are_only_sent_on_request(client):
    reply = await client.chat.completions.create(model="policy", messages=HELLO, max_tokens=2)
    assert not hasattr(reply, "prompt_token_ids")
    assert not hasattr(reply.choices[0], "token_ids")
    assert reply.choices[0].logprobs is None


async def test_a_stream_and_a_whole_reply_are_equal(client):
    request = {
        "model": "policy", "messages": HELLO, "seed": 9, "max_tokens": 40, "logprobs": True, "extra_body": IDS,
        "n": 2, "temperature": 1.5,
    }  # fmt: skip
    whole = await client.chat.completions.create(**request)
    chunks = await stream(client, stream_options={"include_usage": True}, **request)
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert streamed_text(chunks, choice.index) == choice.message.content
        assert [token for part in parts for token in getattr(part, "token_ids", [])] == choice.token_ids
        logprobs = [entry.logprob for part in parts if part.logprobs for entry in part.logprobs.content]
        assert logprobs == pytest.approx([entry.logprob for entry in choice.logprobs.content], abs=1e-4)
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]


async def test_streamed_text_is_final(scripted):
    text = "select t.name, count(age) from home_city where name = 'Ann' — é \U0001f600 done"
    client, _ = await scripted(text)
    chunks = await stream(client, model="policy", messages=HELLO)
    assert streamed_text(chunks) == text
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 5


async def test_a_stop_string_is_never_sent(client):
    request = {"model": "policy", "messages": HELLO, "temperature": 0, "max_tokens": 30}
    whole = (await client.chat.completions.create(**request)).choices[0].message.content
    stop = whole[6:9]
    reply = await client.chat.completions.create(**request, stop=stop)
    assert reply.choices[0].message.content == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == "stop"
    assert streamed_text(await stream(client, stop=[stop, "@@@@"], **request)) == whole[: whole.index(stop)]


async def test_chat_template_kwargs_are_variables_of_the_template(tiny_policy):
    tokenizer = copy.deepcopy(tiny_policy[1])
    tokenizer.chat_template = "{{ messages[0].content }}{% if thinking is defined and not thinking %} result{% endif %}"
    async with PolicyServer(Scripted(tokenizer, "a")) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=access_token(), max_retries=0)
        for variables, prompt in (
            ({}, "select"),
            ({"thinking": True}, "select"),
            ({"thinking": False}, "select result"),
        ):
            extra = {"chat_template_kwargs": variables, **IDS}
            message = {"role": "user", "content": "select"}
            reply = await client.chat.completions.create(model="policy", messages=[message], extra_body=extra)
            assert tokenizer.decode(reply.prompt_token_ids) == prompt


async def test_a_tool_call_is_parsed_and_the_text_before_it_is_kept(scripted, tiny_policy):
    arguments = {"sql": "select name, '<b>' from singer"}
    text = 'the query\n<tool_call>\n{"name": "query", "arguments": ' + json.dumps(arguments) + "}\n</tool_call>"
    client, _ = await scripted(text)
    reply = await client.chat.completions.create(model="policy", messages=HELLO, tools=[TOOL], tool_choice="auto")
    (choice,) = reply.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "the query"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "query")
    assert json.loads(call.function.arguments) == arguments

    chunks = await stream(client, model="policy", messages=HELLO, tools=[TOOL])
    assert streamed_text(chunks) == "the query"
    (streamed,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert streamed.function == call.function or streamed.function.arguments == call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


async def test_without_tools_a_call_is_text(scripted):
    text = '<tool_call>\n{"name": "query", "arguments": {}}\n</tool_call>'
    client, _ = await scripted(text)
    for more in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        reply = await client.chat.completions.create(model="policy", messages=HELLO, **more)
        assert reply.choices[0].message.content == text
        assert reply.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no call",
        "<tool_call>",
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": "query", "arguments": {"sql": "sel</tool_call>',
        '<tool_call>{"name": "drop", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "query", "arguments": "text"}</tool_call>',
        '<tool_call>["query"]</tool_call>',
        "<tool_call>" + "[" * 100_000 + "</tool_call>",
    ],
)
async def test_a_malformed_call_stays_in_the_content_and_is_streamed_completely(text, scripted):
    assert HERMES(text, {"query"}) == (text, [])
    if len(text) < 1000:
        client, _ = await scripted(text)
        chunks = await stream(client, model="policy", messages=HELLO, tools=[TOOL])
        assert streamed_text(chunks) == text


def test_several_calls_keep_their_order_and_complete_json_needs_no_closing_tag():
    text = '<tool_call>{"name": "b"}</tool_call> x <tool_call>no</tool_call>'
    text += '<tool_call>{"name": "a", "arguments": {"k": 1}}'
    content, calls = HERMES(text, {"a", "b"})
    assert content == " x <tool_call>no</tool_call>"
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in calls] == [("b", "{}"), ("a", '{"k": 1}')]


def test_what_is_thought_is_no_call_and_an_argument_may_have_the_closing_tag():
    draft = '<tool_call>{"name": "a", "arguments": {"k": "1"}}</tool_call>'
    call = draft.replace('"1"', '"</tool_call>"')
    content, calls = HERMES(f"<think>{draft}</think>{call}", {"a"})
    assert content == f"<think>{draft}</think>"
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [{"k": "</tool_call>"}]
    assert HERMES(f"<think>{call}", {"a"}) == (f"<think>{call}", [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "a", "parameters": {"sql": "SELECT 1"}}', [("a", {"sql": "SELECT 1"})]),
        ('{"name": "a", "arguments": {"sql": "SELECT 1"}}', [("a", {"sql": "SELECT 1"})]),
        ('{"name": "a", "parameters": null}', [("a", {})]),
        ('{"name": "a", "parameters": "{\\"sql\\": \\"SELECT 1; --\\"}"}', [("a", {"sql": "SELECT 1; --"})]),
        ('<|python_tag|>{"name": "a"}; {"name": "b", "parameters": {"k": [1]}}', [("a", {}), ("b", {"k": [1]})]),
        ('  {"name": "b", "parameters": {}}\n{"name": "b", "parameters": {}} ', [("b", {}), ("b", {})]),
    ],
)
def test_a_reply_of_llama_is_its_calls(text, expected):
    content, calls = LLAMA(text, {"a", "b"})
    assert content is None
    assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SELECT 1",
        "<|python_tag|>",
        '{"name": "a", "parameters": {"sql": "sel',
        '{"name": "a", "parameters": "sql"}',
        '{"name": "a", "parameters": ["sql"]}',
        '{"name": "drop", "parameters": {}}',
        '{"name": "a"}; {"name": "drop"}',
        '{"name": "a"} and then I read the rows',
        'I call {"name": "a"}',
        '{"name": {"name": "a"}}',
        "[" * 100_000,
        '{"name": "a", "parameters": "' + "[" * 100_000 + '"}',
    ],
)
def test_a_malformed_call_of_llama_is_the_content(text):
    assert LLAMA(text, {"a", "b"}) == (text, [])


@pytest.mark.parametrize(
    "messages",
    [
        HELLO,
        [{"role": "user", "content": [{"type": "text", "text": "select"}, {"type": "text", "text": " name"}]}],
        [*HELLO, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "query", "arguments": '{"sql": "select 1"}'}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "1"}],
        [*HELLO, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "query", "arguments": "null"}}]}],
        [*HELLO, {"role": "assistant", "content": "a result"}, {"role": "user", "content": "<im_end> é\n\n "}],
    ],
)  # fmt: skip
@pytest.mark.parametrize("tools", [None, [TOOL]])
async def test_messages_are_tokenized_as_the_chat_template_does(client, tiny_policy, messages, tools):
    _, tokenizer = tiny_policy
    plain = json.loads(json.dumps(messages))
    for message in plain:
        if isinstance(message["content"], list):
            message["content"] = "\n".join(part["text"] for part in message["content"])
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"]) or {}
        message["content"] = message["content"] or ""
    expected = tokenizer.apply_chat_template(
        plain, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    for _ in range(2):  # the second time from the cache
        reply = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=1, extra_body=IDS, **({"tools": tools} if tools else {})
        )
        assert reply.prompt_token_ids == expected


async def test_sampling_parameters_reach_the_engine(scripted):
    client, engine = await scripted("a")
    await client.chat.completions.create(
        model="policy", messages=HELLO, temperature=0.25, top_p=0.5, max_tokens=7, stop=["x", "y"], seed=3, n=2
    )
    await client.chat.completions.create(model="policy", messages=HELLO, max_completion_tokens=8, stop="x")
    first, second, third = engine.samplings
    assert (first.temperature, first.top_p, first.max_tokens, first.stop, first.seed) == (0.25, 0.5, 7, ("x", "y"), 3)
    assert second.seed not in (3, 4)  # the choices of a request differ from each other and from other seeds'
    assert (third.temperature, third.top_p, third.max_tokens, third.stop, third.seed) == (1.0, 1.0, 8, ("x",), None)


async def test_a_too_long_prompt_is_openais_context_length_error(client):
    messages = [{"role": "user", "content": "name " * 500}]
    for streamed in (False, True):
        with pytest.raises(openai.BadRequestError, match=r"prompt has 5\d\d tokens.*400 tokens.*shorten") as caught:
            await client.chat.completions.create(model="policy", messages=messages, stream=streamed)
        assert caught.value.code == "context_length_exceeded"


async def test_another_model_is_not_found_and_the_error_names_the_served_one(client):
    with pytest.raises(openai.NotFoundError, match="'gpt-x' does not exist; this server has 'policy'"):
        await client.chat.completions.create(model="gpt-x", messages=HELLO)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": None}, "messages is required"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": ["hello"]}, r"messages\[0\] must be an object"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role must be 'system', .* not 'robot'"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content is required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'; this model reads"),
        ({"temperature": "hot"}, "temperature must be a valid number, not 'hot'"),
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": 0}, "top_p must be greater than 0, not 0"),
        ({"max_tokens": 0}, "max_tokens must be greater than or equal to 1, not 0"),
        ({"max_tokens": 1.5}, "max_tokens must be"),
        ({"max_completion_tokens": True}, "max_completion_tokens must be"),
        ({"n": 1000}, "n must be less than or equal to 128, not 1000"),
        ({"seed": "x"}, "seed must be"),
        ({"stop": [1]}, r"stop\[0\] must be a valid string, not 1"),
        ({"stop": ""}, r"stop\[0\] must not be empty"),
        ({"stream": "yes"}, "stream must be a valid boolean"),
        ({"tools": {}}, "tools must be a valid list"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\] must be"),
        ({"tool_choice": "required"}, "tool_choice requires a call, but the request has no tools"),
        ({"tool_choice": "never"}, "tool_choice must be 'none', 'auto', 'required' or .*, not 'never'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice must be 'none', 'auto', 'required' or .*, not {'type'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "drop"}}},
         "tool_choice requires a call of 'drop', but the request has only the tools 'query'"),
        ({"response_format": {"type": "xml"}}, "response_format.type must be 'text', .*, not 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format of type 'json_schema' must have a json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strng"}}}},
         "response_format.json_schema.schema cannot be used as a JSON schema: Invalid type: strng"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#/x"}}}],
          "tool_choice": "required"}, r"tools\[0\].function.parameters cannot be used as a JSON schema: Pointer"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs must not have 'tools', which the server sets"),
        ({"stop_token_ids": [-1]}, r"stop_token_ids\[0\] must be greater than or equal to 0, not -1"),
        ({"functions": [{"name": "f"}]}, "functions is not supported: use tools"),
        ({"model": 3}, "model must be a valid string"),
    ],
)  # fmt: skip
async def test_an_error_names_the_field_and_its_value(server, change, message):
    body = {"model": "policy", "messages": HELLO, "max_tokens": 1, **change}
    status, error = await post(server, json=body)
    assert status == 400
    assert re.search(message, error["message"])
    assert error["type"] == "invalid_request_error"
    assert re.split(r"[\[.]", error["param"])[0] in change


@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe", b"[]", b"null", b'"text"'])
async def test_a_body_must_be_a_json_object(server, body):
    status, error = await post(server, data=body)
    assert status == 400
    assert "JSON" in error["message"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_disconnect_cancels_the_request(server, engine, streamed):
    before = engine.generated_tokens
    body = {"messages": HELLO, "max_tokens": 300, "temperature": 0, "n": 4, "stream": streamed}
    async with aiohttp.ClientSession() as session:
        asking = asyncio.ensure_future(session.post(f"{server.url}/v1/chat/completions", json=body, headers=headers()))
        await until(lambda: engine.generated_tokens >= before + 8)
        if streamed:
            (await asking).close()
        asking.cancel()
        await until(lambda: not engine._batch.requests and not engine._waiting)
    assert engine.generated_tokens < before + 4 * 250


async def test_health_and_models(server):
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{server.url}/health") as response:
            assert (await response.json())["status"] == "ok"
        async with session.get(f"{server.url}/v1/models", headers=headers()) as response:
            (model,) = (await response.json())["data"]
            assert (model["id"], model["max_model_len"]) == ("policy", 400)


async def test_a_port_in_use_is_an_error(server, engine):
    second = PolicyServer(engine, port=int(server.url.rsplit(":", 1)[1]))
    with pytest.raises(OSError, match="in use"):
        await second.start()
    await second.stop()


async def test_a_closed_engine_is_a_503(tiny_policy):
    engine = LocalEngine(*tiny_policy, max_model_len=400)
    server = PolicyServer(engine)
    await server.start()
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=access_token(), max_retries=0) as client:
        waiting = asyncio.ensure_future(client.chat.completions.create(model="policy", messages=HELLO, max_tokens=300))
        await until(lambda: engine.generated_tokens)
        engine.close()
        with pytest.raises(openai.InternalServerError, match="closed before the request finished"):
            await waiting
        with pytest.raises(openai.InternalServerError, match="the engine is closed"):
            await client.chat.completions.create(model="policy", messages=HELLO)
    await server.stop()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[" * 100_000 + "]" * 100_000, "the request is not JSON"),
        ('{"model": "policy", "messages": [], "x": ' + "[" * 980 + "]" * 980 + "}", "recursion limit exceeded"),
    ],
)
async def test_json_that_no_client_writes_is_refused(server, body, said):
    async with aiohttp.request("POST", f"{server.url}/v1/chat/completions", data=body, headers=headers()) as reply:
        assert reply.status == 400
        assert said in await reply.text()


class Recording:
    """A tokenizer that notes the length of each text and the thread that gave it."""

    def __init__(self, tokenizer):
        self.tokenizer, self.tokenized = tokenizer, []

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, **options):
        self.tokenized.append((len(text), threading.current_thread()))
        return self.tokenizer(text, **options)


async def test_a_prompt_far_beyond_the_context_is_refused_before_it_is_tokenized(scripted):
    client, engine = await scripted("x")
    engine.tokenizer = Recording(engine.tokenizer)
    with pytest.raises(openai.BadRequestError, match=r"has 8\d+ characters, and the model's context of 400") as caught:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "age " * 2_000_000}])
    assert caught.value.code == "context_length_exceeded"
    assert engine.tokenizer.tokenized == []


async def test_a_long_request_is_tokenized_in_a_thread_of_its_own_and_not_cached(scripted):
    client, engine = await scripted("x")
    engine.tokenizer, engine.max_model_len = Recording(engine.tokenizer), 100_000
    for content in ("age", "age", "age " * 50_000, "age " * 50_000):
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": content}])
    calls = engine.tokenizer.tokenized
    assert [thread is threading.main_thread() for length, thread in calls if length > 100_000] == [False, False]
    short = [(length, thread is threading.main_thread()) for length, thread in calls if 10 < length < 100_000]
    assert (len("<|im_start|>user\nage"), True) in short
    assert len(short) == len(set(short))  # each part once, for both requests


@pytest.mark.parametrize("trusted", [True, False])
async def test_each_of_equal_requests_is_sampled_for_its_own_session_and_seed(trusted, tiny_policy, monkeypatch):
    engine = Scripted(tiny_policy[1], "x")
    server = PolicyServer(engine)
    monkeypatch.setattr("groundwire.train.policy.server.is_trusted", lambda _: trusted)
    body = {"model": "policy", "messages": HELLO, "return_token_ids": True}
    calls = [server.complete({**body, **own}, session=session) for session, own in SESSIONS]
    replies = await asyncio.gather(*calls)
    sampled = {(sampling.session, sampling.seed) for sampling in engine.samplings}
    assert sampled == {(session, own.get("seed")) for session, own in SESSIONS}
    assert len({reply["id"] for reply in replies}) == len(SESSIONS)
    assert len({tuple(reply["prompt_token_ids"]) for reply in replies}) == 1
    with pytest.raises(RefusedError, match="does not exist"):
        await server.complete({**body, "model": "other"})


SESSIONS = [("a", {"seed": 1}), ("b", {"seed": 2}), ("c", {"session": "of the body"}), ("d", {"temperature": 0.5})]
