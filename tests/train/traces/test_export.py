"""What is exported can be read again, and has the token ids that it was made of."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_formats import langfuse_trace, trajectory
from test_traces import ANSWER, ASKED, CALLING, CHAT, RESULT, SYSTEM, TOOL, check_conversation, write_lines
from transformers import AutoTokenizer
from typer.testing import CliRunner

from groundwire.adapters.tracing import LLMCall
from groundwire.train import read_traces
from groundwire.train.cli.app import app
from groundwire.train.export import _with_messages
from groundwire.train.policy import STARTER
from groundwire.train.report.token_text import TokenDecoder
from groundwire.train.sft.data.examples import Turn, encode
from groundwire.train.sft.data.load import read_chats
from groundwire.train.store.rollout import Outcome, Rollout
from groundwire.train.traces.export import conversations, to_atif, to_chats


def export(tmp_path: Path, records: list[dict[str, Any]], form: str) -> Path:
    source, output = write_lines(tmp_path / "t.jsonl", records), tmp_path / f"{form}.jsonl"
    result = CliRunner().invoke(app, ["export", str(source), "--format", form, "--output", str(output)])
    assert result.exit_code == 0, result.output
    return output


@pytest.mark.parametrize("form", ["atif", "openai", "otlp"])
def test_an_exported_trace_reads_as_the_same_calls(tmp_path: Path, form: str) -> None:
    [rollout] = read_traces(export(tmp_path, langfuse_trace(), form))
    check_conversation(rollout)
    assert rollout.outcome.reward_components["right"] == 1
    [original] = read_traces(write_lines(tmp_path / "original.jsonl", langfuse_trace()))
    assert rollout.task["inputs"] == original.task["inputs"] == {"question": "Rain in Bern?"}
    assert (rollout.task["question"], round(rollout.started)) == (original.task["question"], round(original.started))


@pytest.mark.parametrize("form", ["atif", "openai", "otlp"])
def test_a_call_of_no_agent_reads_as_one_of_no_agent(tmp_path: Path, form: str) -> None:
    records = [{"messages": [*CHAT[:4], ANSWER], "tools": [TOOL]}]
    [rollout] = read_traces(export(tmp_path, records, form))
    assert {call.agent for call in rollout.calls} == {""}


@pytest.mark.parametrize("form", ["atif", "otlp"])
def test_a_trace_without_a_reward_is_no_failure_and_keeps_its_scores_labels_images_and_thoughts(
    tmp_path: Path, form: str
) -> None:
    [trace] = langfuse_trace()
    image = {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}
    shown = {"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}
    thinking = {**ANSWER, "reasoning": "It is blue.", "reasoning_content": "It is blue."}
    trace["observations"] = [{**trace["observations"][0], "input": [shown], "output": thinking}]
    score = {**trace["scores"][0], "dataType": "NUMERIC"}
    trace["scores"] = [
        {**score, "name": name, "value": value} for name, value in (("a", 0.25), ("b", 1), ("tone", "kind"))
    ]
    original, again = (
        next(iter(read_traces(file)))
        for file in (write_lines(tmp_path / "original.jsonl", [trace]), export(tmp_path, [trace], form))
    )
    assert (again.outcome.failure, again.outcome.reward_components) == ("", {"a": 0.25, "b": 1})
    assert (again.metadata["labels"], again.outcome.reward) == ({"tone": "kind"}, None)
    assert [[*call.messages, call.reply] for call in again.trainable_calls] == [[shown, thinking]]
    assert [call.messages for call in original.calls] == [call.messages for call in again.calls]


@pytest.mark.parametrize("form", ["atif", "otlp"])
def test_what_is_not_learned_is_not_learned_after_an_export(tmp_path: Path, form: str) -> None:
    chats = [
        {"messages": [ASKED, {**ANSWER, "weight": 0}]},
        {"messages": [ASKED], "response": {"choices": [{"message": ANSWER, "finish_reason": "length"}]}},
    ]
    rollouts = list(read_traces(export(tmp_path, chats, form)))
    assert sorted(call.untrainable_reason for rollout in rollouts for call in rollout.calls) == [
        "its weight is 0",
        "the limit of tokens ended the reply",
    ]
    assert [rollout.outcome.failure for rollout in rollouts] == ["", ""]


def test_exported_chats_are_what_sft_learns(tmp_path: Path) -> None:
    [turns] = read_chats(export(tmp_path, langfuse_trace(), "openai"))
    assert [(turn.messages, turn.reply, turn.tools) for turn in turns] == [
        (CHAT[:2], CALLING, [TOOL]),
        (CHAT[:4], ANSWER, [TOOL]),
    ]


def test_a_call_after_other_messages_is_another_conversation(tmp_path: Path) -> None:
    [trace] = langfuse_trace()
    trace["observations"][1]["input"]["messages"] = [SYSTEM, ASKED, {**CALLING, "content": "Changed."}, RESULT]
    [rollout] = read_traces(write_lines(tmp_path / "t.jsonl", [trace]))
    assert [len(conversation.messages) for conversation in conversations(rollout)] == [3, 5]
    first, second = to_chats(rollout)
    assert [message.get("weight") for message in second["messages"] if message["role"] == "assistant"] == [0, None]
    assert first["messages"][-1]["role"] == "assistant"
    exported = to_atif(rollout)
    assert exported is not None
    assert [step.get("is_copied_context") for step in exported["subagent_trajectories"][0]["steps"]][2:] == [True, None]


def test_calls_that_are_not_whole_are_not_exported_as_learned(tmp_path: Path) -> None:
    [whole] = trajectory()
    whole["steps"][2]["is_copied_context"] = True
    [rollout] = read_traces(write_lines(tmp_path / "t.jsonl", [whole]))
    [chat] = to_chats(rollout)
    assert [message.get("weight") for message in chat["messages"] if message["role"] == "assistant"] == [0, None]


def test_the_messages_of_a_run_give_its_token_ids_again() -> None:
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    turns = [Turn([SYSTEM, ASKED], {"role": "assistant", "content": "SELECT 1"})]
    turns.append(Turn([SYSTEM, ASKED, turns[0].reply, {"role": "user", "content": "1. And now?\n"}], turns[0].reply))
    calls = [
        LLMCall(
            rollout_id="r",
            attempt_id="",
            sequence=place,
            prompt_ids=example.prompt_ids,
            response_ids=example.response_ids,
        )
        for place, example in enumerate(encode(tokenizer, turns))
    ]
    left_out = Counter[str]()
    run = Rollout(rollout_id="r", task={"id": "t", "question": "q"}, calls=calls, outcome=Outcome(reward=1.0))
    exported = _with_messages(run, TokenDecoder(STARTER / "tokenizer.json"), left_out)
    assert exported is not None
    for call, original in zip(exported.calls, calls, strict=True):
        [example] = encode(tokenizer, [Turn(call.messages, call.reply)])
        assert (example.prompt_ids, example.response_ids) == (original.prompt_ids, original.response_ids)
    [conversation] = conversations(exported)
    assert len(conversation.replies) == 2
    assert not left_out


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "t.jsonl", langfuse_trace())
    result = CliRunner().invoke(app, ["export", str(source), "--output", str(source)])
    assert (result.exit_code, "exists" in result.output) == (2, True)
