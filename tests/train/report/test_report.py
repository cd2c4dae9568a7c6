"""A report is one self-contained page for a run in any state, and never shows a model's text as markup."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import re
import shutil
import signal
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from programs import ROOT, Program, wait_for
from typer.testing import CliRunner

from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.evaluation.diagnosis import Reason
from groundwire.train.from_traces import app as traces_app
from groundwire.train.report.__main__ import app
from groundwire.train.report.build import (
    MAX_CHARACTERS,
    MAX_GROUP,
    MAX_QUESTIONS,
    MAX_STEPS,
    MAX_TOKENS,
    MAX_TURNS,
    Note,
    build,
    choose,
)
from groundwire.train.report.charts import Chart, Series, charts, draw_pngs, svg
from groundwire.train.report.live import served
from groundwire.train.report.token_text import token_decoder
from groundwire.train.store.rollout import Outcome, Rollout
from groundwire.train.why import app as why_app

REAL = json.loads((ROOT / "tests" / "data" / "rollouts.json").read_text())["langgraph"]
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def rollout(**changes: Any) -> dict[str, Any]:
    return {**REAL, **changes}


def credited(*weights: float | None, advantage: float) -> list[dict[str, Any]]:
    """The calls, trained with these weights, and not for None."""
    return [
        call if weight is None else {**call, "returns": 1.0, "advantage": advantage, "weight": weight}
        for call, weight in zip(REAL["calls"], weights, strict=True)
    ]


def validation(step: int, accuracy: float) -> dict[str, Any]:
    levels = {name: {"accuracy": value} for name, value in (("easy", accuracy), ("hard", 0.0))}
    return {"accuracy": accuracy, "ci95": [0.1, 0.9], "n": 2, "total": 2, "by_hardness": levels, "failures": {}}


def line(step: int, **more: Any) -> dict[str, Any]:
    seconds = {"update": 1.0, "sampling": 2.0, "sql": 0.0, "reward": 0.0, "agent": 0.5, "waiting": 0.0}
    return {
        "step": step,
        "reward": 0.25,
        "failures": {"timeout": step},
        "seconds": seconds,
        "wall_time_s": 9.0 * step,
        **more,
    }


def new_run(tmp_path: Path, **settings: Any) -> RunDir:
    config = resolve("fast", steps=2, credit="broadcast", **settings).to_dict()
    return RunDir.create(tmp_path, backend="langgraph", domain="spider", config=config)


@pytest.fixture
def finished(tmp_path: Path) -> RunDir:
    """A run of two steps, validated before and after, with a failure, and the tokenizer of the recorded rollouts."""
    run = new_run(tmp_path)
    (run.path / "model").mkdir()
    shutil.copy(ROOT / "tests" / "data" / "rollouts-tokenizer.json", run.path / "model" / "tokenizer.json")
    for step, score in ((0, 0.0), (2, 1.0)):
        asked = [{"task_id": f"t{n}", "task": json.dumps({"id": f"t{n}", "hardness": "easy"})} for n in range(2)]
        rows = [rollout(mode="val", temperature=0.0, step=step, reward=score, **task) for task in asked]
        run.write_rows(step, rows, kind="val-0")
    run.append_metrics({"step": 0, "validation": validation(0, 0.0), "wall_time_s": 1.0})
    for step in (1, 2):
        calls = credited(1.0, 1.0, 1.0, advantage=0.707)
        group = [
            rollout(mode="train", step=step, rollout_id=f"ro-{step}-{n}", reward=float(n), calls=calls)
            for n in range(2)
        ]
        failed = rollout(
            mode="train", step=step, rollout_id=f"ro-{step}-x", reward=None, status="timeout", message="late"
        )
        run.write_rows(step, [*group, failed])
        run.append_metrics(line(step, **({"validation": validation(2, 1.0)} if step == 2 else {})))
    return run


class _Page(HTMLParser):
    """Tags, their addresses, and the packed data."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.feed(html)
        packed = re.search(r'<script id="data" type="text/plain">(.*?)</script>', html)
        assert packed is not None
        self.data = json.loads(gzip.decompress(base64.b64decode(packed[1])))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href", "action", "data")]
        self.handlers += [name for name, _ in attributes if name.startswith("on")]


def read(run: RunDir) -> _Page:
    return _Page(build(run).html)


