"""If a prompt does not begin with the sampled reply, the first differing token and its likely cause are reported."""

from __future__ import annotations

import json

import pytest
from programs import ROOT
from tokenizers import Tokenizer

from groundwire.adapters.tracing import LLMCall
from groundwire.train.report.token_text import TokenDecoder
from groundwire.train.store.rows import from_row
from groundwire.train.why import CAUSES, PrefixMismatch, _explain, find_mismatches

DATA = ROOT / "tests" / "data"
FILE = DATA / "rollouts-tokenizer.json"  # of the recorded rollouts: an earlier starter's
WORDS, TOKENIZER = TokenDecoder(FILE), Tokenizer.from_file(str(FILE))
NOWHERE = TokenDecoder()
ROLLOUTS = {name: from_row(row) for name, row in json.loads((DATA / "rollouts.json").read_text()).items()}
REAL = {name: rollout.calls for name, rollout in ROLLOUTS.items()}
SYSTEM = "<|im_start|>system\nAnswer questions about a database of singers and concerts.<|im_end|>\n"
ASKED = "<|im_start|>user\nHow many singers are there?<|im_end|>\n"
HEADER = "<|im_start|>assistant\n"
NEXT = "<|im_start|>user\nError: no such table.<|im_end|>\n"
CALL = '<tool_call>\n{"name": "query", "arguments": {"sql": "SELECT 1"}}\n</tool_call>'


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def call(prompt: str, reply: str = "<|im_end|>") -> LLMCall:
    made = {"agent": "sql_agent", "prompt_ids": ids(prompt), "response_ids": ids(reply)}
    return LLMCall(rollout_id="", attempt_id="", sequence=0, **made)


def after(message: str, kept: str, *, words: TokenDecoder = WORDS) -> list[PrefixMismatch]:
    """The mismatches of two calls: ``message`` was sampled, and ``kept`` stands in the next prompt."""
    first = call(SYSTEM + ASKED + HEADER, message + "<|im_end|>")
    return find_mismatches([first, call(SYSTEM + ASKED + HEADER + kept + "<|im_end|>\n" + NEXT + HEADER)], words)


def cause(message: str, kept: str) -> str:
    [mismatch] = after(message, kept)
    assert mismatch.difference.endswith("was sampled")
    return mismatch.cause


def test_a_continued_conversation_has_no_mismatch() -> None:
    assert after("SELECT 1", "SELECT 1") == []


def test_real_rollouts_of_one_conversation_have_no_mismatch_unless_tokenized_again() -> None:
    assert find_mismatches(REAL["openai-agents"], WORDS) == []
    mismatch, *_ = found = find_mismatches(REAL["openai-agents, tokenized again"], WORDS)
    assert {each.cause for each in found} == {"retokenized"}
    rollout = ROLLOUTS["openai-agents, tokenized again"]
    lines = list(_explain([[rollout]], rollout.rollout_id, lambda step: {"backend": "openai-agents"}, WORDS))
    assert f"{mismatch.difference}; likely {CAUSES['retokenized']} (openai-agents)" in lines


def test_graph_nodes_with_own_prompts_begin_new_conversations() -> None:
    found = find_mismatches(REAL["langgraph"], WORDS)
    assert [mismatch.cause for mismatch in found] == ["new_conversation", "new_conversation"]
    assert all(mismatch.difference.endswith("in the earlier prompt") for mismatch in found)


def test_stripped_thinking_is_recognised() -> None:
    assert cause("<think>\nTwo tables.\n</think>\nSELECT 1", "SELECT 1") == "thinking"


def test_thinking_opened_by_the_template_is_recognised() -> None:
    first = call(SYSTEM + ASKED + HEADER + "<think>\n", "Two tables.\n</think>\nSELECT 1<|im_end|>")
    then = call(SYSTEM + ASKED + HEADER + "SELECT 1<|im_end|>\n" + NEXT + HEADER)
    [mismatch] = find_mismatches([first, then], WORDS)
    assert mismatch.cause == "thinking"


def test_a_rewritten_tool_call_is_recognised() -> None:
    assert cause(CALL.replace('": {', '":{'), CALL) == "tool_call"


def test_stripped_whitespace_is_recognised() -> None:
    assert cause("SELECT 1\n\n", "SELECT 1") == "whitespace"


