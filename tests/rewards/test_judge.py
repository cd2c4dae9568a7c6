"""A judge returns a verdict within its deadline and caps, or abstains; it never invents a number."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from judges import CASE, judged, settings, verdict

from groundwire import rewards
from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.rewards import JudgeAbstainedError, JudgeSettings, JudgeSettingsError, RewardError
from groundwire.rewards.judge import engine
from groundwire.rewards.judge.cache import JudgeCache
from groundwire.rewards.judge.client import JudgeClient
from groundwire.rewards.judge.engine import Judge
from groundwire.rewards.judge.prompt import UnreadableError, parse_scores
from groundwire.rewards.judge.settings import API_KEY
from groundwire.tools.types import AgentStep
from groundwire.train.cli.options import parse_judge

RAN = AgentStep(agent="a", kind="tool", input="SELECT 1", output="[(1,)]", ok=True)
FAILED = AgentStep(agent="a", kind="tool", input="SELECT", output="Error", ok=False)
TASK = {"id": "1", "question": CASE["question"], "answer": CASE["reference"]}


# -- the reward


async def test_the_hybrid_is_0_1_for_an_executed_query_plus_the_judges_score(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=[verdict(1.0), verdict(0.5, accuracy=1.0)]) as server:
        reward = rewards.get("rule_judge_hybrid", judge=settings(server, tmp_path))
        best = await reward(TASK, "It is for fever.", [FAILED, RAN])
        other = await reward(TASK, "For fever, I think.", [FAILED])
    assert rewards.total(best) == pytest.approx(1.1)
    assert other == {
        "executes": 0.0,
        "judge": pytest.approx(0.7),
        "metric/accuracy": 1.0,
        "metric/completeness": 0.5,
        "metric/clarity": 0.5,
        "metric/professionalism": 0.5,
    }
    assert rewards.total(other) == pytest.approx(0.7)


async def test_a_task_without_a_reference_is_an_error_not_a_0() -> None:
    with pytest.raises(RewardError, match="needs 'answer' in the task; it has id, question"):
        await rewards.get("rule_judge_hybrid")({"id": "1", "question": "?"}, "x", [])


def test_the_judge_is_announced_before_a_run() -> None:
    assert rewards.notes("spider_exec_match") == []
    [local] = rewards.notes("executes+0.5*rule_judge_hybrid")
    assert local.startswith("rule_judge_hybrid: answers are graded by the local grader, which ")
    assert "calls no model" in local
    [model] = rewards.notes("rule_judge_hybrid", judge=JudgeSettings(model="openai/gpt-5-mini"))
    assert "openai/gpt-5-mini" in model


# -- requests


async def test_the_request_asks_for_structured_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(API_KEY, "sk-not-to-be-seen")
    async with ScriptedPolicyServer(replies=[verdict(0.5)]) as server:
        found = await judged(settings(server, tmp_path, max_tokens=77))
        [request] = server.requests
    assert found.score == pytest.approx(0.5)
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("judge", 0.0, 77)
    schema = request["response_format"]["json_schema"]
    assert schema["strict"]
    assert set(schema["schema"]["required"]) == {"reason", "accuracy", "completeness", "clarity", "professionalism"}
    assert "sk-not-to-be-seen" not in json.dumps(request)


async def test_a_litellm_name_needs_no_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ScriptedPolicyServer(replies=[verdict(0.5), Reply(status=401, text="no")]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("OPENAI_API_KEY", "sk-not-to-be-seen")
        judge = settings(server, tmp_path, model="openai/gpt-4o-mini", base_url=None, max_usd=1.0)
        assert (await judged(judge)).score == pytest.approx(0.5)
        assert JudgeCache(judge.cache).spent()[1] > 0  # by LiteLLM's own prices
        with pytest.raises(JudgeAbstainedError, match="answered 401"):
            await judged(judge, answer="another")


async def test_the_settings_weights_are_used(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=[verdict(0.0, clarity=1.0)]) as server:
        judge = settings(server, tmp_path, weights="1,0,3,0")
        assert (await judged(judge)).score == pytest.approx(0.75)


async def test_samples_in_both_orders_are_averaged_and_their_spread_is_a_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "CONCURRENCY", 1)
    async with ScriptedPolicyServer(replies=[verdict(each) for each in (0.2, 0.4, 0.6, 0.8)]) as server:
        judge = settings(server, tmp_path, samples=2, temperature=1.0, swap_order=True)
        components = await rewards.get("rule_judge_hybrid", judge=judge)(TASK, "It is for fever.", [RAN])
        firsts = [request["messages"][1]["content"].split("\n")[2].partition(":")[0] for request in server.requests]
    assert components["judge"] == pytest.approx(0.5)
    assert components["metric/judge_spread"] == pytest.approx(0.6)
    assert rewards.total(components) == pytest.approx(0.6)
    assert sorted(firsts) == ["answer to grade", "answer to grade", "reference answer", "reference answer"]


# -- failures


@pytest.mark.parametrize(
    "unreadable",
    [
        "I would rather not.",
        "{}",
        "[1]",
        verdict(1.5),
        verdict(-0.1),
        verdict(True),
        verdict(float("nan")),
        '{"accuracy": "1.0"',
        '{"accuracy": "high", "completeness": 1, "clarity": 1, "professionalism": 1}',
        "{" * 5000,
        Reply(text="", finish_reason="length"),
    ],
)
async def test_an_unreadable_reply_is_requested_again_once_then_the_judge_abstains(
    unreadable: Any, tmp_path: Path
) -> None:
    async with ScriptedPolicyServer(replies=[unreadable, verdict(0.5), unreadable, unreadable, verdict(1.0)]) as server:
        judge = settings(server, tmp_path)
        assert (await judged(judge)).score == pytest.approx(0.5)
        with pytest.raises(JudgeAbstainedError, match="no verdict in two replies"):
            await judged(judge, answer="another")
        assert len(server.requests) == 4
        assert "could not be read" in server.requests[1]["messages"][1]["content"]


@pytest.mark.parametrize("around", ["{}", "```json\n{}\n```", "<think>{{x}} is wrong</think>\n{}", "Verdict: {}."])
async def test_a_verdict_inside_other_text_is_readable(around: str, tmp_path: Path) -> None:
    text = around.replace("{}", verdict(0.5)).replace("{{x}}", "{x}")
    async with ScriptedPolicyServer(replies=[text]) as server:
        assert (await judged(settings(server, tmp_path))).score == pytest.approx(0.5)


GOOD, BAD = verdict(1.0), verdict(0.0)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        (f"{BAD}\nThe answer was: {GOOD}", None),
        (BAD[:-1] + ', "accuracy": 1.0}', None),
        (GOOD + GOOD, 1.0),
        (GOOD + "{}", 1.0),
        (f"<think>{GOOD}</think> I refuse.", None),
        (f"<think>{GOOD}", None),
        (f"{GOOD}</think>\n{BAD}", 0.0),
        (f"<thinking>{GOOD}</thinking>{BAD}", 0.0),
        (f"<Think >{GOOD}</Think >{BAD}", 0.0),
        (f"[THINK]{GOOD}[/THINK]{BAD}", 0.0),
        (f"<|channel|>analysis<|message|>{GOOD}<|end|><|channel|>final<|message|>{BAD}", 0.0),
        (f'{{"reasoning": {GOOD}, {BAD[1:]}', 0.0),
        (f'{{"reason": "it says <think>", {BAD[1:]}', 0.0),
    ],
)
def test_two_different_verdicts_are_refused_and_what_the_judge_thinks_is_none(reply: str, score: float | None) -> None:
    if score is None:
        with pytest.raises(UnreadableError):
            parse_scores(reply)
    else:
        assert set(parse_scores(reply).values()) == {score}


async def test_a_stored_reply_that_is_no_verdict_any_more_is_asked_for_again(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=[verdict(0.5), verdict(0.7)]) as server:
        judge = settings(server, tmp_path)
        await judged(judge)
        with closing(sqlite3.connect(judge.cache)) as stored, stored:
            stored.execute("UPDATE verdicts SET reply = ?", (GOOD + BAD,))
        assert (await judged(judge)).score == (await judged(judge)).score == pytest.approx(0.7)
        assert len(server.requests) == 2


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_transient_failures_are_retried(status: int, tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=[Reply(status=status, text="busy"), verdict(0.5)]) as server:
        assert (await judged(settings(server, tmp_path))).score == pytest.approx(0.5)


async def test_after_its_retries_the_judge_abstains(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=lambda _: Reply(status=503, text="busy")) as server:
        with pytest.raises(JudgeAbstainedError, match=r"answered 503: .*busy.* \(asked 4 times\)"):
            await judged(settings(server, tmp_path))
        assert len(server.requests) == 4


async def test_permanent_failures_are_not_retried_and_show_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY, "sk-not-to-be-seen")
    async with ScriptedPolicyServer(replies=[Reply(status=401, text="bad key sk-not-to-be-seen")]) as server:
        with pytest.raises(JudgeAbstainedError) as caught:
            await judged(settings(server, tmp_path))
        assert len(server.requests) == 1
    assert "answered 401" in str(caught.value)
    assert f"bad key ${API_KEY}" in str(caught.value)
    assert "sk-not-to-be-seen" not in str(caught.value)


async def test_an_unreachable_judge_abstains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "PAUSES_S", ())
    async with ScriptedPolicyServer(replies=[]) as server:
        judge = settings(server, tmp_path)
    with pytest.raises(JudgeAbstainedError, match="cannot be reached"):
        await judged(judge)


async def test_a_silent_judge_delays_a_rollout_until_its_deadline_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "CONCURRENCY", 1)
    async with ScriptedPolicyServer(replies=lambda _: Reply(text=verdict(1.0), delay_s=60)) as server:
        judge = settings(server, tmp_path, deadline_s=0.3)
        with pytest.raises(JudgeAbstainedError, match=r"no verdict within its deadline of 0\.3 s"):
            await asyncio.wait_for(judged(judge), 600)
        room = Judge(judge)  # requests that wait for a slot end by the deadline, too
        waiting = [room.verdict(**{**CASE, "answer": str(n)}) for n in range(4)]
        ended = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 600)
    assert [type(each) for each in ended] == [JudgeAbstainedError] * 4


async def test_one_request_has_its_own_timeout(tmp_path: Path) -> None:
    replies = iter([Reply(text=verdict(1.0), delay_s=600), verdict(0.5)])
    async with ScriptedPolicyServer(replies=lambda _: next(replies)) as server:
        assert (await judged(settings(server, tmp_path, deadline_s=15.0))).score == pytest.approx(0.5)


async def test_concurrent_requests_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "CONCURRENCY", 3)
    async with ScriptedPolicyServer(replies=lambda _: Reply(text=verdict(0.5), delay_s=0.05)) as server:
        judge = Judge(settings(server, tmp_path))
        client = judge._client = _Counting(judge._settings)
        await asyncio.gather(*(judge.verdict(**{**CASE, "answer": str(n)}) for n in range(12)))
        assert (len(server.requests), client.most_at_once) == (12, 3)


class _Counting(JudgeClient):
    at_once = most_at_once = 0

    async def ask(self, messages: Any, response_format: Any) -> Any:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await super().ask(messages, response_format)
        finally:
            self.at_once -= 1


# -- costs


async def test_a_second_epoch_costs_nothing(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=[verdict(0.25), verdict(0.75)]) as server:
        judge = settings(server, tmp_path)
        first = [await judged(judge), await judged(judge, answer="another")]
        second = [await judged(judge), await judged(judge, answer="another")]
        assert len(server.requests) == 2
    assert first == second


async def test_equal_concurrent_requests_are_sent_once(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=lambda _: Reply(text=verdict(0.5), delay_s=0.05)) as server:
        judge = Judge(settings(server, tmp_path))
        await asyncio.gather(*(judge.verdict(**CASE) for _ in range(8)))
        assert len(server.requests) == 1


@pytest.mark.parametrize("changed", [{"model": "other"}, {"temperature": 0.5}, {"max_tokens": 99}])
async def test_another_model_or_sampling_is_another_request(changed: dict[str, Any], tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=lambda _: verdict(0.5)) as server:
        await judged(settings(server, tmp_path))
        await judged(settings(server, tmp_path, **changed))
        assert len(server.requests) == 2


async def test_a_change_of_weights_costs_nothing(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=[verdict(0.0, accuracy=1.0)]) as server:
        await judged(settings(server, tmp_path))
        assert (await judged(settings(server, tmp_path, weights="100,0.3,0.15,0.15"))).score > 0.99


async def test_a_cap_on_calls_holds_and_the_error_names_it(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=lambda _: verdict(0.5)) as server:
        judge = settings(server, tmp_path, max_calls=2)
        for n in range(2):
            await judged(judge, answer=str(n))
        with pytest.raises(JudgeAbstainedError, match=r"max_calls: 2 of 2 requests, .*judge\.sqlite; raise it"):
            await judged(judge, answer="3")
        assert (await judged(judge, answer="0")).score == pytest.approx(0.5)  # cached verdicts are free
        assert len(server.requests) == 2


async def test_a_cap_on_usd_is_never_exceeded(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=lambda _: verdict(0.5)) as server:
        judge = settings(server, tmp_path, max_usd=0.02, prices="1,2")
        answers = [judged(judge, answer=str(n)) for n in range(50)]
        ended = await asyncio.gather(*answers, return_exceptions=True)
        asked = len(server.requests)
    stopped = [str(each) for each in ended if isinstance(each, JudgeAbstainedError)]
    calls, usd = JudgeCache(judge.cache).spent()
    assert 0 < asked < 50
    assert calls == asked == 50 - len(stopped)
    assert 0 < usd <= 0.02
    assert all("max_usd" in message for message in stopped)


async def test_a_refused_request_costs_nothing(tmp_path: Path) -> None:
    async with ScriptedPolicyServer(replies=lambda _: Reply(status=400, text="no")) as server:
        judge = settings(server, tmp_path, max_usd=1.0, prices="1,1")
        with pytest.raises(JudgeAbstainedError):
            await judged(judge)
    assert JudgeCache(judge.cache).spent() == (1, 0.0)


async def test_an_unusable_cache_is_an_abstention_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "judge.sqlite").write_text("this is no database, and long enough to be seen as none" * 20)
    async with ScriptedPolicyServer(replies=lambda _: verdict(0.5)) as server:
        with pytest.raises(JudgeAbstainedError, match=r"judge\.sqlite cannot be used: .*; set another with cache=FILE"):
            await judged(settings(server, tmp_path))


_PROCESS = """
import sys
from groundwire.rewards.judge.cache import JudgeCache
from groundwire.rewards.judge.prompt import UnreadableError, parse_scores
from groundwire.rewards import JudgeAbstainedError
cache, taken = JudgeCache(sys.argv[1]), 0
for n in range(100):
    try:
        cache.reserve(0.001, max_calls=150, max_usd=None)
    except JudgeAbstainedError:
        break
    taken += 1
    cache.store(f"{n % 10}", model="m", reply="r")
