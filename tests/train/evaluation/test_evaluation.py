"""The metrics, files and table of an evaluation; endpoints are evaluated, and two runs are compared."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import bandits
import pytest
from jobs import job_of
from programs import ROOT
from programs import run as run_program
from typer.testing import CliRunner

from groundwire import domains
from groundwire.domains.text_to_sql.predictions import NO_ANSWER, gold_lines, one_line, prediction_lines
from groundwire.train.algorithms.statistics import bounded_interval, mcnemar
from groundwire.train.api.evaluation import evaluation_settings
from groundwire.train.artifacts.run_dir import RunDir, RunDirError
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.resolve import resolve
from groundwire.train.config.run_config import RunConfig
from groundwire.train.evaluate import app, comparison, details, speed_table, table
from groundwire.train.evaluation import ProgressCallback
from groundwire.train.evaluation.evaluator import runtime_of
from groundwire.train.evaluation.metrics import compare, compute_metrics, scores_by_question
from groundwire.train.evaluation.probe_endpoint import probe_endpoint
from groundwire.train.evaluation.run_reader import read_speed
from groundwire.train.job.prepare import prepare
from groundwire.train.job.trained_model import trained_model, with_settings_of_run
from groundwire.train.policy import STARTER, engine
from groundwire.train.policy.decoding.decoder import make_decoder
from groundwire.train.policy.model import bf16_is_faster, load_initial_state
from groundwire.train.step_timer import StepTimer
from groundwire.train.store.rollout import Rollout
from groundwire.train.store.rows import from_row, to_row

BREAKDOWNS = domains.get("spider").breakdowns
REAL = json.loads((ROOT / "tests" / "data" / "rollouts.json").read_text())["langgraph"]


def rollout(task: str, reward: float | None = 1.0, **changes: Any) -> Rollout:
    """A real rollout of validation with other facts."""
    hardness = changes.pop("hardness", "easy")
    about = json.dumps({"id": task, "question": "?", "hardness": hardness})
    made = {**REAL, "mode": "val", "temperature": 0.0, "step": 0, "task_id": task, "task": about, "reward": reward}
    return from_row({**made, **changes})


def compared(first: Sequence[Rollout], second: Sequence[Rollout]) -> dict[str, Any]:
    return compare(scores_by_question(first), scores_by_question(second))


# -- statistics


def test_samples_of_one_question_are_not_independent() -> None:
    several = bounded_interval([[1.0] * 16] * 12 + [[0.0] * 16] * 8, (0.0, 1.0))
    assert several == bounded_interval([[1.0]] * 12 + [[0.0]] * 8, (0.0, 1.0))


def test_figures_of_few_questions_say_so(tmp_path: Path, tiny_policy: Any) -> None:
    rows = [rollout(str(number), float(number % 2)) for number in range(20)]
    assert "questions are few" not in details(compute_metrics(rows))
    assert "19 questions are few: only large differences stand out" in details(compute_metrics(rows[1:]))
    assert "19 questions are few" in comparison(compared(rows[1:], rows), ["a", "b"], "text")

    class Notes(ProgressCallback):
        def on_note(self, text: str) -> None:
            notes.append(text)

    for count in (3, 20):
        notes: list[str] = []

        async def agent(choose: bandits.Choose) -> str:
            return await choose("which?", "01")

        bandits.train(tmp_path / str(count), tiny_policy, agent, float, Notes(), val_tasks=count)
        assert sum("questions are few" in note for note in notes) == (count == 3)


def test_mcnemars_exact_test_is_a_binomial_test() -> None:
    # 2 * P(X <= 1) and 2 * P(X <= 2) for X of 10 fair coins.
    assert mcnemar(9, 1) == pytest.approx(2 * 11 / 1024)
    assert mcnemar(2, 8) == pytest.approx(2 * 56 / 1024)
    assert mcnemar(8, 2) == mcnemar(2, 8)
    assert mcnemar(0, 0) == mcnemar(5, 5) == 1.0


# -- figures


def test_accuracy_is_reported_overall_and_by_hardness() -> None:
    figures = compute_metrics(
        [rollout("a", 1.0), rollout("b", 0.0, hardness="hard"), rollout("c", 1.0, hardness="hard")], BREAKDOWNS
    )
    assert (figures["accuracy"], figures["questions"]) == (pytest.approx(2 / 3, abs=1e-4), 3)
    assert figures["by_hardness"]["hard"]["accuracy"] == 0.5
    assert figures["by_hardness"]["easy"]["n"] == 1


def test_with_several_samples_the_share_of_mixed_groups_is_reported() -> None:
    rewards = {"a": (1.0, 0.0, 0.0), "b": (0.0, 0.0), "c": (0.3, 0.7), "d": (1.0, 1.0), "once": (1.0,)}
    figures = compute_metrics([rollout(task, reward) for task, each in rewards.items() for reward in each])
    assert (figures["mixed_groups"], figures["best_of_n"]) == (0.5, pytest.approx((1 + 0 + 0.7 + 1) / 4))
    assert "unequal rewards on 0.500 of the questions" in details(figures)
    assert "mixed_groups" not in compute_metrics([rollout("a"), rollout("b")])


def test_an_infrastructure_failure_is_counted_without_changing_the_accuracy() -> None:
    figures = compute_metrics(
        [rollout("a", 1.0), rollout("b", None, status="endpoint"), rollout("c", 0.0, status="agent")]
    )
    assert (figures["accuracy"], figures["n"], figures["total"]) == (0.5, 2, 3)
    assert figures["failures"] == {"endpoint": 1, "agent": 1}
    assert "timed out" not in details(figures)
    assert "run fewer at once" in details(compute_metrics([rollout("a", 1.0), rollout("b", None, status="timeout")]))


def test_the_first_message_of_each_type_of_failure_is_shown() -> None:
    failed = [rollout(name, None, status="endpoint", message=f"answered 500:\n{name}") for name in ("b", "c")]
    text = details(compute_metrics([rollout("a", 1.0), *failed, rollout("d", None, status="timeout")]))
    assert "failures: 2 endpoint, 1 timeout of 4 rollouts\nthe first endpoint: answered 500: b" in text
    assert "answered 500: c" not in text


def test_accuracy_by_turn_judges_each_query_as_the_answer() -> None:
    rows = [
        rollout("a", 0.0, turn_scores="[1.0, 0.0]"),
        rollout("b", 1.0, turn_scores="[1.0]"),
        rollout("c", 1.0, turn_scores="[0.0, 0.0, 1.0]"),
    ]
    assert compute_metrics(rows)["by_turn"] == pytest.approx([2 / 3, 1 / 3, 2 / 3], abs=1e-4)


def test_calls_are_a_mean_over_rollouts_and_tokens_over_calls() -> None:
    figures = compute_metrics([rollout("a"), rollout("b", calls=REAL["calls"][:1])])
    lengths = [len(call["prompt_ids"]) for call in [*REAL["calls"], REAL["calls"][0]]]
    assert figures["calls_per_rollout"] == 2
    assert figures["prompt_tokens"] == pytest.approx(sum(lengths) / 4, abs=0.1)
    assert figures["token_count_source"] == "ids"


def test_without_token_ids_the_endpoints_token_counts_are_used_and_the_output_says_so() -> None:
    calls = [{"agent": "", "prompt_tokens": 100, "response_tokens": 10}, {"agent": "", "status": 500, "error": "boom"}]
    figures = compute_metrics([rollout("a", calls=calls)])
    assert (figures["calls_per_rollout"], figures["prompt_tokens"], figures["response_tokens"]) == (1, 100, 10)
    assert figures["token_count_source"] == "usage"
    assert "no token ids: lengths are its own counts" in details(figures)


def test_runs_are_compared_question_by_question_over_those_that_both_judged() -> None:
    first = [rollout("a", 0.0), rollout("b", 1.0), rollout("c", 0.0), rollout("only", 1.0)]
    second = [rollout("a", 1.0), rollout("b", 1.0), rollout("c", 1.0), rollout("lost", None, status="timeout")]
    result = compared(first, second)
    assert (result["won"], result["lost"], result["questions"]) == (["a", "c"], [], 3)
    assert (result["only_first"], result["only_second"]) == (1, 0)
    assert result["difference"] == pytest.approx(2 / 3, abs=1e-4)
    assert result["p"] == 0.5
    assert "B won 2 and lost 0, equal on 1" in comparison(result, ["x", "y"], "text")


def test_with_several_samples_a_question_is_won_by_its_mean() -> None:
    first = [rollout("a", 1.0), rollout("a", 0.0), rollout("b", 1.0), rollout("b", 0.0)]
    second = [rollout("a", 1.0), rollout("a", 1.0), rollout("b", 0.0), rollout("b", 1.0)]
    assert compared(first, second)["won"] == ["a"]


def test_levels_of_hardness_are_in_order() -> None:
    rows = [rollout(level, hardness=level) for level in ("extra", "hard", "easy", "medium", "another")]
    assert list(compute_metrics(rows, BREAKDOWNS)["by_hardness"]) == ["easy", "medium", "hard", "extra", "another"]


# -- the official evaluator's files


@pytest.mark.parametrize(
    ("sql", "line"),
    [
        ("SELECT a\n  FROM b;\n", "SELECT a FROM b"),
        ("SELECT a -- all\nFROM b", "SELECT a FROM b"),
        ("SELECT /* x\n */ a", "SELECT a"),
        ("SELECT '--  no; comment'", "SELECT '--  no; comment'"),
        ("SELECT 'it''s\tone' ;", "SELECT 'it''s one'"),
        ("  ", ""),
    ],
)
def test_a_query_is_one_line(sql: str, line: str) -> None:
    assert one_line(sql) == line


def test_a_question_without_an_answer_keeps_its_line() -> None:
    tasks = [{"id": name, "query": "SELECT 1", "db_id": "db"} for name in "abc"]
    assert prediction_lines(tasks, {"c": "SELECT\n2", "a": "SELECT 1"}) == ["SELECT 1", NO_ANSWER, "SELECT 2"]
    assert gold_lines(tasks) == ["SELECT 1\tdb"] * 3


# -- the table


def test_the_table_shows_both_ends_of_a_training_run() -> None:
    before, after = compute_metrics([rollout("a", 0.0)]), compute_metrics([rollout("a", 1.0, calls=REAL["calls"][:1])])
    entry = {"model": "a|b", "context": 2048, "max_turns": 3, "agents": "write", "before": before, "after": after}
    markdown = table([entry], "markdown").splitlines()
    assert markdown[0].startswith("| Model | Context | Max turns | Agents | Accuracy first | Accuracy last |")
    assert markdown[2].startswith("| a\\|b | 2048 | 3 | write | 0.0 | 100.0 | 3 → 1 |")
    assert json.loads(table([entry], "json"))[0]["after"]["accuracy"] == 1.0
    assert table([{**entry, "before": None}], "text").splitlines()[1].split()[4] == "-"


def test_the_speed_of_a_run_with_verl_is_verls_own(tmp_path: Path) -> None:
    """The figures of the published run, for one GPU."""
    config = {**resolve("fast", trainer="verl").to_dict(), "steps": 2}
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=config)
    logged = {"timing_s/step": 98.9, "timing_s/gen": 65.966, "timing_s/update_actor": 24.923}
    machine = {"device": "NVIDIA H100 80GB HBM3", "gpus": 1, "training_gpus": 1, "cores": 16}
    for step in (1, 2):
        line = {"step": step, "seconds": {"update": 0.0}, "wall_time_s": 99.0 * step, "verl": logged}
        run.append_metrics({**line, "machine": machine})
    assert speed_table([{"run": "it", "speed": read_speed(run)}], "markdown").splitlines()[2] == (
        "| it | 1 | 2 | 0.06 | 98.9 | 66.7 % | 25.2 % |"
    )


@pytest.mark.parametrize(("precision", "bf16"), [("fp32", False), ("bf16", True), ("auto", None)])
def test_an_evaluation_computes_with_the_precision_of_the_run(
    precision: str, bf16: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve("fast", precision=precision)
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=config.model_dump(mode="json"))
    types = []

    def noting(model: Any, **options: Any) -> Any:
        types.append(options["bf16"])
        return make_decoder(model, **options)

    monkeypatch.setattr(engine, "make_decoder", noting)
    runtime_of(job_of(config, domains.get("spider")), run=run, timer=StepTimer())
    assert types == [bf16_is_faster(load_initial_state(config, run).model) if bf16 is None else bf16]


# -- the command


def _evaluate(*arguments: str, **environment: str) -> Any:
    kept = {k: v for k, v in os.environ.items() if k not in ("SPIDER_DATA_DIR", "OPENAI_API_KEY")}
    return run_program("-m", "train.evaluate", *arguments, environment={**kept, "COLUMNS": "200", **environment})


@pytest.fixture(scope="module")
def evaluated(shared_folder: Callable[..., Path]) -> tuple[Path, str]:
    """The starter on five questions, twice each, and what was printed."""

    def fill(folder: Path) -> None:
        done = _evaluate("--val-tasks", "5", "-n", "2", "--temperature", "0.7", "--output-dir", str(folder))
        assert done.returncode == 0, done.stderr
        (folder / "printed.txt").write_text(done.stdout)

    folder = shared_folder("evaluations", fill)
    return folder / "latest", (folder / "printed.txt").read_text()


def test_an_evaluation_writes_a_run_folder(evaluated: tuple[Path, str]) -> None:
    folder, printed = evaluated
    run = RunDir.open(folder)
    rollouts, damaged = run.rollouts()
    assert (len(rollouts), damaged) == (10, [])
    assert [line["step"] for line in run.metrics()] == [0]
    figures = json.loads((folder / "evaluation.json").read_text())
    assert (figures["questions"], figures["n"], figures["samples"]) == (5, 10, 2)
    assert figures["token_count_source"] == "ids"
    assert len(figures["by_turn"]) in (1, 2)
    assert "5 questions, 2 samples each" in printed
    assert (folder / "table.md").read_text().startswith("| Model |")


def test_an_evaluations_predictions_are_in_the_order_of_the_questions(evaluated: tuple[Path, str]) -> None:
    folder, _ = evaluated
    rollouts, _ = RunDir.open(folder).rollouts()
    for name, sample in (("predictions.sql", rollouts[:5]), ("predictions-2.sql", rollouts[5:])):
        lines = (folder / name).read_text().splitlines()
        assert lines == [one_line(rollout.outcome.answer) or NO_ANSWER for rollout in sample]
    golds = [rollout.task for rollout in rollouts[:5]]
    assert (folder / "gold.sql").read_text().splitlines() == [f"{task['query']}\t{task['db_id']}" for task in golds]


def test_runs_are_tabled_and_compared_from_their_folders(evaluated: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = evaluated
    rollouts, _ = RunDir.open(folder).rollouts()
    config = resolve("fast", agent_match="write").to_dict()
    trained = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=config)
    for step, score in ((0, 0.0), (3, 1.0)):
        changed = {"step": step, "temperature": 0.0, "reward": score, "turn_scores": "[]"}
        one = [{**to_row(rollout), **changed} for rollout in rollouts[:5]]
        trained.write_rows(step, one, kind="val-0")
    seconds = {"update": 1.0, "sampling": 2.0, "agent": 0.5, "waiting": 0.5}
    for step in (1, 2, 3):
        machine = {"device": "CPU", "gpus": 0, "training_gpus": 0, "cores": 2}
        trained.append_metrics({"step": step, "seconds": seconds, "wall_time_s": 60.0 * step, "machine": machine})
    tabled = CliRunner().invoke(app, [str(folder), str(trained.path), "--format", "json"])
    first, second = json.loads(tabled.stdout)
    assert first["before"] is None
    assert (second["before"]["accuracy"], second["after"]["accuracy"]) == (0.0, 1.0)
    paired = {"baseline": "answer", "difference": 1.0, "difference_ci95": [0.3855, 1.0], "paired_questions": 5}
    assert second["change"] == paired
    assert first["context"] == second["context"] == "4000 / 72"
    calls = [sum(call.agent != "check_query" for call in rollout.calls) for rollout in rollouts[:5]]
    assert second["after"]["calls_per_rollout"] == sum(calls) / 5 < first["after"]["calls_per_rollout"]
    assert first["speed"] is None
    assert second["speed"] == {
        "gpus": 0,
        "steps": 3,
        "hours": 0.05,
        "seconds_per_step": 4.0,
        "rollout_share": 0.75,
        "update_share": 0.25,
        "device": "CPU",
        "cores": 2,
        "no_mfu": "no MFU: train/algorithms/speed.py has no peak of CPU",
    }
    text = CliRunner().invoke(app, [str(folder), str(trained.path)]).stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "Run GPUs Steps Hours Seconds per step Rollout Update" in lines
    assert f"{trained.path.name} 0 3 0.05 4.0 75.0 % 25.0 %" in lines
    assert f"{trained.path.name}: +100.0 points [+38.6, +100.0] on 5 questions, after - before (95 %)" in text
    compared = CliRunner().invoke(app, ["--compare", str(folder), str(trained.path)])
    assert "McNemar's exact test" in compared.stdout


def test_a_user_error_is_one_line(tmp_path: Path) -> None:
    for arguments, message in (
        (["--model", "no/such/model"], "no model in no/such/model"),
        (["no/such/run"], "no/such/run is not a run"),
        (["--base-url", "http://127.0.0.1:9/v1", "--model", "m"], "does not answer as an OpenAI endpoint"),
        (["--backend", "langgraf"], "unknown backend 'langgraf'"),
    ):
        done = CliRunner().invoke(app, [*arguments, "--output-dir", str(tmp_path)])
        assert done.exit_code == 2
        assert message in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_agent_lightnings_variable_for_trainers_is_not_for_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_MANAGED_STORE", "0")
    assert prepare(RunConfig()).data.validation


def test_an_evaluation_that_cannot_start_leaves_no_folder(tmp_path: Path) -> None:
    shutil.copy(STARTER / "config.json", tmp_path)
    (tmp_path / "file").write_text("")
    for arguments, output, status, message in (
        (["--device", "tpu"], "out", 2, "device is 'tpu'"),
        (["--model", str(tmp_path)], "out", 2, f"the model in {tmp_path} cannot be loaded"),
        ([], "file", 2, "Not a directory"),
    ):
        done = _evaluate("--val-tasks", "1", *arguments, "--output-dir", str(tmp_path / output))
        *before, last = done.stderr.strip().splitlines()
        assert (done.returncode, message in last) == (status, True)
        assert all(line.startswith(("data: ", "the agent sees: ", "run: ")) or not line for line in before)
        assert not list(tmp_path.glob("out/*"))


def test_a_model_is_stored_by_its_resolved_path(tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(STARTER)
    out = tmp_path / "out"
    done = _evaluate("--val-tasks", "1", "--model", str(tmp_path / "latest"), "--output-dir", str(out))
    assert done.returncode == 0, done.stderr
    assert RunDir.open(out / "latest").config()["model"] == str(STARTER)


def _trained(folder: Path, **settings: Any) -> RunDir:
    """The directory of a run with two checkpoints, of which the newest has the starter's weights."""
    config = resolve("fast", **settings)
    run = RunDir.create(folder, backend=config.backend, domain=config.domain, config=config.to_dict())
    (run.path / "checkpoints" / "step-00002").mkdir(parents=True)
    shutil.copytree(STARTER, run.path / "checkpoints" / "step-00010")
    return run