def test_a_page_is_one_file_that_loads_nothing(finished: RunDir) -> None:
    html = build(finished).html
    page = _Page(html)
    assert page.addresses == []
    assert not re.search(r"https?://(?!www\.w3\.org)|url\(|@import", html)
    assert "default-src 'none'" in html


def test_a_page_has_the_charts_and_the_rollouts_before_and_after_training(finished: RunDir) -> None:
    report = build(finished)
    assert [chart.key for chart in report.charts] == ["accuracy", "hardness", "length", "failures", "time"]
    data = _Page(report.html).data
    validated = [each for each in data["rollouts"] if each["mode"] == "val"]
    assert {(each["task"], each["step"], each["reward"]) for each in validated} == {
        ("t0", 0, 0.0), ("t0", 2, 1.0), ("t1", 0, 0.0), ("t1", 2, 1.0),
    }  # fmt: skip
    assert "0.000 → 1.000" in report.html
    assert re.search(r"accuracy, of \d+ \[.*\]; \+100\.0 points \[", report.html)
    assert "not finished in time" in report.html


def test_a_page_has_the_health_figures_and_the_warnings_of_the_run(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for step in range(1, 5):
        figures = {"gradient_share": 0.5, "clip_fraction": 0.01, "truncated_share": 0.4, "entropy": 0.3, "kl": 0.001}
        run.append_metrics(line(step, **figures, grad_norm=1.5, tokens_generated=4000, tokens_trained=1500))
    report = build(run)
    health = {chart.key: [series.name for series in chart.series] for chart in report.charts}
    assert health["shares"] == ["groups with a gradient", "clipped tokens", "replies cut at max_tokens"]
    assert health["tokens"] == ["sampled tokens", "trained tokens"]
    assert all("Good" in chart.reading or "Bad" in chart.reading for chart in report.charts)
    assert all(chart.reading in unescape(report.html) for chart in report.charts)
    assert health.keys() >= {"entropy", "divergence", "gradient"}
    assert report.html.count("step 3: 40% of the replies in the last 3 steps ended at max_tokens") == 1


def test_a_rollout_has_its_turns_its_reward_and_why(finished: RunDir) -> None:
    rollouts = {each["id"]: each for each in read(finished).data["rollouts"]}
    right = rollouts["ro-1-1"]
    assert [turn["agent"] for turn in right["turns"]] == [step["agent"] for step in json.loads(REAL["agent_steps"])]
    assert "mean of its group 0.5" in right["why"]
    assert right["credit"][0].endswith(": return 1, advantage 0.707, weight 1")
    assert "late" in rollouts["ro-1-x"]["why"]


def test_the_loss_mask_is_on_the_sampled_tokens_only(finished: RunDir) -> None:
    data = read(finished).data
    right = next(each for each in data["rollouts"] if each["id"] == "ro-1-1")
    shown = [
        [(sampled, "".join(data["words"][place][1] for place in part)) for sampled, part in runs]
        for runs in right["tokens"]
    ]
    ids = [
        [(sampled, [data["words"][place][0] for place in part]) for sampled, part in runs] for runs in right["tokens"]
    ]
    assert ids == [[(0, call["prompt_ids"]), (1, call["response_ids"])] for call in REAL["calls"]]
    assert shown[1][1][1].startswith(("CORRECT", "INCORRECT"))


def test_a_rollout_names_its_input_and_the_field_that_was_judged(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.write_rows(1, [rollout(input="ask(question='?')", judged_field="generation")])
    [shown] = read(run).data["rollouts"]
    assert (shown["input"], shown["judged_field"]) == ("ask(question='?')", "generation")


def test_tokens_that_were_not_trained_carry_no_loss(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    calls = credited(1.0, 0.0, None, advantage=0.5)
    rows = [rollout(mode="train", rollout_id=name, reward=1.0, group="g", calls=calls) for name in ("a", "b")]
    run.write_rows(1, rows)
    shown = read(run).data["rollouts"][0]["tokens"]
    assert [[sampled for sampled, _ in runs] for runs in shown] == [[0, 1], [0], [0]]


def test_tokens_of_agents_that_are_not_trained_carry_no_loss(tmp_path: Path) -> None:
    run = new_run(tmp_path, agent_match="write")
    run.write_rows(1, [rollout(mode="train", step=1)])
    [shown] = read(run).data["rollouts"]
    assert len(shown["tokens"]) == len([call for call in REAL["calls"] if "write" in call["agent"]])


def test_text_of_a_model_or_a_data_set_never_becomes_markup(tmp_path: Path) -> None:
    step = {"agent": EVIL, "kind": "llm", "input": EVIL, "output": EVIL, "ok": True}
    evil = rollout(
        mode="train",
        step=1,
        rollout_id=EVIL,
        task_id=EVIL,
        status=EVIL,
        message=EVIL,
        answer=EVIL,
        reward=None,
        agent_steps=json.dumps([step]),
        task=json.dumps({"id": EVIL, "question": EVIL, "query": EVIL, "hardness": EVIL, "db_id": EVIL}),
    )
    run = new_run(tmp_path, model=EVIL)
    run.write_rows(1, [evil])
    run.append_metrics(
        line(1, failures={EVIL: 3}, validation={**validation(1, 0.5), "by_hardness": {EVIL: {"accuracy": 0.5}}})
    )
    html = build(run).html
    page, plain = _Page(html), read(new_run(tmp_path / "plain"))
    assert page.tags.count("script") == plain.tags.count("script") == 2
    assert "img" not in page.tags
    assert page.handlers == []
    assert "onerror=alert" not in re.sub(r"&lt;img src=x onerror=alert", "", html)
    assert page.data["rollouts"][0]["answer"] == EVIL


def test_the_script_writes_text_only() -> None:
    script = (ROOT / "train" / "report" / "page.js").read_text()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "srcdoc", "DOMParser"):
        assert way not in script


def test_a_run_without_steps_has_a_page(tmp_path: Path) -> None:
    html = build(new_run(tmp_path)).html
    assert "No step has ended yet" in html
    assert _Page(html).data["rollouts"] == []


def test_an_active_or_killed_run_has_a_page_of_its_results_so_far(finished: RunDir) -> None:
    (finished.path / "rollouts" / "step-00002-train.parquet").write_bytes(b"half a file")
    with open(finished.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rew')
    html = build(finished).html
    assert "step-00002-train.parquet cannot be read" in html
    assert {each["step"] for each in _Page(html).data["rollouts"] if each["mode"] == "train"} == {1}


def test_a_run_without_validation_has_a_page(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.write_rows(1, [rollout(mode="train", step=1)])
    run.append_metrics(line(1))
    report = build(run)
    assert [chart.key for chart in report.charts] == ["accuracy", "length", "failures", "time"]
    assert "step 1 of 2" in report.html


def test_an_incomplete_tokenizer_file_is_skipped(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    with run.checkpoints.write(1) as folder:
        (folder / "tokenizer.json").write_text('{"version": ')
    assert token_decoder(run)  # the starter's


def test_a_run_without_a_tokenizer_shows_ids(tmp_path: Path) -> None:
    run = new_run(tmp_path, model="somebody/elses")
    run.write_rows(1, [rollout(mode="train", step=1)])
    number, text = read(run).data["words"][0]
    assert text == f"#{number}"


def test_reward_components_have_a_chart(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    run.append_metrics(line(1, reward_components={"executes": 0.1, "match": 1.0}))
    chart = next(chart for chart in build(run).charts if chart.key == "reward_components")
    assert [(series.name, list(series.points)) for series in chart.series] == [
        ("executes", [(1, 0.1)]),
        ("match", [(1, 1.0)]),
    ]


def test_traces_have_a_page_of_the_same_form_with_their_text_as_data(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": f"Is it {EVIL}?"}, {"role": "assistant", "content": EVIL}]
    doubted = [*asked, {"role": "user", "content": "No, that is wrong."}, {"role": "assistant", "content": "Sorry."}]
    chats = [{"messages": messages, "created": 1_760_000_000} for messages in (asked, asked, doubted)]
    file, written = tmp_path / "chats.jsonl", tmp_path / "page.html"
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    result = CliRunner().invoke(traces_app, [str(file), "--report", str(written)])
    assert result.exit_code == 0, result.output
    html = written.read_text()
    page, text = _Page(html), unescape(html)
    assert page.tags.count("script") == 2
    assert (page.addresses, page.handlers) == ([], [])
    assert "img" not in page.tags
    assert all(line in text for line in result.output.splitlines()[:-1])
    assert {each["answer"] for each in page.data["rollouts"]} == {EVIL, "Sorry."}
    assert len(page.data["tasks"]) == 1
    assert [each["why"] for each in page.data["rollouts"]] == ["", "", "the user corrects an answer"]


def test_a_page_of_many_traces_shows_some_and_says_so(tmp_path: Path) -> None:
    lines = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "a"}]} for n in range(230)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert CliRunner().invoke(traces_app, [str(tmp_path), "--report", str(tmp_path / "page.html")]).exit_code == 0
    html = (tmp_path / "page.html").read_text()
    assert "200 of 230 rollouts" in html
    assert len(_Page(html).data["rollouts"]) == 200


# -- what bounds it


def note(step: int, number: int, *, mode: str, reward: float) -> Note:
    task = {"id": str(number) if mode == "val" else "t"}
    outcome, sampling = Outcome(reward=reward), {"temperature": float(mode == "train")}
    made = Rollout(task=task, group="g", mode=mode, step=step, sampling=sampling, outcome=outcome)  # type: ignore[arg-type]
    return Note((step, number), made, Reason("trained", ""))


def test_the_number_of_shown_rollouts_is_limited() -> None:
    made = [note(step, number, mode="train", reward=float(number == 0)) for step in range(500) for number in range(20)]
    chosen = choose(made)
    assert len(chosen) == MAX_STEPS * MAX_GROUP
    assert {chosen[0].rollout.step, chosen[-1].rollout.step} == {0, 499}


def test_validation_questions_with_a_changed_reward_come_first() -> None:
    made = []
    for step in (0, 9):
        for number in range(1000):
            made.append(note(step, number, mode="val", reward=float(number >= 990 and step == 9)))
    chosen = choose(made)
    assert len(chosen) == 2 * MAX_QUESTIONS
    assert {str(number) for number in range(990, 1000)} <= {shown.task for shown in chosen}


def test_long_texts_and_prompts_are_cut_in_the_middle_with_a_note(tmp_path: Path) -> None:
    call = {**REAL["calls"][0], "prompt_ids": [5] * 9000}
    steps = [{"agent": "a", "kind": "tool", "input": "x" * 50_000, "output": "", "ok": True}] * 100
    run = new_run(tmp_path)
    run.write_rows(1, [rollout(mode="train", step=1, calls=[call], agent_steps=json.dumps(steps))])
    [shown] = read(run).data["rollouts"]
    assert len(shown["turns"]) == MAX_TURNS
    assert len(shown["turns"][0]["input"]) < MAX_CHARACTERS + 60
    assert "46,000 characters" in shown["turns"][0]["input"]
    _, left_out, _, (sampled, tokens) = shown["tokens"][0]
    assert left_out == [-1, [9000 + len(call["response_ids"]) - MAX_TOKENS]]
    assert (sampled, len(tokens)) == (1, len(call["response_ids"]))


# -- charts


@pytest.mark.parametrize("points", [[(0, 0.0)], [(5, 1e9), (6, -1.0)], [(n, n % 3) for n in range(500)]])
@pytest.mark.parametrize("stacked", [False, True])
def test_a_chart_stays_within_its_frame(points: list[tuple[float, float]], stacked: bool) -> None:
    drawing = svg(Chart(key="k", title="t", unit="u", stacked=stacked, series=[Series(name="s", points=points)]))
    [width, height] = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing)[0]
    for x, y in re.findall(r'(?:use|text)[^>]* x="([-\d.]+)" y="([-\d.]+)"', drawing):
        assert 0 <= float(x) <= float(width)
        assert 0 <= float(y) <= float(height)
    assert "nan" not in drawing


@pytest.mark.parametrize("value", [1e-5, 0.123456, 12_345.0, 1_234_567.0, 5e12])
def test_the_numbers_of_the_axes_are_short_and_one_step_has_one_tick(value: float) -> None:
    drawing = svg(Chart(key="k", title="t", unit="u", series=[Series(name="s", points=[(7, value)])]))
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawing)
    assert texts[0] == "7"  # no step between two
    assert all(len(text) <= 7 for text in texts[1:])
    assert len(set(texts[1:])) == len(texts[1:]) > 1


def test_each_point_has_a_tooltip_whose_text_is_escaped() -> None:
    series = [Series(name=EVIL, points=[(1, 0.5), (2, 0.75)])]
    for stacked in (False, True):
        drawing = svg(Chart(key="k", title=EVIL, unit="u", stacked=stacked, series=series))
        assert "<img" not in drawing
        assert [text[:13] for text in re.findall(r"<title>(.*?)</title>", drawing)] == [
            "step 1: 0.5, ",
            "step 2: 0.75,",
        ]


def test_a_drawing_takes_its_colours_from_the_page_and_embeds_no_font() -> None:
    drawing = svg(Chart(key="k", title="t", unit="u", series=[Series(name="s", points=[(1, 0.5), (2, 1.0)])]))
    assert "var(--c0)" in drawing
    assert "font" not in drawing
    assert not re.search("#(?!m[0-9a-f]{10})", drawing)


def test_a_breakdown_of_rewards_above_1_has_no_fixed_axis() -> None:
    parts = {"easy": {"accuracy": 1.08}, "hard": {"accuracy": 0.4}}
    [chart] = charts([{"step": 0, "validation": {"by_hardness": parts}}], {})
    assert chart.top is None


@pytest.mark.parametrize(("column", "file"), [("level", "level"), ("time", "by_time"), ("a/b", "a_b")])
def test_a_column_of_any_name_has_a_file_of_its_own(column: str, file: str, tmp_path: Path) -> None:
    metrics = [{"step": 1, "seconds": {"sql": 1.0}, "validation": {f"by_{column}": {"$x": {"accuracy": 0.5}}}}]
    assert [png.name for png in draw_pngs(charts(metrics, {}), tmp_path)] == [f"{file}.png", "time.png"]


def test_charts_without_data_are_left_out() -> None:
    assert charts([{"step": 0}, {"step": 1, "reward": None}], {}) == []


# -- the command and the live page


def test_the_command_writes_a_page_and_pngs(finished: RunDir, tmp_path: Path) -> None:
    page = tmp_path / "somewhere" / "page.html"
    done = CliRunner().invoke(app, [str(finished.path), "--output", str(page)])
    assert done.exit_code == 0, done.output
    assert page.read_text().startswith("<!doctype html>")
    pngs = list(page.with_suffix("").glob("*.png"))
    assert len(pngs) == 5
    assert all(png.read_bytes().startswith(b"\x89PNG") for png in pngs)


def test_the_command_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [str(tmp_path)])
    assert (done.exit_code, "is not a run" in done.stderr) == (2, True)


@pytest.fixture
def address(finished: RunDir) -> Iterator[str]:
    with served(finished) as url:
        yield url.removesuffix("/")


def get(address: str, **headers: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers)) as reply:
        return reply.read().decode()