print(taken)
"""


def test_many_processes_share_one_cache_and_one_cap(tmp_path: Path) -> None:
    path = str(tmp_path / "judge.sqlite")
    command = [sys.executable, "-c", _PROCESS, path]
    work = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert sum(int(process.communicate()[0]) for process in work) == 150
    assert JudgeCache(path).spent() == (150, pytest.approx(0.15))
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM verdicts").fetchone() == (10,)
    db.close()


# -- settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"modle": "x"}, r"unknown judge setting 'modle'; did you mean model\? docs/settings.md lists all settings"),
        ({"samples": "three"}, "judge samples is 'three'; it must be a whole number"),
        ({"swap": "perhaps"}, "judge swap_order is 'perhaps'; it must be true or false"),
        ({"samples": "3"}, "judge samples is 3 at temperature 0, where all are the same: set a temperature"),
        ({"base_url": "http://h/v1"}, "judge base_url is given without the judge's model"),
        ({"base_url": "h:1", "model": "m"}, "judge base_url is 'h:1'; it must be like http"),
        ({"base_url": "http://me:pw@h/v1", "model": "m"}, f"base_url has a key in it: put the key into {API_KEY}"),
        ({"base_url": "http://h/v1", "model": "m", "max_usd": "1"}, "judge max_usd needs the endpoint's prices"),
        ({"max_calls": "-1"}, "judge max_calls is '-1'; it must be at least 0"),
        ({"deadline_s": "0"}, "judge deadline_s is '0'; it must be above 0"),
        (
            {"weights": "0,0,0,0"},
            "judge weights is '0,0,0,0'; it must be like 0.4,0.3,0.15,0.15, one for each of accuracy",
        ),
        ({"weights": "1,2"}, "judge weights is '1,2'; it must be like"),
        ({"prices": "1"}, "judge prices is '1'; it must be like 0.25,2: USD per million tokens read and written"),
        ({"clarity": "1"}, "judge clarity is no setting any more: give all four as weights=0.4,0.3,0.15,0.15"),
        (
            {"retries": "1"},
            "judge retries is no setting any more: a request is sent up to four times within deadline_s",
        ),
    ],
)
def test_a_wrong_setting_is_a_one_line_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(JudgeSettingsError, match=message):
        JudgeSettings(**given)


def test_settings_on_the_command_line_are_names_and_values() -> None:
    assert parse_judge() == {}
    given = parse_judge(judge=["samples=3", "temperature=0.7", "swap=true"], judge_model="m")
    assert given == {"model": "m", "samples": 3, "temperature": 0.7, "swap_order": True}
    with pytest.raises(JudgeSettingsError, match="--judge 'samples' is not a setting: write it as NAME=VALUE"):
        parse_judge(judge=["samples"])
    with pytest.raises(JudgeSettingsError, match="judge model is given twice: 'm' and 'n'"):
        parse_judge(judge=["model=n"], judge_model="m")


def test_importing_rewards_imports_no_http_client() -> None:
    code = (
        "import sys; from groundwire import rewards; rewards.get('rule_judge_hybrid');"
        "print({'litellm', 'httpx'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.strip() == "set()"
