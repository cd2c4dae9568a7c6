"""The parts of the GPU suite that need no GPU."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from dev.gpu import __main__ as suite_module
from dev.gpu.learning import spider_experiment, write_parts
from dev.gpu.learning_results import differences, error_classes
from dev.gpu.options import read_options
from dev.gpu.peers import Case, segments_attention
from dev.gpu.random_model import save_random_model
from dev.gpu.suite import MARK, Suite, marked_processes, step_figures
from dev.gpu.traces import pooled_differences
from spider_folder import TRAIN, make_spider

from groundwire.domains import get
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.policy import STARTER
from groundwire.train.policy.model import load_policy
from groundwire.train.store.rollout import Outcome, Rollout

_WITHOUT_SIGINT = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
def end(*_):
    print("its model is kept", flush=True)
    sys.exit(130)
signal.signal(signal.SIGTERM, end)
print("at work", flush=True)
time.sleep(600)
"""


def test_a_program_is_terminated_at_its_limit_even_if_it_ignores_sigint(tmp_path: Path) -> None:
    suite = Suite(argparse.Namespace(out=str(tmp_path), model=None))
    result = suite.run("long", ["-c", _WITHOUT_SIGINT], 3.0)
    assert result["timed_out"]
    assert result["exit"] in (130, -signal.SIGTERM)  # the latter on a machine that needs 3 s to start Python
    log = (tmp_path / "logs" / "long.log").read_text()
    assert ("its model is kept" in log) == ("at work" in log)


def test_a_stopped_suite_ends_its_programs_and_starts_no_more(tmp_path: Path) -> None:
    suite = Suite(argparse.Namespace(out=str(tmp_path), model=None))
    with ThreadPoolExecutor() as pool:
        program = pool.submit(suite.run, "long", ["-c", "import time; time.sleep(600)"], 600.0)
        while not (tmp_path / "logs" / "long.log").exists():
            time.sleep(0.05)
        suite.stop()
        assert program.result()["exit"] == -signal.SIGTERM
    with pytest.raises(RuntimeError, match="the suite was stopped"):
        suite.run("later", ["-c", "pass"], 60.0)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--parts", "speed,foo", "foo is unknown; known: speed, learning"),
        ("--agents", "mcp", "mcp is unknown; known: langgraph, openai-agents"),
        ("--seeds", "0,x", "'0,x' is not a list of whole numbers"),
        ("--sft-share", "1", "'1' is not a number between 0 and 1"),
        ("--grpo-s", "-5", "'-5' is not a number above 0"),
        ("--at-once", "0", "'0' is not a whole number of at least 1"),
        ("--shape", "0.5b,foo", "the shape 'foo' is neither 135m, 0.5b, 1.5b nor TYPE-WIDTHxLAYERS"),
    ],
)
def test_a_wrong_option_is_refused_before_a_program_starts(
    option: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dev.gpu", "--out", "unused", f"{option}={value}"])
    with pytest.raises(SystemExit):
        read_options("", ("speed", "learning"))
    assert message in " ".join(capsys.readouterr().err.split())


def test_lists_of_names_are_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["dev.gpu", "--out", "unused", "--variants=", "--seeds=3,4"])
    options = read_options("", ("speed", "learning"))
    assert (options.parts, options.variants, options.seeds) == (["speed", "learning"], [], [3, 4])


def test_the_settings_of_the_parts_on_spider_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spider = make_spider(tmp_path / "spider", train=[{**TRAIN[0], "db_id": name} for name in ("pets", "cars")])
    monkeypatch.setattr(sys, "argv", ["dev.gpu", "--out", str(tmp_path / "out"), f"--spider={spider}"])
    experiment = spider_experiment(Suite(read_options("", suite_module.PARTS)), "learning", ["langgraph"])
    for settings, known in ((experiment.supervised, SFTSettings), (experiment.agent, RunConfig)):
        options = {name.partition(".")[2]: value for name, value in settings.items() if "." in name}
        plain = {name: value for name, value in settings.items() if "." not in name}
        assert known(**plain, agent_options=options).max_model_len == 3072


def test_the_stages_of_seeds_are_compared_by_question() -> None:
    first = {"sft 0": {"a": [0.0], "b": [0.0]}, "grpo 0": {"a": [1.0], "b": [0.0]}}
    second = {"sft 1": {"a": [0.0], "b": [1.0]}, "grpo 1": {"a": [1.0], "b": [1.0]}, "grpo 2": {"a": [0.0], "b": [0.0]}}
    found = pooled_differences({**first, **second})
    assert found["accuracy"] == {"sft": {"0": 0.0, "1": 0.5}, "grpo": {"0": 0.5, "1": 1.0, "2": 0.0}}
    change = found["sft -> grpo"]
    assert (change["seeds"], change["questions"], change["difference"]) == (["0", "1"], 2, 0.5)


