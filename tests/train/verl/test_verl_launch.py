"""The metrics of a run, made from verl's log while verl is running, and the Ray job of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from groundwire.rewards.judge.settings import API_KEY
from groundwire.train.artifacts.metrics_lines import MetricsLine
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.config.verl_names import COMPUTED, UPDATE_FLOPS
from groundwire.train.store.rollout import Outcome, Rollout
from groundwire.train.verl.hydra_config import flat_config
from groundwire.train.verl.launch import VerlTraining
from groundwire.train.verl.metrics import SampledSteps, archive_verl_log, follow_verl_log
from groundwire.train.verl.ray_job import SETUP_HOOK, forwarded_variables


def _wait_for_steps(run: RunDir, steps: list[int]) -> None:
    deadline = time.monotonic() + 600
    while [line["step"] for line in run.metrics()] != steps:
        assert time.monotonic() < deadline, run.metrics()
        time.sleep(0.05)


def _step(number: int, seconds: float) -> str:
    return json.dumps({"step": number, "data": {"timing_s/step": seconds}}) + "\n"


def test_metrics_follow_verls_log_and_continue_those_of_an_interrupted_run(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config={})
    (run.path / "verl.jsonl").write_text(_step(1, 2.0))
    archive_verl_log(run)
    rewards = {"step": 2, "partition": "train", "reward": 0.25, "rollouts": 8, "failures": {"timeout": 1}}
    (run.path / "rollouts.jsonl").write_text(json.dumps(rewards) + "\n")
    with follow_verl_log(run, print, interval_s=0.05), open(run.path / "verl.jsonl", "w") as file:
        file.write(_step(2, 3.0))
        file.flush()
        _wait_for_steps(run, [1, 2])
        file.write(_step(3, 1.0) + _step(4, 1.0)[:9])  # a line that is still being written
        file.flush()
        _wait_for_steps(run, [1, 2, 3])
    VerlTraining().collect(run)
    lines = run.metrics()
    assert [line["wall_time_s"] for line in lines] == [2.0, 5.0, 6.0]
    assert lines[1]["reward"] == 0.25
    assert lines[1]["failures"] == {"timeout": 1}


def test_verls_figures_have_the_local_trainers_names_and_their_rules_warn_once(tmp_path: Path) -> None:
    run, notes = RunDir.create(tmp_path, backend="langgraph", domain="spider", config={}), list[str]()
    counts = {"groups": 8, "groups_used": 6, "groups_replaced": 2, "rollouts_trained": 24, "tokens_trained": 900}
    shares = {"gradient_share": 0.75, "truncated_share": 0.025}
    shares |= {"same_prompt": {"pairs": 28.0, "equal": 3.0, "expected": 3.5}}
    logged = {
        "timing_s/step": 1.0,
        "actor/entropy": 0.31,
        "actor/ppo_kl": 0.001,
        "actor/pg_clipfrac": 0.02,
        "actor/kl_loss": 0.003,
        "actor/grad_norm": 0.7,
        "training/rollout_probs_diff_mean": 0.06,
        "rollout_corr/k3_kl": float("nan"),
        "perf/time_per_step": 2.0,
        "perf/total_num_tokens": 3200,
        "perf/throughput": 400.0,
        f"actor/{COMPUTED}": 1600,
        f"actor/{UPDATE_FLOPS}": 2e9,
    }
    steps = range(1, 6)
    counts["reward_components"] = {"match": 0.25}
    lines = [{"step": step, "partition": "train", "rollouts": 32, **counts, **shares} for step in steps]
    (run.path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with follow_verl_log(run, notes.append, interval_s=0.05):
        for last in (2, 4, 5):
            texts = [json.dumps({"step": step, "data": logged}) + "\n" for step in steps[:last]]
            (run.path / "verl.jsonl").write_text("".join(texts))
            _wait_for_steps(run, [*steps[:last]])
    line = run.metrics()[-1]
    figures = {"entropy": 0.31, "kl": 0.001, "clip_fraction": 0.02, "grad_norm": 0.7, "probability_difference": 0.06}
    assert figures.items() <= line.items()
    assert line["kl_reference"] == 0.003
    assert (line["tokens_computed"], line["machine"]["gpus"]) == (1600, 4)  # verl's throughput is of one GPU
    assert {**counts, **shares}.items() <= line.items()
    assert "sampler_kl" not in line  # verl had no number
    of_the_local_trainer = {"initial_ratio_error", "ratio_min", "ratio_max", "loss", "learning_rate", "candidates"}
    of_other_runs = {
        "sampler_kl",
        "updates_skipped",
        "unchecked_share",
        "known_attacks",
        "without_calls",
        "runners_lost",
    }
    of_other_runs |= {"validation", "validation_sampled", "teacher_kl", "teacher_share"}
    assert {*line} == MetricsLine.model_fields.keys() - of_the_local_trainer - of_other_runs
    [note] = notes
    assert "token probabilities differ by 0.06" in note


def test_the_entropy_is_estimated_from_the_samplers_logprobs_in_steps_in_which_verl_has_none(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config={})
    rollouts = [{"step": step, "partition": "train", "entropy": 0.4} for step in (1, 2)]
    logged = [{"step": 1, "data": {"actor/entropy": 0.3}}, {"step": 2, "data": {"actor/ppo_kl": 0.1}}]
    for file, lines in (("rollouts.jsonl", rollouts), ("verl.jsonl", logged)):
        (run.path / file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    VerlTraining().collect(run)
    assert [line["entropy"] for line in run.metrics()] == [0.3, 0.4]


def test_a_gradient_norm_that_is_not_finite_is_a_skipped_update(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config={})
    steps = [{"step": step, "data": {"actor/grad_norm": norm}} for step, norm in ((1, 0.5), (2, None))]
    (run.path / "verl.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))  # verl logs NaN as null
    VerlTraining().collect(run)
    assert [(line.get("grad_norm"), line.get("updates_skipped")) for line in run.metrics()] == [(0.5, None), (None, 1)]


def test_repeated_steps_replace_those_of_the_interrupted_run(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config={})
    (run.path / "verl.jsonl").write_text("".join(_step(number, 2.0) for number in range(1, 6)) + _step(6, 2.0)[:9])
    archive_verl_log(run)
    assert not (run.path / "verl.jsonl").exists()
    validated = json.dumps({"step": 3, "data": {"val-core/spider/reward/mean@1": 0.5}}) + "\n"
    (run.path / "verl.jsonl").write_text(validated + _step(4, 1.0))
    archive_verl_log(run)
    (run.path / "verl.jsonl").write_text(_step(5, 1.0))
    VerlTraining().collect(run)
    assert [(line["step"], line["wall_time_s"]) for line in run.metrics()] == [
        (1, 2.0),
        (2, 4.0),
        (3, 6.0),
        (4, 7.0),
        (5, 8.0),
    ]


def test_each_lost_runner_counts_whichever_rollouts_ran_and_however_often_the_step(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, backend="langgraph", domain="spider", config={})
    parts = [(0, "val", 1), (1, "train", 2), (1, "train", 0), (2, "train", 4), (2, "train", 0), (1, "val", 8)]
    parts.append((3, "train", 16))  # a step that did not end
    (run.path / "rollouts.jsonl").write_text(
        "".join(json.dumps({"step": step, "partition": part, "runners_lost": n}) + "\n" for step, part, n in parts)
    )
    (run.path / "verl.jsonl").write_text(_step(1, 2.0) + _step(2, 2.0))
    VerlTraining().collect(run)
    VerlTraining().collect(run)
    assert [(line["step"], line["runners_lost"]) for line in run.metrics()] == [(1, 10), (2, 21)]


def test_a_score_that_changes_after_the_sampling_leaves_its_rows_as_they_were(tmp_path: Path) -> None:
    run, can_write = RunDir.create(tmp_path, backend="custom", domain="spider", config={}), threading.Event()
    task = {"id": "q1", "question": "How many?"}
    failed = Outcome(failure="reward_error", message="first", reward=None)
    outcomes = [failed, Outcome(answer="a", reward=1.0), Outcome(answer="b", reward=0.0)]
    rollouts = [Rollout(task=task, step=2, started=1.0, ended=2.0, outcome=outcome) for outcome in outcomes]
    sampled = SampledSteps(resolve("starter", trainer="verl", model="starter"), run)
    sampled._writer.submit(can_write.wait, 60.0)  # it is busy when the score changes
    sampled._agent_checked = True
    metrics = sampled.add("train", 2, rollouts, Counter(), {})
    failed.failure, failed.reward = "unreadable_answer", 0.0
    can_write.set()
    sampled.finish_writing()
    rows = pq.read_table(run.path / "rollouts" / "step-00002-train.parquet").to_pylist()
    assert [row["reward"] for row in rows] == [None, 1.0, 0.0]
    assert rows[0]["status"] == "reward_error"
    assert metrics["rollouts/dropped_total"] == 1


_JOBS = """
import os, ray
from groundwire.train.verl.ray_job import RUN, SETUP_HOOK, ray_job
connect = ray.init
def init(**options):
    context = connect(**options)
    os.environ["WANDB_API_KEY"] = "of-the-trainers-shell"  # Ray's other processes have started without it
    return context