def test_a_run_that_is_damaged_while_watched_shows_the_error(finished: RunDir, tmp_path: Path) -> None:
    run = RunDir.open(shutil.copytree(finished.path, tmp_path / "run"))
    (run.path / "config.json").write_text("{")
    with served(run) as url:
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(url)
        assert "config.json is damaged" in refused.value.read().decode()
    for module in (app, why_app):
        done = CliRunner().invoke(module, [str(run.path)])
        assert done.exit_code == 1
        assert "config.json is damaged" in done.stderr


def test_a_live_page_closes_connections_that_send_nothing(finished: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groundwire.tools.http.server._FIRST_REQUEST_S", 0.1)
    with served(finished) as url:
        for data in (b"", b"GET / HTTP/1.1\r\nHost:"):
            with socket.create_connection(("127.0.0.1", urlsplit(url).port), timeout=600) as client:
                client.sendall(data)
                assert client.recv(100) == b""


def test_clients_that_connect_at_once_all_get_through(address: str) -> None:
    with contextlib.ExitStack() as clients:
        for _ in range(100):
            clients.enter_context(socket.create_connection(("127.0.0.1", urlsplit(address).port), timeout=600))
        assert get(f"{address}/state")


def test_a_live_page_ends_on_sigterm(finished: RunDir) -> None:
    program = Program("-m", "groundwire.train.report", str(finished.path), "--watch")
    wait_for(lambda: "http://" in program.stdout_so_far() or program.poll() is not None)
    program.send_signal(signal.SIGTERM)
    assert program.wait(600).returncode == 0


def test_a_client_that_leaves_a_live_page_is_not_reported(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as client:
            client.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 3)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no end
    assert get(f"{address}/state")
    assert capfd.readouterr().err == ""


def test_a_live_page_changes_its_state_when_the_run_has_new_results(address: str, finished: RunDir) -> None:
    state = get(f"{address}/state")
    assert repr(state) in get(f"{address}/")
    assert get(f"{address}/state") == state
    finished.append_metrics(line(3))
    assert get(f"{address}/state") != state
    assert repr(get(f"{address}/state")) in get(f"{address}/")


def test_a_live_page_is_for_this_machine_only(address: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="403"):
        get(address, Host="evil.example:80")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{address}/../config.json")
