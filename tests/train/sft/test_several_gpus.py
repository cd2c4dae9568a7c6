"""What several GPUs do with verl, by processes of verl on processors (:mod:`verl_on_cpu`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import ROOT

from groundwire.train.artifacts.checkpoints import Checkpoints
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.sft import run as sft
from groundwire.train.sft import several_gpus

pytest.importorskip("verl")
pytest.importorskip("verl.trainer.sft_trainer", exc_type=ImportError)  # verl 0.9.1 has no newer transformers than 5.10

TESTS = ROOT / "tests" / "helpers"


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_on_cpu import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))


def test_a_supervised_run_is_continued_and_gives_the_same_model(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings_of_verl, read_steps = several_gpus.verl_settings, several_gpus.read_steps
    # FSDP 1 cannot write its whole model on processors.
    more = {"trainer.device": "cpu", "engine.strategy": "fsdp2"}
    monkeypatch.setattr(several_gpus, "verl_settings", lambda *a, **k: settings_of_verl(*a, **k) | more)
    monkeypatch.setattr(sft, "check_gpus", lambda _: None)
    for name, value in {"WARMUP_STEPS": 1, "CHECKPOINT_EVERY": 2, "VAL_EVERY": 2, "_TOKENS_PER_GPU": 100}.items():
        monkeypatch.setattr(several_gpus, name, value)
    monkeypatch.setattr(several_gpus, "_LOG_POLL_S", 0.05)  # or the run may have ended when it is interrupted
    chats = [
        {"messages": [{"role": "user", "content": f"How many {n}?"}, {"role": "assistant", "content": f"{n} of them."}]}
        for n in range(40)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    settings = SFTSettings(
        model="starter", chats=str(tmp_path / "chats.jsonl"), gpus=2, tokens_per_step=200,
        max_model_len=100, output_dir=str(tmp_path / "out"),
    )  # fmt: skip

    def lines(folder: Path) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [{name: value for name, value in line.items() if name != "seconds"} for line in found]

    assert any(line.startswith("model: ") for line in sft.run(settings, resume=None, given={}))
    [whole] = (tmp_path / "out").iterdir()
    expected = lines(whole)
    assert [line["step"] for line in expected] == list(range(1, len(expected) + 1))
    assert expected[-1]["loss"] < expected[0]["loss"]

    def interrupted(file: Path) -> Any:
        if len(steps := read_steps(file)) > 5:
            monkeypatch.setattr(several_gpus, "read_steps", read_steps)
            raise KeyboardInterrupt
        return steps

    monkeypatch.setattr(several_gpus, "read_steps", interrupted)
    with pytest.raises(KeyboardInterrupt, match="stopped; continue with groundwire sft --resume"):
        list(sft.run(settings, resume=None, given={}))
    [stopped] = set((tmp_path / "out").iterdir()) - {whole}
    assert 4 <= Checkpoints(stopped / "verl").last_step() < len(expected)
    for _ in range(2):  # the second time nothing is left to learn
        list(sft.run(settings, resume=stopped, given={}))
        assert lines(stopped) == expected
        weights = [(folder / "model" / "model.safetensors").read_bytes() for folder in (whole, stopped)]
        assert weights[0] == weights[1]


def test_two_processes_that_share_prompts_learn_what_verls_engine_learns(on_cpu: None) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    tests = ROOT / "tests" / "train" / "verl" / "shared_prefixes"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    program = [sys.executable, *launcher, str(TESTS / "shared_prefixes_on_two.py")]
    subprocess.run(program, check=True, timeout=300, env=environment)