def test_a_runs_model_is_evaluated_with_the_settings_of_its_run(tmp_path: Path) -> None:
    run = _trained(
        tmp_path / "runs", backend="openai-agents", agent_options={"max_turns": 3}, max_tokens=9, seed=5, val_tasks=1
    )
    newest = run.path / "checkpoints" / "step-00010"
    (tmp_path / "latest").symlink_to(run.path)
    for model in (tmp_path / "latest", newest):
        config = evaluation_settings({"model": str(model), "seed": 6})
        assert config.model == str(newest)
        assert (config.backend, config.agent_options["max_turns"], config.max_tokens, config.seed) == (
            "openai-agents",
            3,
            9,
            6,
        )
        assert config.val_tasks == 0
    done = _evaluate("--model", str(tmp_path / "latest"), "val_tasks=1", "--output-dir", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert RunDir.open(tmp_path / "out" / "latest").config()["backend"] == "openai-agents"


def test_settings_that_belong_to_a_runs_backend_or_domain_go_with_it(tmp_path: Path) -> None:
    folder = str(tmp_path)
    own = {"agent": "mine:answer", "data_dir": folder, "reward": "rule_judge_hybrid", "judge": {"model": "m"}}
    run = _trained(tmp_path / "runs", backend="custom", **own)
    given = with_settings_of_run({"model": str(run.path)})
    assert (given["agent"], given["data_dir"], given["reward"]) == ("mine:answer", folder, "rule_judge_hybrid")
    assert given["judge"]["model"] == "m"
    assert "agent" not in with_settings_of_run({"model": str(run.path), "backend": "mcp"})
    assert not {"data_dir", "reward", "judge"} & with_settings_of_run({"model": str(run.path), "domain": "mine"}).keys()
    assert "backend" not in with_settings_of_run({"model": str(run.path), "agent": "other:agent"})
    assert "judge" not in with_settings_of_run({"model": str(run.path), "reward": "executes"})


def test_a_runs_agent_is_evaluated_in_its_own_environment(tmp_path: Path) -> None:
    run = _trained(tmp_path, backend="custom", agent="mine:answer", runner_python="app/python", runner_processes=3)
    for given in ({}, {"agent": "mine:answer"}):
        config = evaluation_settings({"model": str(run.path), **given})
        assert (config.agent, config.runner_python, config.runner_processes) == ("mine:answer", "app/python", 3)
    for given in ({"agent": "other:answer"}, {"backend": "mcp"}):
        config = evaluation_settings({"model": str(run.path), **given})
        assert (config.runner_python, config.runner_processes) == (None, None)


def test_the_settings_of_a_run_with_verl_or_with_runners_elsewhere_can_be_evaluated(tmp_path: Path) -> None:
    settings = {"trainer": "verl", "n_runners": 0, "external_store_address": "http://127.0.0.1:9"}
    config = resolve("qwen", **settings)
    run = RunDir.create(tmp_path, backend=config.backend, domain=config.domain, config=config.to_dict())
    saved = run.path / "checkpoints" / "global_step_4" / "actor" / "huggingface"
    shutil.copytree(STARTER, saved)
    (run.path / "model").symlink_to(saved)
    config = evaluation_settings({"model": str(run.path)})
    assert (config.model, config.config, config.agent_options["max_turns"], config.n_runners) == (
        str(saved),
        "qwen",
        3,
        10,
    )
    assert prepare(config).data.validation


def test_a_run_without_a_checkpoint_has_no_model(evaluated: tuple[Path, str], tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config=resolve("fast").to_dict())
    with pytest.raises(RunDirError, match="has no checkpoint yet"):
        trained_model(run.path)
    with pytest.raises(RunDirError, match="has no checkpoint: give its model, starter"):
        trained_model(evaluated[0])
    assert trained_model(STARTER) is None
    assert trained_model("starter") is None


def test_a_run_with_an_unreadable_validation_is_refused(evaluated: tuple[Path, str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(evaluated[0].resolve(), tmp_path / "run"))
    part = sorted((folder / "rollouts").glob("*-val-*"))[0]
    part.write_bytes(part.read_bytes()[:100])
    for arguments in ([str(folder)], ["--compare", str(evaluated[0]), str(folder)]):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 1
        assert f"{part.name} cannot be read" in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


# -- an endpoint of somebody else's


class _Endpoint(BaseHTTPRequestHandler):
    """It wants a key, refuses what OpenAI's API does not know, and sends counts but no token ids."""

    asked: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != "Bearer sesame":
            return self._send(401, {"error": {"message": "no such key", "type": "auth"}})
        if "return_token_ids" in body:
            return self._send(400, {"error": {"message": "unrecognized argument: return_token_ids"}})
        self.asked.append(body)
        asked = body["messages"][-1]["content"]
        text = "CORRECT" if "VERDICT" in asked else f"```sql\nSELECT 1{len(asked)}\n```"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 70, "completion_tokens": 7, "total_tokens": 77}
        reply = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "usage": usage}
        return self._send(200, {**reply, "choices": [choice]})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.send_error(404)  # the standard library's web page of 14 lines

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    _Endpoint.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.mark.parametrize("preset", [(), ("--trainer", "verl", "--config", "qwen")])
def test_ten_tasks_run_against_any_endpoint_without_training(
    endpoint: str, preset: tuple[str, ...], tmp_path: Path
) -> None:
    kept = {k: v for k, v in os.environ.items() if k not in ("SPIDER_DATA_DIR", "OPENAI_API_KEY")}
    address = ("--base-url", endpoint) if not preset else ()
    environment = {**kept, "OPENAI_API_KEY": "sesame", "OPENAI_API_BASE": endpoint, "COLUMNS": "200"}
    arguments = ("--dev", *preset, *address, "--model", "big-1", "--output-dir", str(tmp_path))
    done = run_program("-m", "train.run", *arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    assert "10 rollouts, 20 calls, mean reward 0.000" in done.stdout
    assert ": write_query, model " in done.stdout
    assert "not trained: " not in done.stdout  # nothing is
    assert "SELECT 1" in done.stdout
    assert done.stdout.endswith("\nverdict: nothing is in the way of training\n")
    assert not list(tmp_path.iterdir())


def test_an_endpoint_without_token_ids_is_evaluated_with_its_token_counts(endpoint: str, tmp_path: Path) -> None:
    arguments = ("--base-url", endpoint, "--model", "big-1", "--val-tasks", "2", "--output-dir", str(tmp_path))
    done = _evaluate(*arguments, OPENAI_API_KEY="sesame")
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "latest" / "evaluation.json").read_text())
    assert (figures["n"], figures["calls_per_rollout"], figures["failures"]) == (2, 2, {})
    assert (figures["prompt_tokens"], figures["response_tokens"], figures["token_count_source"]) == (70, 7, "usage")
    assert "The endpoint sent no token ids" in done.stdout
    assert {body["model"] for body in _Endpoint.asked} == {"big-1"}
    kept = "".join(path.read_text() for path in (tmp_path / "latest").glob("*.json*"))
    assert "sesame" not in kept + done.stdout + done.stderr


def test_a_wrong_key_quotes_the_endpoints_error(endpoint: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["--base-url", endpoint, "--model", "m", "--output-dir", str(tmp_path)])
    assert done.exit_code == 2
    assert "answered 401: no such key" in done.stderr


def test_a_web_page_in_place_of_an_endpoint_is_one_line(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"answered 404: Not Found; its base URL usually ends in /v1$"):
        probe_endpoint(endpoint.removesuffix("/v1"), sampling={})