def test_scaling_compares_the_first_gpu_with_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, seen = iter((9.0, 5.0)), list[Any]()

    def train(self: Suite, name: str, arguments: list[str], variables: Any = None) -> tuple[dict[str, Any], None]:
        seen.append((name, variables, arguments))
        return {"figures": {"step_s": next(seconds)}}, None

    monkeypatch.setattr(Suite, "train", train)
    monkeypatch.setattr(suite_module, "gpu_names", lambda: ["a", "b"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    command = ["dev.gpu", "--out", str(tmp_path), "--parts=scaling", "--shape=llama-128x2", "--batch=16", "a=1"]
    monkeypatch.setattr(sys, "argv", command)
    result = suite_module.part_scaling(Suite(read_options("", suite_module.PARTS)))
    assert result["llama-128x2"]["one_over_all_step_time"] == 1.8
    (one, first, settings), (every, all_gpus, same) = seen
    assert (one, every, first) == ("scaling-one-llama-128x2", "scaling-all-llama-128x2", {"CUDA_VISIBLE_DEVICES": "3"})
    assert all_gpus is None
    assert settings == same
    assert {"data.train_batch_size=16", "a=1"} <= set(settings)
    monkeypatch.setattr(suite_module, "gpu_names", lambda: ["a"])
    assert "needs several GPUs" in suite_module.part_scaling(Suite(read_options("", suite_module.PARTS)))["note"]


def test_the_exit_status_of_a_program_is_reported(tmp_path: Path) -> None:
    suite = Suite(argparse.Namespace(out=str(tmp_path), model=None))
    result = suite.run("short", ["-c", "raise SystemExit(3)"], 60.0)
    assert (result["exit"], result["timed_out"]) == (3, False)


def test_metrics_leave_out_the_initial_validation_and_the_warm_up(tmp_path: Path) -> None:
    assert step_figures(tmp_path) == {}
    steps = [{"timing_s/step": 10.0 - step, "actor/perf/max_memory_allocated_gb": 2.0 * step} for step in range(5)]
    lines = [json.dumps({"step": step, "data": data}) for step, data in enumerate(steps)]
    (tmp_path / "verl.jsonl").write_text("\n".join(lines))
    assert step_figures(tmp_path) == {"steps": 2, "step_s": 6.5, "peak_gpu_gb": 7.0}


def test_a_metric_of_the_first_steps_alone_is_their_mean(tmp_path: Path) -> None:
    key = "training/rollout_probs_diff_mean"
    lines = [json.dumps({"step": step, "data": {key: 0.002} if step == 1 else {}}) for step in range(5)]
    (tmp_path / "verl.jsonl").write_text("\n".join(lines))
    assert step_figures(tmp_path) == {"steps": 2, "rollout_logprob_diff": 0.002}


def test_the_speed_of_a_local_run_has_its_units_and_its_machine(tmp_path: Path) -> None:
    machine = {"device": "NVIDIA L4", "gpus": 1, "training_gpus": 1, "cores": 8}
    lines = [
        {"step": step, "seconds": {"update": 1.0, "sampling": 1.0 + step}, "machine": machine}
        | {"tokens_computed": 10 * step, "speed": {"tokens_per_s_per_gpu": 100.0 * step, "update_mfu": 0.25}}
        for step in range(1, 5)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, [{"step": 0}, *lines])))
    assert step_figures(tmp_path) == {
        **{"steps": 2, "step_s": 5.5, "update_s": 1.0, "tokens_computed": 35},
        **{"tokens_per_s_per_gpu": 350.0, "update_mfu": 0.25, **machine},
    }


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_a_random_model_has_its_shape_and_reads_its_tokenizers_ids(model_type: str, tmp_path: Path) -> None:
    save_random_model(f"{model_type}-128x2", tmp_path)
    model, tokenizer = load_policy(tmp_path)
    config = model.config
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == (model_type, 128, 2)
    ids = tokenizer("SELECT name FROM singer")["input_ids"]
    assert model(torch.tensor([ids])).logits.shape == (1, len(ids), config.vocab_size)
    if model_type == "llama":
        assert ids == load_policy(STARTER)[1]("SELECT name FROM singer")["input_ids"]


def test_a_shape_of_another_form_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the shape .300m. is neither 135m, 0\.5b, 1.5b nor TYPE-WIDTHxLAYERS"):
        save_random_model("300m", tmp_path)


def test_marked_processes_are_found_after_their_parent_has_ended(tmp_path: Path) -> None:
    orphaning = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    mark = str(tmp_path)
    assert marked_processes(mark) == []
    subprocess.run([sys.executable, "-c", orphaning], env={**os.environ, MARK: mark}, check=True)
    (found,) = marked_processes(mark)
    assert "time.sleep" in found
    os.kill(int(found.split()[0]), signal.SIGKILL)


