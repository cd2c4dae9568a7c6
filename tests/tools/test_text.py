"""Half of a surrogate pair, which UTF-8 cannot hold, becomes U+FFFD wherever text comes in or goes out."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from groundwire import rewards
from groundwire.adapters import AGENT_HEADER, Answer, Endpoint
from groundwire.adapters.tracing.calls import to_json
from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.adapters.tracing.spans import SpanRecord
from groundwire.adapters.tracing.wire.exchange import HttpExchange, read_exchange
from groundwire.adapters.tracing.wire.request import calling_agent, read_request
from groundwire.domains import load_split, task_list
from groundwire.tools import text
from groundwire.tools.errors import UserError
from groundwire.tools.files import parse_json
from groundwire.tools.secrets import masked_values, secret_masker
from groundwire.tools.text import valid_text, valid_texts
from groundwire.train import evaluate
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import read_prompts
from groundwire.train.store.base import without_secrets

ANY_TEXT = st.text(alphabet=st.characters(), max_size=20)  # half surrogate pairs too
BAD, GOOD = "cut \ud83d", "cut \ufffd"


@given(ANY_TEXT)
def test_any_text_becomes_valid_and_valid_text_stays_as_it_is(any_text: str) -> None:
    valid = valid_text(any_text)
    assert valid_text(valid.encode().decode()) is valid or valid == valid.encode().decode()
    assert [each for each in valid if each != "\ufffd"] == [
        each for each in any_text.encode("utf-16", "surrogatepass").decode("utf-16", "ignore") if each != "\ufffd"
    ]


def test_halves_that_belong_together_are_one_character() -> None:
    assert valid_texts({"\ud83d\ude00": ["\ud83d", ("\ude00", 1)]}) == {"\U0001f600": ["\ufffd", ("\ufffd", 1)]}


@given(st.recursive(ANY_TEXT | st.just("\\ud83d") | st.integers(), lambda inner: st.lists(inner, max_size=3)))
def test_json_has_the_value_that_was_written_in_valid_text(value: Any) -> None:
    assert parse_json(json.dumps(value)) == valid_texts(value)
    assert parse_json(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")) == valid_texts(value)


def test_text_is_made_valid_where_it_enters_and_where_it_leaves() -> None:
    ids = {"rollout_id": "r", "attempt_id": "a", "sequence_id": 1, "start_time": 0.0, "end_time": 0.0}
    span = SpanRecord(name=BAD, attributes={BAD: [BAD]}, error=BAD, **ids)  # type: ignore[arg-type]
    stored = without_secrets(span, secret_masker())
    assert (stored.name, stored.attributes, stored.error) == (GOOD, {GOOD: [GOOD]}, GOOD)
    step = {"agent": BAD, "kind": "tool", "input": BAD, "output": BAD, "ok": True}
    answer = Answer(text=BAD, steps=[step])  # type: ignore[list-item]
    assert (answer.text, answer.steps) == (GOOD, [{**step, "agent": GOOD, "input": GOOD, "output": GOOD}])
    body = json.dumps({"messages": [{"content": BAD}]}).encode()
    assert read_request(body) == {"messages": [{"content": GOOD}]}
    assert to_json({BAD: BAD}) == f'{{"{GOOD}":"{GOOD}"}}'
    assert masked_values({BAD: BAD}) == read_prompts({BAD: BAD}) == {GOOD: GOOD}


def test_halves_that_a_server_streams_one_by_one_are_one_character() -> None:
    deltas = [{"role": "assistant", "content": half} for half in ("\ud83d", "\ude00", "\ud83d")]
    events = [{"choices": [{"index": 0, "delta": each, "finish_reason": None}]} for each in deltas]
    events[-1]["choices"][0]["finish_reason"] = "stop"
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    exchange = HttpExchange(
        rollout_id="r", attempt_id="a", agent="", started=1.0, ended=2.0, body=body.encode(), streamed=True
    )
    assert read_exchange(exchange, 0, 1).reply["content"] == "\U0001f600\ufffd"


@given(ANY_TEXT)
def test_an_agent_may_have_any_name_and_headers_are_ascii(name: str) -> None:
    headers = Endpoint(base_url="http://h/v1", model="m").agent_headers(name)
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    assert (
        calling_agent({"baggage": headers["baggage"]})
        == calling_agent(headers)
        == valid_text(name).strip()[:200].strip()
    )
    assert Endpoint(base_url="", model="").agent_headers("write query [1]")[AGENT_HEADER] == "write query [1]"


def test_tasks_are_made_valid_and_their_share_is_said(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "hint": BAD if n < 2 else "é"} for n in range(5)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    for tasks in (rows, str(file)):
        data = load_split(task_list(tasks), None)
        assert sorted(task["hint"] for task in (*data.train, *data.validation)) == [GOOD, GOOD, "é", "é", "é"]
        assert data.notes == ("2 of 5 tasks have U+FFFD in place of a character that was cut or not decoded",)


def test_a_name_that_no_file_can_hold_is_refused_before_a_run_and_a_file_of_tasks_is_read(tmp_path: Path) -> None:
    for name in ("output_dir", "model", "group_column"):
        with pytest.raises(UserError, match=f"{name} is 'caf.udce9', which is no valid Unicode; rename it"):
            resolve("fast", **{name: "caf\udce9"})
    file = tmp_path / "caf\udce9.jsonl"
    file.write_text('{"question": "a?"}\n{"question": "b?"}')
    assert "caf\ufffd.jsonl: train 1 tasks" in task_list(file).load().source


def test_what_was_replaced_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(text, "_first", [])
    with caplog.at_level(logging.WARNING):
        valid_texts([BAD, BAD])
    assert [record.getMessage() for record in caplog.records] == [
        "half of a character (a surrogate without its pair) becomes U+FFFD; first here: 'cut \\ud83d'"
    ]


async def test_such_text_ends_no_run_wherever_it_is(tmp_path: Path) -> None:
    async def agent(task: Any) -> str:
        async with openai.AsyncOpenAI(api_key="none") as client:
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["question"]}])
        if "fails" in task["question"]:
            raise RuntimeError(BAD)
        return BAD

    def reward(task: Any, answer: str) -> dict[str, float]:
        if "no reward" in task["question"]:
            raise rewards.RewardError(BAD)
        return {BAD: float(answer == GOOD == task[GOOD])}

    tasks = [{"question": f"{what} {BAD}?", BAD: BAD} for what in ("answers", "fails", "no reward")]
    async with ScriptedPolicyServer(replies=lambda body: body["messages"][-1]["content"]) as server:
        policy = {"base_url": server.base_url, "model": "scripted", "api_key": "none"}
        where = {"output_dir": str(tmp_path), "quiet": True, "retries": 0}
        result = await asyncio.to_thread(evaluate, agent, tasks, reward, **policy, **where)
    rollouts, unreadable = RunDir.open(result.run_dir).rollouts()
    assert unreadable == []
    ended = [rollout.outcome for rollout in rollouts]
    found = {end.status: (end.answer, end.message, end.reward_components) for end in ended}
    assert found["succeeded"] == (GOOD, "", {GOOD: 1.0})
    assert GOOD in found["agent"][1]
    assert found["reward"][:2] == (GOOD, GOOD)