ray.init = init
environment = {"env_vars": {RUN: "/runs/one"}, "worker_process_setup_hook": SETUP_HOOK}
with ray_job("/runs/one"):
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    job = ray.remote(lambda: [ray.get_runtime_context().get_job_id(), os.environ.get("WANDB_API_KEY")])
    print(ray.JobID.from_int(os.getpid()).hex(), ray.get_runtime_context().get_job_id(), *ray.get(job.remote()))
"""


def test_each_ray_job_has_its_own_number_and_the_keys_of_its_user() -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-c", _JOBS]
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
    output = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env=environment).stdout
    own, driver, worker, key = output.split()
    assert own == driver == worker
    assert key == "of-the-trainers-shell"


def test_keys_reach_other_hosts_and_no_file_or_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["WANDB_API_KEY", "HF_TOKEN", "SWANLAB_API_KEY", "OPENAI_API_KEY", API_KEY, "ANTHROPIC_API_KEY"]
    for name in keys:
        monkeypatch.setenv(name, f"the {name}")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not asked for")
    forwarded = forwarded_variables(os.environ)
    assert {name: forwarded[name] for name in keys} == {name: f"the {name}" for name in keys}
    assert "AWS_SECRET_ACCESS_KEY" not in forwarded
    flat = json.dumps(flat_config(resolve("qwen", trainer="verl")), default=str)
    assert not [name for name in keys if f"the {name}" in flat]
    assert SETUP_HOOK in flat


def test_what_rays_processes_import_before_they_have_the_runs_variables_reads_none() -> None:
    readers = {"huggingface_hub", "pydantic", "torch", "wandb"}
    code = f"import sys, {SETUP_HOOK.rpartition('.')[0]}; print(*({readers!r} & sys.modules.keys()))"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert imported.stdout.split() == []
