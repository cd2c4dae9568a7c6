"""What holds for the reply of every family of models: its template writes reasoning and calls, and we read them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json

import pytest

pytest.importorskip("torch")

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from groundwire.adapters.tracing.wire.exchange import HttpExchange
from groundwire.train.policy.chat.request import parse_request
from groundwire.train.policy.chat.response import ChatResponse, StreamedChoice
from groundwire.train.policy.chat.tool_formats import FORMATS, written_format
from groundwire.train.policy.errors import ChatRequestError
from groundwire.train.policy.types import Completion

CALLS = {
    "hermes": '{{ \'<tool_call>\\n{"name": "\' + f.name + \'", "arguments": \' + f.arguments | tojson }}'
    "{{ '}\\n</tool_call>' }}",
    "qwen3_xml": "{{ '<tool_call>\\n<function=' + f.name + '>\\n' }}{% for k, v in f.arguments.items() %}"
    "{{ '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}",
    "deepseek_v3": "{{ '<｜tool▁calls▁begin｜>' if loop.first }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
    "{{ f.name + '\\n```json\\n' + f.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}"
    "{{ '<｜tool▁calls▁end｜>' if loop.last }}",
    "deepseek_v31": "{{ '<｜tool▁calls▁begin｜>' if loop.first }}<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>"
    "{{ f.arguments | tojson }}<｜tool▁call▁end｜>{{ '<｜tool▁calls▁end｜>' if loop.last }}",
    "mistral": "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}",
    "llama3_json": """{{ '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}""",
}
SEPARATORS = {"hermes": "\n", "qwen3_xml": "\n", "deepseek_v3": "\n", "llama3_json": "; "}
THINKS = "{{ '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' if m.reasoning_content }}"
PROPERTIES = {"sql": {"type": "string"}, "n": {"type": ["integer", "null"]}, "list": {"type": "array"}, "on": {}}
TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": PROPERTIES}}}
TEXTS = [
    "Let me look.",
    "\n",
    " ",
    "é\U0001f600",
    "<",
    "{",
    "}",
    "</",
    "<think",
    "<tool",
    '"',
    "\\",
    "a b",
    "`",
    "1; 2",
    "[",
]
DRAFTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=run>", "</function>", "[TOOL_CALLS]",
    '{"name": "run"}', '<tool_call>{"name": "run"}</tool_call>', "<｜tool▁call▁begin｜>run<｜tool▁sep｜>{}",
]  # fmt: skip
letters = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x1f"), max_size=6
)  # 1f: the starter's own
relaxed = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
said = st.lists(st.sampled_from(TEXTS), max_size=6).map("".join)
values = st.recursive(letters | st.integers() | st.booleans() | st.none(), st.lists, max_leaves=4)
arguments = st.fixed_dictionaries({}, optional={
    "sql": said | st.sampled_from(DRAFTS) | letters,
    "n": st.none() | st.integers(),
    "list": st.lists(values),
})  # fmt: skip


@pytest.fixture(scope="module", params=CALLS)
def family(request, tiny_policy):
    """(format, tokenizer), with the special tokens of the format and the template of a family that does not think."""
    tokenizer = copy.deepcopy(tiny_policy[1])
    if request.param not in ("hermes", "qwen3_xml"):
        tokenizer.add_tokens(list(FORMATS[request.param].special), special_tokens=True)
    separator = json.dumps(SEPARATORS.get(request.param, ""))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
        f"{{{{ {separator} if m.tool_calls and m.content and {separator} == '\\n' }}}}"
        "{% for c in m.tool_calls %}{% set f = c.function %}"
        f"{{{{ {separator} if not loop.first }}}}{CALLS[request.param]}"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return FORMATS[request.param], tokenizer


@functools.cache
def thinking(tokenizer):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = tokenizer.chat_template.replace("+ m.content }}", "}}" + THINKS + "{{ m.content }}", 1)
    return changed


def response(family, prompt="", **request):
    tool_format, tokenizer = family
    body = {"messages": [{"role": "user", "content": "Q"}], "tools": [TOOL], **request}
    ids = tuple(tokenizer(prompt or "Q", add_special_tokens=False)["input_ids"])
    chat = parse_request(body, served="m", tool_format=tool_format.name)
    exchange = HttpExchange(rollout_id="r", attempt_id="a")
    return ChatResponse(chat, ids, model="m", tokenizer=tokenizer, tool_format=tool_format, exchange=exchange)


