"""Constrained replies: what is sampled and recorded, and that training computes the sampler's log-probabilities."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import replace

import openai
import pytest
from constrained import (
    ANSWER,
    GRAMMARS,
    SMALL,
    TOOLS,
    byte_level_tokenizer,
    call_of,
    sentencepiece_tokenizer,
)  # fmt: skip
from programs import ROOT
from training_groups import Sampled, training_groups

torch = pytest.importorskip("torch")

from dev.pretrain.model import new_policy  # noqa: E402
from tokenizers import Tokenizer, decoders, models  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from groundwire.adapters.tracing import calls_from_spans, trajectories  # noqa: E402
from groundwire.adapters.tracing.calls import UNKNOWN_GRAMMAR, LLMCall, from_span, to_span  # noqa: E402
from groundwire.adapters.tracing.wire.exchange import HttpExchange, read_exchange  # noqa: E402
from groundwire.tools.http.access_token import access_token  # noqa: E402
from groundwire.train.local.grpo import GRPO, GRPOConfig  # noqa: E402
from groundwire.train.local.packing import Row, WeightedItem  # noqa: E402
from groundwire.train.policy.chat import request as chat_request  # noqa: E402
from groundwire.train.policy.chat.request import parse_request  # noqa: E402
from groundwire.train.policy.constraint import Constraints, unpack_masks  # noqa: E402
from groundwire.train.policy.engine import LocalEngine  # noqa: E402
from groundwire.train.policy.errors import ChatRequestError, EngineError  # noqa: E402
from groundwire.train.policy.grammar import ANY_OBJECT, calls_and_json, to_lark  # noqa: E402
from groundwire.train.policy.server import PolicyServer  # noqa: E402
from groundwire.train.policy.types import Sampling  # noqa: E402
from groundwire.train.policy.vllm import sampling as vllm_sampling  # noqa: E402

HELLO = [{"role": "user", "content": "the age of a singer"}]


@pytest.fixture(scope="module", params=["glue", "byte-level", "sentencepiece"])
def policy(request, tiny_policy):
    tokenizers = {"byte-level": byte_level_tokenizer, "sentencepiece": sentencepiece_tokenizer}
    tokenizer = tiny_policy[1] if request.param == "glue" else tokenizers[request.param]()
    return new_policy(tokenizer, **SMALL, context=512, seed=1), tokenizer


@pytest.fixture(scope="module")
def engine(policy):
    engine = LocalEngine(*policy, max_model_len=400)
    yield engine
    engine.close()


def sample(engine, grammar, *, count=1, **sampling):
    futures = [
        engine.submit([5, 6, 7, index], Sampling(grammar=grammar, seed=index, **sampling)) for index in range(count)
    ]
    return [future.result(60) for future in futures]


def trained_logprobs(policy, calls, *, temperature=1.0):
    """What GRPO computes for the sampled tokens, in the order of the trajectories."""
    grpo = GRPO(policy[0], GRPOConfig(temperature=temperature), constraints=Constraints(*policy))
    made = trajectories(calls)
    rows = [
        Row(each.prompt_ids, [WeightedItem(trajectory=each, mask=each.loss_mask, advantages=[1.0] * len(each.loss_mask),
                                           weight=0.0, penalty=0.0)])
        for each in made
    ]  # fmt: skip
    with torch.no_grad():
        tokens = grpo._evaluate(rows)
    return tokens.logprobs, tokens.old


def assert_obeys(text, name):
    """``text`` is a complete reply of the grammar ``name``."""
    if name == "schema" or (name == "either" and text.startswith("{")):
        answer = json.loads(text)
        assert list(answer) == ["name", "ages", "sure"]
        assert answer["name"] in ANSWER["properties"]["name"]["enum"]
        assert all(0 <= age <= 99 for age in answer["ages"])
        return
    calls = text.split("; ") if name == "llama" else re.findall(r"<tool_call>\n(.*?)\n</tool_call>(?:\n|$)", text, re.S)
    assert calls
    for call in map(json.loads, calls):
        assert call["name"] == "query"
        assert list(call["parameters" if name == "llama" else "arguments"]) == ["sql"]


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_random_policy_writes_only_what_the_grammar_allows(engine, name):
    replies = sample(engine, GRAMMARS[name], count=12, max_tokens=250, temperature=1.3, top_p=0.95)
    ended = [reply for reply in replies if reply.finish_reason == "stop"]
    assert len(ended) >= 3
    for reply in ended:
        assert reply.token_ids[-1] == engine.tokenizer.eos_token_id
        assert_obeys(reply.text, name)
    assert {reply.finish_reason for reply in replies} <= {"stop", "length"}


def test_greedy_replies_obey_the_grammar_too(engine):
    (reply,) = sample(engine, GRAMMARS["schema"], temperature=0, max_tokens=250)
    assert_obeys(reply.text, "schema")


def test_a_reply_that_is_cut_inside_of_the_grammar_has_the_finish_reason_length(engine):
    (reply,) = sample(engine, GRAMMARS["schema"], max_tokens=5)
    assert reply.finish_reason == "length"
    assert len(reply.token_ids) == 5
    assert reply.text.startswith('{"')


def test_unconstrained_replies_do_not_depend_on_constrained_ones_beside_them(engine):
    alone = [reply.token_ids for reply in sample(engine, "", count=4, max_tokens=30)]
    mixed = [
        engine.submit([5, 6, 7, index], Sampling(grammar=grammar, seed=index, max_tokens=30))
        for index in range(4)
        for grammar in (GRAMMARS["calls"], "", GRAMMARS["schema"])
    ]
    assert [future.result(60).token_ids for future in mixed][1::3] == alone


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", GRAMMARS)
def test_training_computes_the_samplers_logprobs(engine, policy, name, temperature):
    replies = sample(engine, GRAMMARS[name], count=8, max_tokens=80, temperature=temperature)
    new, old = trained_logprobs(policy, [call_of(each, GRAMMARS[name]) for each in replies], temperature=temperature)
    assert (new - old).abs().max() < 1e-5


def test_without_the_masks_training_would_compute_other_logprobs(engine, policy):
    """The bias that the masks remove: a token that the grammar forces has probability 1 for the sampler."""
    replies = sample(engine, GRAMMARS["calls"], count=8, max_tokens=80)
    new, old = trained_logprobs(policy, [call_of(each) for each in replies])
    assert (new - old).abs().max() > 2
    assert (old - new).mean() > 0.5


def test_of_a_merged_trajectory_only_the_constrained_calls_are_masked(engine, policy):
    (free,) = sample(engine, "", max_tokens=6)
    prompt = [*free.prompt_ids, *free.token_ids, 9, 9]
    second = engine.submit(prompt, Sampling(grammar=GRAMMARS["schema"], seed=1, max_tokens=60)).result(60)
    third = engine.submit([*prompt, *second.token_ids, 8], Sampling(seed=2, max_tokens=6)).result(60)
    calls = [call_of(free), call_of(second, GRAMMARS["schema"], 1), call_of(third, sequence=2)]
    assert len(trajectories(calls)) == 1
    new, old = trained_logprobs(policy, calls)
    assert (new - old).abs().max() < 1e-5
    unmasked, _ = trained_logprobs(policy, [replace(call, grammar="") for call in calls])
    start, end = len(free.token_ids), len(free.token_ids) + len(second.token_ids)
    assert torch.equal(unmasked[:start], new[:start])
    assert torch.equal(unmasked[end:], new[end:])
    assert (unmasked - new)[start:end].abs().max() > 1


def test_an_update_learns_within_the_grammar(tiny_policy):
    tokenizer = tiny_policy[1]
    model = new_policy(tokenizer, **SMALL, context=512, seed=3)
    grammar = calls_and_json({"enum": ["left", "right"]})
    engine, grpo = LocalEngine(model, tokenizer, max_model_len=100), GRPO(
        model, GRPOConfig(learning_rate=3e-3), constraints=Constraints(model, tokenizer)
    )  # fmt: skip
    try:
        for step in range(1, 13):
            rollouts = []
            for index, reply in enumerate(sample(engine, grammar, count=16)):
                reward = float(reply.text == '"right"')
                rollouts.append(Sampled(str(index % 2), reward, [call_of(reply, grammar)]))
            metrics = grpo.update(training_groups(rollouts))
            assert metrics.get("initial_ratio_error", 0.0) < 1e-5
            engine.update_weights(step)
        replies = sample(engine, grammar, count=16)
        assert {reply.text for reply in replies} <= {'"left"', '"right"'}
        assert sum(reply.text == '"right"' for reply in replies) >= 13
    finally:
        engine.close()


def test_tokens_that_a_grammar_does_not_allow_are_an_error(policy):
    constraints = Constraints(*policy)
    with pytest.raises(EngineError, match="cannot go on with token 5 under its grammar"):
        constraints.replay(GRAMMARS["schema"], [5, 5])
    free = calls_and_json({"type": "object", "properties": {"a": {"const": 1}}})
    ids = policy[1]('{"a": 1}', add_special_tokens=False)["input_ids"]
    allowed = unpack_masks(constraints.replay(free, [*ids, policy[1].eos_token_id]), policy[0].config.vocab_size)
    assert allowed[range(len(ids) + 1), [*ids, policy[1].eos_token_id]].all()
    assert allowed[-1].sum() >= 1


def test_an_update_without_constraints_names_what_is_missing(tiny_policy):
    call = LLMCall(rollout_id="r", attempt_id="a", sequence=0, prompt_ids=[1], response_ids=[2], logprobs=[-1.0],
                   grammar=GRAMMARS["schema"])  # fmt: skip
    rollouts = [Sampled("g", reward, [call]) for reward in (0.0, 1.0)]
    with pytest.raises(ValueError, match="sampled with a grammar: give GRPO the constraints"):
        GRPO(tiny_policy[0], GRPOConfig()).update(training_groups(rollouts))


def test_another_kind_of_tokenizer_is_refused_by_name(tiny_policy):
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "[END]": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[END]")
    with pytest.raises(ChatRequestError, match=r"need a byte-level or SentencePiece tokenizer, .*WordPiece"):
        Constraints(tiny_policy[0], fast).start(GRAMMARS["schema"])


# Recording


def test_a_span_keeps_the_grammar_and_free_calls_have_no_attribute():
    call = LLMCall(rollout_id="r", attempt_id="a", sequence=0, prompt_ids=[1], response_ids=[2], logprobs=[-1.0])
    assert "groundwire.grammar" not in to_span(call).attributes
    constrained = replace(call, grammar=GRAMMARS["either"])
    assert to_span(constrained).attributes["groundwire.grammar"] == GRAMMARS["either"]
    assert from_span(to_span(constrained)).grammar == GRAMMARS["either"]
    [trajectory] = trajectories([constrained])
    assert trajectory.calls[0].grammar == GRAMMARS["either"]


def test_a_constraint_that_the_server_did_not_report_is_not_trained_on():
    call = LLMCall(rollout_id="r", attempt_id="a", sequence=0, prompt_ids=[1], response_ids=[2], logprobs=[-1.0],
                   grammar=UNKNOWN_GRAMMAR)  # fmt: skip
    assert "did not report how" in call.untrainable_reason
    assert calls_from_spans([to_span(call)]) == []


SILENT = {"choices": [{"message": {"content": "{}"}, "token_ids": [2], "logprobs": {"content": [{"logprob": -1.0}]},
                       "finish_reason": "stop"}], "prompt_token_ids": [1]}  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "constrained"),
    [
        ({}, False),
        ({"response_format": {"type": "text"}, "tool_choice": "auto", "tools": TOOLS}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"tool_choice": "required", "tools": TOOLS}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "query"}}, "tools": TOOLS}, True),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, False),
        ({"structured_outputs": {"regex": "a+"}}, True),
    ],
)
def test_a_server_that_does_not_report_its_constraint_makes_the_call_untrainable(request_, constrained):
    body = json.dumps(SILENT).encode()
    exchange = HttpExchange(rollout_id="r", attempt_id="a", agent="", started=1.0, body=body, request=request_)
    call = read_exchange(exchange, 0, 0)
    assert call.grammar == (UNKNOWN_GRAMMAR if constrained else "")
    assert bool(call.untrainable_reason) is constrained


# The server


@pytest.fixture(scope="module")
def tiny_engine(tiny_policy):
    tokenizer = tiny_policy[1]
    engine = LocalEngine(new_policy(tokenizer, **SMALL, context=512, seed=1), tokenizer, max_model_len=400)
    yield engine
    engine.close()


@pytest.fixture(params=["hermes", "llama3_json"])
async def server(tiny_engine, request):
    async with PolicyServer(tiny_engine, tool_format=request.param) as server:
        yield server


@pytest.fixture
async def client(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=access_token(), max_retries=0) as client:
        yield client


async def ask(client, **request):
    request = {"model": "policy", "messages": HELLO, "max_tokens": 200, **request}
    replies = await asyncio.gather(*(client.chat.completions.create(**request, seed=seed) for seed in range(6)))
    return [reply.choices[0] for reply in replies]


async def test_a_json_schema_is_obeyed(client):
    schema = {"name": "answer", "schema": ANSWER, "strict": True}
    choices = await ask(client, response_format={"type": "json_schema", "json_schema": schema})
    ended = [choice.message.content for choice in choices if choice.finish_reason == "stop"]
    assert ended
    for text in ended:
        assert_obeys(text, "schema")


async def test_a_json_object_is_an_object(client):
    for choice in await ask(client, response_format={"type": "json_object"}, max_tokens=60):
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert choice.message.content.startswith("{")


async def test_a_required_tool_is_called(client):
    choices = await ask(client, tools=TOOLS[:1], tool_choice="required")
    called = [choice for choice in choices if choice.finish_reason == "tool_calls"]
    assert called
    for choice in called:
        for call in choice.message.tool_calls:
            assert call.function.name == "query"
            assert list(json.loads(call.function.arguments)) == ["sql"]


@pytest.mark.parametrize("parallel", [True, False])
async def test_a_named_function_is_called_exactly_once(client, parallel):
    choice = {"type": "function", "function": {"name": "query"}}
    for reply in await ask(client, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel):
        assert reply.finish_reason == "tool_calls"
        assert [call.function.name for call in reply.message.tool_calls] == ["query"]
        assert reply.message.content is None


async def test_without_parallel_calls_a_required_call_is_one(client):
    replies = await ask(client, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False)
    assert [len(reply.message.tool_calls) for reply in replies] == [1] * 6


async def test_a_stream_of_a_constrained_reply_equals_the_whole_reply(client):
    request = {"model": "policy", "messages": HELLO, "seed": 3, "tools": TOOLS[:1], "max_tokens": 200,
               "tool_choice": "required", "parallel_tool_calls": False}  # fmt: skip
    whole = (await client.chat.completions.create(**request)).choices[0]
    chunks = [chunk async for chunk in await client.chat.completions.create(**request, stream=True)]
    (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert call.function.arguments == whole.message.tool_calls[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "tool_calls"


def grammar_of(**body):
    request = parse_request({"messages": HELLO, **body}, served="policy")
    assert all(sampling.grammar == request.grammar for sampling in request.samplings)
    return json.loads(request.grammar or "{}")


def test_requests_have_the_grammar_that_they_ask_for():
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANSWER}}}
    assert grammar_of() == grammar_of(tools=TOOLS) == grammar_of(response_format={"type": "text"}) == {}
    assert grammar_of(response_format={"type": "json_object"}) == {"schema": ANY_OBJECT}
    assert grammar_of(**schema) == grammar_of(**schema, tools=TOOLS, tool_choice="none") == {"schema": ANSWER}
    either = grammar_of(**schema, tools=TOOLS)
    assert either["schema"] == ANSWER
    assert [tool["name"] for tool in either["calls"]["tools"]] == ["query", "list tables"]
    assert either["calls"]["several"] is True
    forced = grammar_of(**schema, tools=TOOLS, tool_choice="required")
    assert forced.keys() == {"calls"}
    some = {"mode": "required", "tools": [{"type": "function", "function": {"name": "list tables"}}]}
    allowed = grammar_of(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": some})
    assert allowed["calls"]["tools"] == [{"name": "list tables", "parameters": ANY_OBJECT}]


def test_a_grammar_is_valid_lark_whatever_the_names_and_schemas_contain():
    from llguidance import LLMatcher

    tool = {"function": {"name": 'a"\\é\n%json {}', "parameters": {"properties": {'"\n|': {"const": "\n\\"}}}}}
    for tool_format in ("hermes", "llama3_json"):
        lark = to_lark(calls_and_json(True, [tool], tool_format=tool_format))
        assert LLMatcher.validate_grammar_with_warnings(lark) == (False, [])
        # vLLM tries xgrammar first, which reads JSON schemas in Lark but not this line, and then llguidance.
        assert lark.startswith("%llguidance ")


# Fields that are not applied


@pytest.fixture
def warned(caplog):
    """The warnings of the requests that a test checks."""
    before = set(chat_request._warned)
    chat_request._warned.clear()
    caplog.set_level(logging.WARNING, logger=chat_request.__name__)
    yield lambda: [record.getMessage() for record in caplog.records if record.name == chat_request.__name__]
    chat_request._warned.update(before)


@pytest.mark.parametrize(
    "body",
    [
        {"frequency_penalty": 0.5}, {"presence_penalty": -1}, {"repetition_penalty": 1.1}, {"logit_bias": {"5": 10}},
        {"top_k": 20}, {"min_p": 0.1}, {"min_tokens": 3}, {"reasoning_effort": "low"}, {"verbosity": "low"},
        {"top_logprobs": 3, "logprobs": True}, {"ignore_eos": True}, {"a_field_of_tomorrow": {"x": 1}},
    ],
)  # fmt: skip
def test_a_field_that_is_not_applied_is_named_in_one_warning(body, warned):
    for _ in range(3):
        parse_request({"messages": HELLO, **body}, served="policy")
    (message,) = warned()
    assert next(iter(body)) in message


@pytest.mark.parametrize(
    "body",
    [
        {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "logit_bias": {}},
        {"top_k": -1, "min_p": 0, "best_of": 1, "ignore_eos": False, "reasoning_effort": None, "functions": []},
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "flex", "prompt_cache_key": "x"},
        {"parallel_tool_calls": False, "logprobs": True, "modalities": ["text"], "response_format": None},
    ],
)  # fmt: skip
def test_neutral_values_and_fields_without_an_effect_are_accepted_silently(body, warned):
    parse_request({"messages": HELLO, **body}, served="policy")
    assert warned() == []


@pytest.mark.parametrize("name", sorted(chat_request.REFUSED))
def test_a_field_that_changes_the_form_of_the_reply_is_refused_by_name(name):
    with pytest.raises(ChatRequestError, match=f"^{name} is not supported: ") as caught:
        parse_request({"messages": HELLO, name: "x"}, served="policy")
    assert caught.value.param == name


def test_the_docs_list_the_fields():
    text = (ROOT / "docs" / "capabilities.md").read_text(encoding="utf-8")
    names = {name for name in chat_request.NO_EFFECT | chat_request.REFUSED.keys() if not name.startswith("guided_")}
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_strict_tools_are_named_in_one_warning_unless_their_calls_are_constrained(warned):
    strict = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    for body in ({"tool_choice": "required"}, {"tool_choice": "none"}, {"response_format": {"type": "json_object"}}):
        parse_request({"messages": HELLO, "tools": strict, **body}, served="policy")
    assert warned() == []
    for _ in range(2):
        parse_request({"messages": HELLO, "tools": strict}, served="policy")
    (message,) = warned()
    assert "strict = true" in message


def test_a_keyword_that_a_schema_cannot_enforce_is_named_in_one_warning(warned):
    schema = {"schema": {"type": "array", "uniqueItems": True}}
    for _ in range(2):
        grammar_of(response_format={"type": "json_schema", "json_schema": schema})
    (message,) = warned()
    assert "uniqueItems" in message


A = {"$ref": "#/$defs/A"}
MANY = {f"A{i}": {"$ref": f"#/$defs/A{i + 1}"} for i in range(2000)}


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        ({"$ref": "#"}, False),
        ({"$defs": {"A": {"$ref": "#/$defs/B"}, "B": A}, **A}, False),
        ({"$defs": {"A": {"allOf": [A]}}, **A}, False),
        ({"$defs": {"A": {"anyOf": [A, A]}}, **A}, False),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, False),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"$defs": {"A": {"anyOf": [A, {"type": "null"}]}}, **A}, True),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, True),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"$defs": {**MANY, "A2000": {"type": "null"}}, "$ref": "#/$defs/A0"}, True),
        ({"$defs": dict(reversed(({**MANY, "A2000": {"type": "null"}}).items())), "$ref": "#/$defs/A0"}, True),
    ],
)
def test_a_schema_that_refers_to_itself_without_end_is_refused_by_name(schema, ends):
    asked = {"messages": HELLO, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    for body in (asked, {"messages": HELLO, "tools": [tool], "tool_choice": "required"}):
        if ends:
            parse_request(body, served="policy")
            continue
        with pytest.raises(ChatRequestError, match=r"cannot be used as a JSON schema: it refers to itself without"):
            parse_request(body, served="policy")


def test_stop_token_ids_end_a_reply_and_are_not_in_its_text(tiny_engine):
    (whole,) = sample(tiny_engine, "", max_tokens=20, temperature=0)
    stop = whole.token_ids[5]
    (reply,) = sample(tiny_engine, "", max_tokens=20, temperature=0, stop_token_ids=(stop,))
    end = whole.token_ids.index(stop) + 1
    assert reply.token_ids == whole.token_ids[:end]
    assert reply.text == tiny_engine.tokenizer.decode(whole.token_ids[: end - 1], skip_special_tokens=True)
    assert reply.finish_reason == "stop"


def test_without_parallel_calls_a_free_reply_ends_with_its_first_call():
    request = {"messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False, "stop": ["x"]}
    assert parse_request(request, served="policy").samplings[0].stop == ("x", "</tool_call>")
    assert parse_request({**request, "tools": []}, served="policy").samplings[0].stop == ("x",)
    assert parse_request({**request, "tool_choice": "required"}, served="policy").samplings[0].stop == ("x",)


def test_a_tokenizer_that_the_grammars_of_vllm_cannot_read_is_named_once(tiny_policy, caplog):
    vllm_sampling._warn_of_glue.cache_clear()
    for tokenizer in (tiny_policy[1], byte_level_tokenizer(), tiny_policy[1]):
        assert vllm_sampling.vllm_grammar(tokenizer, GRAMMARS["calls"]) == to_lark(GRAMMARS["calls"])
    [warning] = caplog.messages
    assert "that vLLM's grammars do not know" in warning