def test_another_end_token_is_recognised() -> None:
    first = call(SYSTEM + ASKED + HEADER, "SELECT 1<|im_start|>")
    [mismatch] = find_mismatches([first, call(SYSTEM + ASKED + HEADER + "SELECT 1<|im_end|>\n" + NEXT + HEADER)], WORDS)
    assert mismatch.cause == "end_token"


def test_a_cut_reply_is_truncated_and_a_changed_one_is_edited() -> None:
    assert cause("SELECT name FROM singer ORDER BY age", "SELECT name FROM") == "truncated"
    assert cause("SELECT name FROM singer", "DELETE FROM singer") == "edited"


def test_left_out_messages_are_truncated() -> None:
    first = call(SYSTEM + ASKED + HEADER, "SELECT 1<|im_end|>")
    [mismatch] = find_mismatches([first, call(ASKED + HEADER + "SELECT 1<|im_end|>\n" + NEXT + HEADER)], WORDS)
    assert mismatch.cause == "truncated"
    assert mismatch.difference.endswith("in the earlier prompt")


def test_a_changed_system_message_is_an_edited_history() -> None:
    first = call(SYSTEM + ASKED + HEADER, "SELECT 1<|im_end|>")
    changed = SYSTEM.replace("singers and", "musicians,") + ASKED.replace("many singers", "many of those")
    [mismatch] = find_mismatches([first, call(changed + HEADER + "SELECT 1<|im_end|>\n" + NEXT + HEADER)], WORDS)
    assert mismatch.cause == "edited"


def test_the_first_differing_token_is_reported_with_its_position() -> None:
    [mismatch] = after("SELECT name FROM singer", "SELECT age FROM singer")
    start = len(ids(SYSTEM + ASKED + HEADER))
    assert f"token {start + 1} is" in mismatch.difference
    assert "'age'" in mismatch.difference.replace(" age", "age")
    assert "was sampled" in mismatch.difference


def test_a_call_is_compared_with_the_earlier_call_of_the_longest_common_prefix() -> None:
    other = call("<|im_start|>system\nYou check queries.<|im_end|>\n" + HEADER, "fine<|im_end|>")
    first = call(SYSTEM + ASKED + HEADER, "SELECT 1<|im_end|>")
    [new, mismatch] = find_mismatches(
        [first, other, call(SYSTEM + ASKED + HEADER + "SELECT 2<|im_end|>\n" + NEXT + HEADER)], WORDS
    )
    assert new.cause == "new_conversation"
    assert new.difference.startswith("call 2 (")
    assert mismatch.difference.startswith("call 3 (sql_agent) does not begin with call 1:")


def test_of_earlier_calls_with_equally_long_common_prefixes_it_is_the_last_one() -> None:
    calls = [call(SYSTEM + ASKED + HEADER, f"SELECT {name}<|im_end|>") for name in ("z", "a", "b")]
    [mismatch] = find_mismatches([*calls, call(SYSTEM + NEXT + HEADER)], WORDS)[2:]
    assert mismatch.difference.startswith("call 4 (sql_agent) does not begin with call 3:")


def test_a_rollout_may_have_very_many_mismatches() -> None:
    """With each call compared with all before, this would take an hour."""
    count = 20_000
    made = {"rollout_id": "", "attempt_id": "", "response_ids": [7]}
    calls = [LLMCall(sequence=number, prompt_ids=[*range(40), 50 + number, 3], **made) for number in range(count)]
    mismatches = find_mismatches(calls, NOWHERE)
    assert len(mismatches) == count - 1
    assert {mismatch.cause for mismatch in mismatches} == {"edited"}


def test_without_a_tokenizer_ids_are_shown() -> None:
    [mismatch] = after("SELECT name FROM singer", "SELECT age FROM singer", words=NOWHERE)
    assert f"'#{ids('SELECT name')[1]}' was sampled" in mismatch.difference
    assert mismatch.cause in CAUSES


@pytest.mark.parametrize("name", list(REAL))
def test_the_pieces_of_tokens_make_up_the_text(name: str) -> None:
    for each in REAL[name]:
        tokens = each.prompt_ids + each.response_ids
        assert "".join(WORDS.pieces(tokens)) == WORDS.text(tokens)