def sample(family, *pieces, stop=()):
    """The reply whose tokens are those of ``pieces``, up to the stop string, as an engine answers it."""
    tokenizer, ids, text = family[1], [], ""
    tokens = [token for piece in pieces for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]
    for token in [*tokens, tokenizer.eos_token_id]:
        ids.append(token)
        text = tokenizer.decode(ids, skip_special_tokens=True) if stop or token == tokenizer.eos_token_id else ""
        if places := [text.index(end) for end in stop if end in text]:
            text = text[: min(places)]
            break
    return Completion((1,), ids, [-1.0] * len(ids), text, "stop")


def functions(message):
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls", [])]


def render(tokenizer, *messages, add=True):
    return tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=add)


def conversation(family, reasoning, content, calls):
    """The prompt, a canonical reply to it as the template writes it, and its message."""
    tokenizer, user = family[1], {"role": "user", "content": "Q"}
    tool_calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": "run", "arguments": call}}
        for i, call in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": tool_calls}
    prompt = render(tokenizer, user)
    return prompt, render(tokenizer, user, message, add=False)[len(prompt) :].removesuffix("<|im_end|>\n"), user


@relaxed
@given(
    pieces=st.lists(st.sampled_from([*TEXTS, *DRAFTS]) | letters, max_size=12),
    calls=st.lists(arguments, max_size=2),
    end=st.lists(st.sampled_from([*TEXTS, *DRAFTS]), max_size=3),
    stop=st.sampled_from([(), ("look.\n<t",), ("</tool_call>", "zz"), ("</think>\n\n",)]),
    opened=st.sampled_from(["", "", "<think>\n"]),
    thinks=st.booleans(),
    split=st.booleans(),
)
@example(pieces=["<think>", "a", "</think>", "b"], calls=[], end=[], stop=(), opened="", thinks=True, split=True)
def test_a_stream_is_the_whole_reply(family, pieces, calls, end, stop, opened, thinks, split):
    family = (family[0], thinking(family[1])) if thinks else family
    answered = response(family, opened, stop=list(stop), return_token_ids=True)
    pieces = [*pieces, conversation(family, "", "", calls)[1], *end]
    assert_streamed(answered, sample(family, *("".join(pieces) if split else pieces), stop=stop))


def assert_streamed(answered, reply):
    """The number of events with text, which all begin the whole message's."""
    message, finish = answered.message(reply)
    streamed = StreamedChoice(0, answered)
    deltas = [choice["delta"] for choice in (streamed.add(token, -1.0) for token in reply.token_ids)]
    for last in (False, True):
        for name in ("content", "reasoning", "reasoning_content"):
            sent, whole = "".join(delta.get(name, "") for delta in deltas), message.get(name) or ""
            assert sent == whole if last else whole.startswith(sent)
        deltas.append(streamed.end(message, finish)["delta"])
    assert deltas[-2].get("tool_calls", []) == [{"index": i, **c} for i, c in enumerate(message.get("tool_calls", []))]
    return sum("content" in delta for delta in deltas[:-2])


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("strips", [False, True])
def test_a_long_stream_is_sent_as_it_comes(tiny_policy, split, strips):
    text = "Let me look at the  age of é\U0001f600 'Ann', \n\n 12. " * 8
    tokenizer = copy.deepcopy(tiny_policy[1])
    if strips:  # the first space of a text, as Llama 2's tokenizer does
        decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        tokenizer.backend_tokenizer.decoder = decoder
    family, stop = (FORMATS["hermes"], tokenizer), ["'Ann', \n\n 12. !"]
    reply = sample(family, *(text if split else text.split("a")), stop[0], "x", stop=stop)
    assert assert_streamed(response(family, stop=stop), reply) > 50


@relaxed
@given(
    draft=st.lists(st.sampled_from([*TEXTS, *DRAFTS]), max_size=8).map("".join),
    call=arguments,
    closed=st.booleans(),
)
def test_a_draft_in_reasoning_is_never_a_call(family, draft, call, closed):
    draft = draft.replace("</think>", "")
    drafted = draft + conversation(family, "", "", [{"sql": "DROP"}])[1]
    text = f"{drafted}</think>" + conversation(family, "", "", [call])[1] if closed else drafted
    for thinks, prompt, start in ((True, "", "<think>"), (True, "<think>\n", ""), (False, "", "<think>")):
        answered = (family[0], thinking(family[1])) if thinks else family
        message, _ = response(answered, prompt).message(sample(answered, start + text))
        whole_reply = family[0].name == "llama3_json" and not thinks
        assert functions(message) == ([("run", call)] if closed and not whole_reply else [])
        assert ("reasoning" in message) is thinks
        assert thinks or message["content"].startswith("<think>")


