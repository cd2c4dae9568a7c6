"""The tokenizer: words have one id everywhere, encoding is lossless, and every loader gives the same ids."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from dev.pretrain.corpus import Stage, dialogues, prompt
from dev.pretrain.model import new_policy
from dev.pretrain.training import new_tokenizer
from dev.spider_data.lexicon import words
from llguidance.hf import from_tokenizer
from tokenizers.decoders import DecodeStream

from groundwire.adapters.sql_agents import prompts
from groundwire.train.policy import STARTER
from groundwire.train.policy.model import load_policy
from groundwire.train.policy.pretrained.model_files import save_policy

TEXTS = [
    "How many singers are there?",
    "List the home cities of all singers whose age is at least 30, please.",
    "SELECT singer.name, count(*) FROM singer JOIN song ON singer.id = song.singer_id GROUP BY singer.id",
    "SELECT home_city FROM singer WHERE name LIKE '%Star%' AND age NOT IN (SELECT max(age) FROM singer)",
    '<tool_call>\n{"name": "query_database_by_sql", "arguments": {"sql": "SELECT name FROM singer"}}\n</tool_call>',
    "[('Ann Smith', 3), ('Bob', 5), ... 12 more rows]",
    "Error: no such column: x. Columns of t: a, b",
    "tabs\tand  double spaces \n\n newlines, digits 1234 and a1b2, __under__ . _ scores_",
    "Zürich, 東京, 🙂 and don't",
    "",
]


def test_llguidance_reads_the_starters_tokenizer_as_vllm_asks_it_to():
    """Its regular expressions have look-behinds of a fixed size only."""
    lookup = from_tokenizer(load_policy(STARTER)[1])
    assert lookup.dbg_tokens(lookup.tokenize_str("boxes of taxes")) == "⟦b‧o‧x‧es‧ of‧ t‧a‧x‧es⟧"


@pytest.fixture(scope="module")
def tokenizer():
    return new_tokenizer(databases=60)


@pytest.fixture(scope="module")
def checkpoint(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save_policy(new_policy(tokenizer, width=16, layers=1, heads=2, intermediate=16), tokenizer, folder)
    return folder


def ids(tokenizer, text):
    return tokenizer(text)["input_ids"]


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_is_lossless(tokenizer, text):
    assert tokenizer.decode(ids(tokenizer, text)) == text


def test_encoding_of_dialogues_is_lossless(tokenizer):
    stage = Stage(freedom=1.0, checks=1, rewrites=1, tools=0.5)
    others = Stage(freedom=1.0, checks=1, rewrites=1, others=1.0, drills=0.2)
    items = [*itertools.islice(dialogues(random.Random(7), stage), 40)]
    for item in [*items, *itertools.islice(dialogues(random.Random(7), others), 40)]:
        for text in item.texts():
            assert tokenizer.decode(ids(tokenizer, text)) == text


def test_a_word_has_the_same_id_everywhere(tokenizer):
    (word,) = ids(tokenizer, " singer")
    for text in (
        *("the singers sing", "FROM singer WHERE", "singers are", "CREATE TABLE singer ( id int )"),
        *("x.singer", "count(singer)", "the_singer", "singer_id", "'singer'", '"singer"', "a=singer"),
    ):
        found = ids(tokenizer, f" {text}")
        assert word in found, text


def test_every_word_of_the_lexicon_is_one_id_except_its_plural(tokenizer):
    for word in words():
        pieces = tokenizer.convert_ids_to_tokens(ids(tokenizer, f" {word}"))
        assert pieces[0] == "Ġ" + word[: len(pieces[0]) - 1], pieces
        assert pieces[1:] in ([], ["s"], ["es"]), pieces


def test_streamed_text_is_final(tokenizer):
    text = TEXTS[2]
    stream = DecodeStream(skip_special_tokens=True)
    parts = [stream.step(tokenizer.backend_tokenizer, token) for token in ids(tokenizer, text)]
    assert "".join(part or "" for part in parts) == text


def test_auto_tokenizer_reads_the_same_ids(tokenizer, checkpoint):
    _, loaded = load_policy(checkpoint)
    for text in TEXTS:
        assert ids(loaded, text) == ids(tokenizer, text)
        assert loaded.decode(ids(loaded, text)) == text
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert json.loads((checkpoint / "config.json").read_text())["model_type"] == "llama"


def test_the_template_writes_the_text_of_pretraining(tokenizer, checkpoint):
    _, loaded = load_policy(checkpoint)
    messages = [
        {"role": "system", "content": prompts.write("system", "CREATE TABLE singer ( id int )")},
        {"role": "user", "content": prompts.write("write", "How many singers are there?")},
    ]
    whole = "".join(prompt("CREATE TABLE singer ( id int )", prompts.write("write", "How many singers are there?")))
    assert loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == whole
    reply = prompts.fence("SELECT count(*) FROM singer")
    parts = [*prompt("CREATE TABLE singer ( id int )", prompts.write("write", "How many singers are there?")), reply]
    assert [i for part in parts for i in ids(loaded, part)] == ids(loaded, whole + reply)


TOOL_DIALOGUES = Stage(writes=1, checks=1, rewrites=1, tools=1.0)
OTHER_AGENTS = Stage(writes=1, checks=1, rewrites=1, others=1.0)
DRILLS = Stage(writes=1, drills=1.0)


@pytest.mark.parametrize("stage", [TOOL_DIALOGUES, OTHER_AGENTS, DRILLS])
def test_the_template_writes_the_dialogues_of_pretraining(tokenizer, stage):
    for item in itertools.islice(dialogues(random.Random(3), stage), 30):
        for dialogue in item.dialogues:
            whole = "".join([item.prefix, *(text for text, _ in dialogue)])
            messages, tools = read_messages(whole)
            assert any(learned for _, learned in dialogue), "a dialogue has something to learn"
            assert tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False) == whole + "\n"
            pieces = [ids(tokenizer, text) for text in (item.prefix, *(text for text, _ in dialogue))]
            assert [i for piece in pieces for i in piece] == ids(tokenizer, whole)


def read_messages(whole):
    """The messages and the tools in the text of the chat template."""
    messages, tools = [], []
    for role, text in re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", whole, re.DOTALL):
        if role == "system":
            before, found, after = f"\n{text}".rpartition("\nTools:\n")
            tools = (
                [{"type": "function", "function": json.loads(line)} for line in after.splitlines()[:-1]]
                if found
                else []
            )
            if content := (before if found else f"\n{text}")[1:]:
                messages.append({"role": role, "content": content})
        elif text.startswith("<tool_call>"):
            call = {"function": json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))}
            messages.append({"role": role, "content": "", "tool_calls": [call]})
        elif text.startswith("<tool_response>"):
            rows = text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
            messages.append({"role": "tool", "content": rows})
        else:
            messages.append({"role": role, "content": text})
    return messages, tools


def test_the_template_writes_tool_calls_as_hermes_does(tokenizer):
    tool = {"type": "function", "function": {"name": "run", "description": "Run it", "parameters": {}}}
    call = {"type": "function", "function": {"name": "run", "arguments": {"sql": "SELECT 'a' < 3"}}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "[(1,)]"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True)
    assert '{"name": "run", "description": "Run it", "parameters": {}}' in text
    assert '<tool_call>\n{"name": "run", "arguments": {"sql": "SELECT \'a\' < 3"}}\n</tool_call><|im_end|>' in text
    assert text.endswith("<tool_response>\n[(1,)]\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    call["function"]["arguments"] = json.dumps({"sql": "SELECT 'a' < 3"})  # as OpenAI clients send it
    assert tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False, add_generation_prompt=True) == text


def test_the_same_texts_give_the_same_ids(tokenizer):
    assert new_tokenizer(databases=60).get_vocab() == tokenizer.get_vocab()
