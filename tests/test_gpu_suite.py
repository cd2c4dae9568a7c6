"""The parts of the GPU suite that need no GPU."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from benchmarks.gpu.random_model import save_random_model
from benchmarks.gpu.suite import MARK, Suite, marked_processes, verl_metrics

from groundwire.train.policy import STARTER
from groundwire.train.policy.model import load_policy

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


def test_the_exit_status_of_a_program_is_reported(tmp_path: Path) -> None:
    suite = Suite(argparse.Namespace(out=str(tmp_path), model=None))
    result = suite.run("short", ["-c", "raise SystemExit(3)"], 60.0)
    assert (result["exit"], result["timed_out"]) == (3, False)


def test_metrics_leave_out_the_initial_validation_and_the_warm_up(tmp_path: Path) -> None:
    assert verl_metrics(tmp_path) == {}
    steps = [{"timing_s/step": 10.0 - step, "actor/perf/max_memory_allocated_gb": 2.0 * step} for step in range(5)]
    lines = [json.dumps({"step": step, "data": data}) for step, data in enumerate(steps)]
    (tmp_path / "verl.jsonl").write_text("\n".join(lines))
    assert verl_metrics(tmp_path) == {"steps": 2, "step_s": 6.5, "peak_gpu_gb": 7.0}


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