@relaxed
@given(reasoning=said.filter(str.strip), content=said, calls=st.lists(arguments, max_size=3), thinks=st.booleans())
def test_the_next_prompt_begins_with_what_a_template_writes(family, reasoning, content, calls, thinks):
    content = "" if calls and family[0].name == "llama3_json" else content.strip()
    family, reasoning = ((family[0], thinking(family[1])), reasoning.strip()) if thinks else (family, "")
    prompt, sampled, user = conversation(family, reasoning, content, calls)
    reply = sample(family, sampled)
    message, finish = response(family).message(reply)
    assert functions(message) == [("run", call) for call in calls]
    assert len({call["id"] for call in message.get("tool_calls", [])}) == len(calls)
    assert finish == ("tool_calls" if calls else "stop")
    assert response(family).message(dataclasses.replace(reply, finish_reason="length"))[1] == "length"
    for call in message.get("tool_calls", []):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    message |= {
        "content": (message["content"] or "").lstrip("\n"),
        "reasoning_content": message.get("reasoning", "").strip("\n"),
    }
    assert render(family[1], user, message, user).startswith(prompt + sampled)


@pytest.mark.parametrize(("written", "read"), [
    ("null", {}), ('"{}"', {}), ('""', {}), ('"null"', {}), ('"{\\"sql\\": \\"1\\"}"', {"sql": "1"}), ("{}", {}),
    ("[]", None), ('"x"', None), ("1", None), ('{"sql": ', None),
])  # fmt: skip
def test_arguments_may_be_null_or_text_but_nothing_else(family, written, read):
    text = conversation(family, "", "", [{"sql": "HERE"}])[1].replace('{"sql": "HERE"}', written)
    if family[0].name != "qwen3_xml":
        message, _ = response(family).message(sample(family, text))
        assert functions(message) == ([] if read is None else [("run", read)])
        assert message["content"] == (None if read is not None else text)


def test_a_parameter_that_is_written_as_text_has_the_type_of_its_schema():
    text = "<function=run><parameter=%s>\n%s\n</parameter></function>"
    for name, written, value in [
        ("sql", "12", "12"), ("n", "12", 12), ("n", "None", None), ("n", "x", "x"), ("on", "true", "true"),
        ("list", "[1, true]", [1, True]), ("list", "[", "["), ("sql", "</parameter>", "</parameter>"),
    ]:  # fmt: skip
        _, [call] = FORMATS["qwen3_coder"].parse(text % (name, written), {"run": TOOL["function"]["parameters"]})
        assert json.loads(call["function"]["arguments"]) == {name: value}


def test_a_template_says_which_format_it_writes_and_only_json_can_be_forced(family):
    tool_format, tokenizer = family
    assert written_format(tokenizer.chat_template) == tool_format.name
    if tool_format.name in ("hermes", "llama3_json"):
        assert response(family, tool_choice="required").request.grammar
    else:
        with pytest.raises(ChatRequestError, match=f"format {tool_format.name} cannot be constrained"):
            response(family, tool_choice="required")


def test_a_completion_of_a_prompt_and_a_constrained_reply_have_no_reasoning(family):
    family = family[0], thinking(family[1])
    reply = sample(family, '{"a": 1}')
    message, _ = response(family, "<think>\n", tools=[], response_format={"type": "json_object"}).message(reply)
    assert message == {"role": "assistant", "content": '{"a": 1}'}
    assert response(family, "<think>\n", tools=[], raw_prompt="<think>\n").message(reply)[0] == message


def test_mistrals_lists_of_calls_keep_their_ids_and_new_ones_are_as_its_templates_want_them(tiny_policy):
    text = '[TOOL_CALLS] [{"name": "run", "arguments": {}, "id": "abcdefgh0"}, {"name": "run", "arguments": {}}]'
    family = FORMATS["mistral"], tiny_policy[1]
    message, _ = response(family).message(sample(family, text))
    assert message["content"] is None
    kept, made = (call["id"] for call in message["tool_calls"])
    assert (kept, len(made)) == ("abcdefgh0", 9)
    assert FORMATS["mistral"].parse(text.replace('"run"', '"x"', 1), {"run"}) == (text.replace('"run"', '"x"', 1), [])
