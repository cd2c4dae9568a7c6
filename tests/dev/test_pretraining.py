"""The dialogues of other people's agents: varied, correct, and without the names that measure generalization."""

from __future__ import annotations

import itertools
import json
import random
import re

import pytest
from dev.pretrain.corpus import Stage, dialogues
from dev.pretrain.wording import HELD_OUT
from programs import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def items():
    stage = Stage(writes=1, checks=1, others=1.0)
    return list(itertools.islice(dialogues(random.Random(11), stage), 400))


def tools_of(item):
    definitions = re.search(r"(?:\n|system\n)Tools:\n(.*)Call a tool as", item.prefix, re.DOTALL)
    return [json.loads(line) for line in definitions[1].splitlines()] if definitions else []


def test_a_learned_call_is_of_an_offered_tool_with_its_arguments(items):
    calls = 0
    for item in items:
        tools = {tool["name"]: tool["parameters"]["properties"] for tool in tools_of(item)}
        for dialogue in item.dialogues:
            for text, learned in dialogue:
                if learned and (match := re.match(r"<tool_call>\n(.*)\n</tool_call>", text)):
                    call = json.loads(match[1])
                    assert set(call["arguments"]) <= set(tools[call["name"]])
                    calls += 1
    assert calls > 200


def test_names_arguments_and_prompts_vary(items):
    tools = [tool for item in items for tool in tools_of(item)]
    assert len({tool["name"] for tool in tools}) > 0.5 * len(tools)
    assert len({name for tool in tools for name in tool["parameters"]["properties"]}) > 60
    assert len({item.prefix[:200] for item in items}) > 0.9 * len(items)
    assert max(len(tools_of(item)) for item in items) > 5
    assert {len(tools_of(item)) for item in items} >= {0, 1, 2, 3}


def test_some_kits_share_a_prefix_and_some_schemas_come_from_a_tool_without_arguments(items):
    kits = [[tool["name"] for tool in tools_of(item)] for item in items]
    assert sum(len(kit) > 2 and len({name.split("_")[0] for name in kit}) == 1 for kit in kits) > 5
    learned = [[text for text, is_reply in item.dialogues[0] if is_reply] for item in items]
    schema_first = [calls for calls in learned if len(calls) == 2 and '"arguments": {}}' in calls[0]]
    assert sum("SELECT" in query for _, query in schema_first) > 5


def test_the_names_of_the_examples_tools_are_held_out(items):
    assert not HELD_OUT & {tool["name"] for item in items for tool in tools_of(item)}
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.rglob("*.py")))
    assert all(name in source or name.startswith("sql_db_") for name in HELD_OUT)


def test_most_checked_queries_are_right_and_most_wrong_ones_fail_as_the_policys_own_do():
    stage = Stage(n_tables=(2,), n_attributes=(2,), writes=1, checks=10, rewrites=1)
    made = itertools.islice(dialogues(random.Random(11), stage), 60)
    checks = [dialogue for item in made for dialogue in item.dialogues[1:-1]]
    wrong = [asked for (asked, _), (reply, _) in checks if reply.startswith("INCORRECT")]
    assert 0.2 < len(wrong) / len(checks) < 0.3
    assert sum("Result: Error" in asked for asked in wrong) > 0.6 * len(wrong)