def test_parts_share_no_training_database_and_have_all_validation_questions(tmp_path: Path) -> None:
    car = {"db_id": "cars", "question": "How many cars?", "query": "SELECT count(*) FROM car"}
    first, second, counts = write_parts(str(make_spider(tmp_path / "spider", train=[*TRAIN, car])), tmp_path, 0.5)
    parts = [get("spider").load(str(folder)) for folder in (first, second)]
    # Golds that fail or return no rows are left out.
    assert sorted(task["query"] for part in parts for task in part.train) == [car["query"], TRAIN[0]["query"]]
    assert len({task["db_id"] for part in parts for task in part.train}) == 2
    assert all([task["id"] for task in part.validation] == ["d0", "d1"] for part in parts)
    assert counts["questions for sft"] == counts["databases for grpo"] == 1
    both = get("spider").load(str(tmp_path / "all"))
    assert sorted(task["query"] for task in both.train) == [car["query"], TRAIN[0]["query"]]


def _scores(*rewards: float) -> dict[str, list[float]]:
    return {str(number): [reward] for number, reward in enumerate(rewards)}


def test_stages_are_compared_with_the_one_before_and_seeds_together() -> None:
    stages = {"zero": _scores(0, 0, 0, 0), "sft": _scores(1, 0, 0, 1), "seed 0": _scores(1, 1, 0, 1)}
    found = differences({**stages, "turns": _scores(1, 1, 1, 1), "seed 1": _scores(1, 0, 1, 1)})
    assert {name: each["difference"] for name, each in found.items()} == {
        "zero -> sft": 0.5,
        "sft -> seed 0": 0.25,
        "sft -> seed 1": 0.25,
        "sft -> turns": 0.5,
        "seed 0 -> turns": 0.25,
        "sft -> all seeds": 0.25,
    }
    assert (found["sft -> turns"]["won"], found["sft -> turns"]["lost"], found["sft -> turns"]["p"]) == (2, 0, 0.5)
    assert found["sft -> all seeds"]["p"] == pytest.approx(0.0833, abs=1e-3)


def test_grpo_is_compared_with_sft_for_the_same_time() -> None:
    stages = {"sft": _scores(1, 0, 0, 0), "SFT for longer": _scores(1, 1, 0, 0)}
    found = differences({**stages, "seed 0": _scores(1, 1, 1, 0), "seed 1": _scores(1, 1, 1, 1)})
    compared = {name: each["difference"] for name, each in found.items() if "longer" in name}
    assert compared == {
        "sft -> SFT for longer": 0.25,
        "SFT for longer -> seed 0": 0.25,
        "SFT for longer -> seed 1": 0.5,
        "SFT for longer -> all seeds": 0.375,
    }


def test_seeds_that_only_vary_are_no_significant_gain() -> None:
    """The mean of three seeds is above a single 0 more often than below a single 1 if a question is rarely right."""
    before = _scores(*[1, 0, 0, 0, 0, 0, 0, 0, 0, 0] * 30)
    seeds = {f"seed {seed}": _scores(*([0] * (seed + 1) + [1] + [0] * (8 - seed)) * 30) for seed in range(3)}
    found = differences({"sft": before, **seeds})["sft -> all seeds"]
    assert (found["won"], found["lost"], found["difference"]) == (90, 30, 0.0)
    assert found["p"] == pytest.approx(1.0)


def test_wrong_answers_are_counted_by_what_the_database_says(tmp_path: Path) -> None:
    (task, _) = get("spider").load(str(make_spider(tmp_path))).validation
    answers = ["SELECT maker FROM car", "SELECT 1", "SELECT wheels FROM car", "SELECT FROM", ""]
    ended = [Outcome(reward=float(not number), answer=answer) for number, answer in enumerate(answers)]
    outcomes = [*ended, Outcome(failure="timeout")]
    assert error_classes([Rollout(task=task, outcome=outcome) for outcome in outcomes]) == {
        "the results differ": 1,
        "no such column": 1,
        "syntax error": 1,
        "no query": 1,
        "timeout": 1,
    }


def test_attention_of_segments_is_that_of_each_sequence_in_full() -> None:
    """Two replies after a shared prompt: their queries are the last positions of their keys, as flash-attn has it."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(11, heads, 8) for heads in (4, 2, 2))
    prompt, replies = list(range(5)), [list(range(5, 8)), list(range(8, 11))]
    index = torch.tensor(prompt + [column for reply in replies for column in prompt + reply])
    ends_q, ends_k = torch.tensor([0, 5, 8, 11]), torch.tensor([0, 5, 13, 21])
    got = segments_attention(query, key[index], value[index], ends_q, ends_k, 5, 8, softmax_scale=None)
    for reply in replies:
        columns = prompt + reply
        q, k, v = (each[columns].transpose(0, 1)[None] for each in (query, key, value))
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(got[columns], wanted[0].transpose(0, 1))


def test_rows_of_a_case_have_its_numbers_and_a_wrong_case_is_named() -> None:
    groups = Case.read("3x36+5").rows()
    assert [(34 <= len(prompt) <= 38, [len(reply) for reply in replies]) for prompt, replies in groups] == [
        (True, [5] * 8)
    ] * 3
    assert groups == Case(3, 36, 5).rows()
    assert Case(2, 886, 5).rows([[7], [8], [9]])[1][0] == [8]
    for wrong in ("3x36", "0x36+5", "3x36+5x"):
        with pytest.raises(ValueError, match=re.escape(wrong)):
            Case.read(wrong)
