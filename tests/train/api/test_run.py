"""``groundwire run`` as users run it: training, resuming after a kill, errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from programs import Program, run, until
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from groundwire.domains.spider.loader import BUNDLED
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.resolve import resolve
from groundwire.train.run import app

SMALL = ("--val-tasks", "2", "--n-runners", "16", "--tasks-per-step", "4", "group_size=4")


def _environment() -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if k != "SPIDER_DATA_DIR"}, "COLUMNS": "200"}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "train.run", *arguments, environment=_environment())


@pytest.fixture(scope="module")
def finished(shared_folder: Callable[..., Path]) -> tuple[Path, str]:
    """A run of one step on the bundled data, and what it printed."""

    def fill(runs: Path) -> None:
        arguments = ("--backend", "langgraph", "--domain", "spider", "--ci-fast", *SMALL, "--output-dir", str(runs))
        program = "import os; os.umask(0o002); from groundwire.train.run import app; app()"
        done = run("-c", program, *arguments, environment=_environment())
        assert done.returncode == 0, done.stderr
        (runs / "printed.txt").write_text(done.stdout)

    runs = shared_folder("finished_run", fill)
    return runs / "latest", (runs / "printed.txt").read_text()


def test_a_run_writes_its_files(finished: tuple[Path, str]) -> None:
    run, printed = finished
    names = {path.name for path in run.iterdir()}
    assert {"config.json", "metrics.jsonl", "checkpoints", "rollouts.parquet", "curve.png", "summary.json"} <= names
    summary = json.loads((run / "summary.json").read_text())
    assert summary["backend"] == "langgraph"
    assert summary["steps"] == 1
    assert summary["rollouts"] == 16
    assert 0 <= summary["validation"]["before"] <= 1
    assert 0 <= summary["validation"]["after"] <= 1
    assert summary["validation"]["n"] == 2
    assert set(summary["validation"]["before_by_hardness"]) == set(summary["validation"]["after_by_hardness"])
    assert summary["peak_memory_mb"] > 0
    assert summary["speed"]["tokens_per_s_per_machine"] > 0
    assert "bundled" in printed
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_the_files_of_a_run_have_the_mode_of_the_umask(finished: tuple[Path, str]) -> None:
    files = {path: path.stat().st_mode & 0o777 for path in finished[0].resolve().rglob("*")}
    assert {path: mode for path, mode in files.items() if mode != (0o775 if path.is_dir() else 0o664)} == {}


def test_server_and_trainer_agree_on_every_probability(finished: tuple[Path, str]) -> None:
    line = RunDir.open(finished[0]).metrics()[-1]
    assert line["groups_used"] > 0
    assert line["initial_ratio_error"] < 0.01
    assert line["failures"] == {}


def test_every_phase_of_a_step_is_measured(finished: tuple[Path, str]) -> None:
    seconds = RunDir.open(finished[0]).metrics()[-1]["seconds"]
    assert set(seconds) == {"update", "sampling", "sql", "reward", "agent", "waiting"}
    assert seconds["sampling"] > 0
    assert seconds["update"] > 0


def test_every_rollout_is_stored_with_its_sampled_tokens(finished: tuple[Path, str]) -> None:
    rows = pq.read_table(finished[0] / "rollouts.parquet").to_pylist()
    train = [row for row in rows if row["mode"] == "train"]
    assert len(train) == 16
    for row in train:
        assert row["status"] == "succeeded"
        assert row["reward"] in (0.0, 1.0)
        assert row["calls"][0]["agent"] == "write_query"
        for call in row["calls"]:
            assert len(call["response_ids"]) == len(call["logprobs"]) > 0


def test_a_checkpoint_loads_in_transformers(finished: tuple[Path, str]) -> None:
    [checkpoint] = RunDir.open(finished[0]).checkpoints.paths()
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("How many singers are there?", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=2).shape[1] == ids.shape[1] + 2


def _not_begun(runs: Path, *, steps: int) -> Path:
    """The run directory of a run of small steps: resumed, it begins."""
    track = ["tensorboard"] if find_spec("tensorboard") else []
    small = {
        "tasks_per_step": 2,
        "group_size": 2,
        "val_tasks": 1,
        "agent_options": {"max_turns": 1},
        "max_tokens": 1,
        "n_runners": 16,
    }
    config = resolve("fast", steps=steps, track=track, **small)
    return RunDir.create(str(runs), backend="langgraph", domain="spider", config=config.to_dict()).path


def test_a_killed_run_continues_from_its_last_step(tmp_path: Path) -> None:
    run = _not_begun(tmp_path, steps=2)
    program = Program("-m", "train.run", "--resume", str(run), environment=_environment())
    until((run / "checkpoints" / "step-00001").exists, program)
    program.send_signal(signal.SIGKILL)
    assert program.wait(600).returncode == -signal.SIGKILL
    done = _run("--resume", str(run))
    assert done.returncode == 1, done.stderr
    assert "nothing was trained: in no group of 2 step(s) did the rewards of rollouts differ" in done.stdout
    assert "before" not in done.stdout.partition("nothing was trained")[2]
    assert [line["step"] for line in RunDir.open(run).metrics()] == [0, 1, 2]
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["steps"], summary["rollouts"]) == (2, 8)
    if find_spec("tensorboard"):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        shown = EventAccumulator(str(run / "tensorboard")).Reload().Scalars("reward")
        told = {line["step"]: line["reward"] for line in RunDir.open(run).metrics()[1:]}
        assert {each.step: pytest.approx(each.value) for each in shown} == told
    refused = _run("--resume", str(run), "--seed", "9")
    assert refused.returncode == 2
    assert "started with 0" in refused.stderr


def test_ctrl_c_stops_and_tells_how_to_continue(tmp_path: Path) -> None:
    run = _not_begun(tmp_path, steps=500)
    program = Program("-m", "train.run", "--resume", str(run), environment=_environment())
    until((run / "checkpoints" / "step-00001").exists, program)
    program.send_signal(signal.SIGINT)
    stopped = program.wait(600)
    assert stopped.returncode == 130
    assert "--resume" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert json.loads((run / "summary.json").read_text())["steps"] >= 1


def test_an_interrupted_run_ends_with_130_even_if_ray_would_abort() -> None:
    """Ray aborts while the interpreter is torn down, for which an exit handler stands here."""
    code = """
import atexit, os, sys, types
sys.modules["ray"] = types.ModuleType("ray")
atexit.register(os.abort)
from groundwire.tools.errors import exit_on_user_error
with exit_on_user_error():
    sys.stdout.write("buffered")
    raise KeyboardInterrupt
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "buffered", "stopped\n")


def test_dev_prints_every_call_and_triplet_and_writes_nothing(tmp_path: Path) -> None:
    done = _run("--dev", "--agent-option", "max_turns=1", "--output-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("triplet") >= 10
    first = done.stdout.split(": succeeded, ")[1]
    for label in ("question", "call 1: write_query", "response ids", "gold", "answer", "rows [", "reward"):
        assert label in first, label
    assert not list(tmp_path.iterdir())


def _port_in_use() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--backend", "langgraf"),
            "unknown backend 'langgraf'; known: command, custom, langgraph, mcp, ",
        ),
        (("--domain", "sipder"), "unknown domain 'sipder'; known:"),
        (("--reward", "nope"), "unknown reward 'nope'; known:"),
        (("--config", "nope"), "unknown config 'nope'; known:"),
        (("--data-dir", "no/such/folder"), "no/such/folder"),
        (("--model", "no/such/model"), "no/such/model"),
        (("--resume", "no/such/run"), "no/such/run is not a run"),
        (("--agent-option", "max_turns=0"), "max_turns is 0"),
        (("--agent-match", "("), "is not a regular expression"),
        (("--agent-match", "nobody"), "matches none of its agents"),
        (("--device", "tpu"), "device is 'tpu', which torch"),
        (("--proxy-host", "203.0.113.7"), "listening on 203.0.113.7 needs a token: set GROUNDWIRE_TOKEN or give"),
        (
            ("--trainer", "verl", "--config", "starter", "data.train_batch_size=5000"),
            "1800 training tasks, but tasks_per_step is 5000",
        ),
    ],
)
def test_a_wrong_argument_is_a_one_line_error(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = _run(*arguments, "--output-dir", str(tmp_path))
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_an_address_of_another_machine_is_a_one_line_error(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-token-of-several-machines")
    done = _run("--proxy-host", "203.0.113.7", "--token-file", str(token), "--output-dir", str(tmp_path / "runs"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot listen on 203.0.113.7, which is no address of this machine")
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("mode", [(), ("--dev",)])
def test_a_port_in_use_is_a_one_line_error(mode: tuple[str, ...], tmp_path: Path) -> None:
    with _port_in_use() as listener:
        port = str(listener.getsockname()[1])
        done = _run(*mode, "--proxy-host", f"127.0.0.1:{port}", "--output-dir", str(tmp_path))
    assert done.returncode == 1
    assert port in done.stderr
    assert "in use" in done.stderr
    assert "--proxy-host" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_port_out_of_range_is_refused() -> None:
    refused = CliRunner().invoke(app, ["--proxy-host", "10.0.0.7:65536"])
    assert refused.exit_code == 2
    assert "proxy_host is '10.0.0.7:65536'; its port must be at most 65535" in refused.stderr


def test_the_printed_settings_are_json_and_options_override_short_forms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.symlink(BUNDLED, "data")
    arguments = ["--trainer", "local", "--ci-fast", "--steps", "3", "--data-dir", "data", "--print-config"]
    arguments += ["--external-store-address", "http://127.0.0.1:1"]  # nobody waits for a store to show settings
    printed = CliRunner().invoke(app, arguments)
    settings = json.loads(printed.stdout)
    assert (settings["steps"], settings["data_dir"]) == (3, str(BUNDLED.resolve()))
    assert printed.stderr.startswith("data: ")


def test_a_finished_run_continues_only_with_more_steps(finished: tuple[Path, str], tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished[0].resolve(), tmp_path / "run"))
    config = json.loads((run / "config.json").read_text())
    small = {
        "agent_options": {"max_turns": 1},
        "max_tokens": 16,
        "tasks_per_step": 2,
        "group_size": 2,
    }  # of the further steps
    (run / "config.json").write_text(json.dumps({**config, **small}))
    again = _run("--resume", str(run))
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.splitlines()[-1] == "all 1 steps are done; to train further, give more steps, e.g. --steps 2"
    with RunDir.open(run).lock():
        refused = _run("--resume", str(run), "--steps", "2")
    assert refused.returncode == 2
    assert f"in use by process {os.getpid()}" in refused.stderr
    assert RunDir.open(run).config()["steps"] == 1
    assert _run("--resume", str(run), "--steps", "2").returncode == 0
    assert RunDir.open(run).config()["steps"] == 2
    damaged = run / "checkpoints" / "step-00002" / "trainer.pt"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    (run / "rollouts" / "step-00000-val-0.parquet").write_bytes(b"half")
    repaired = _run("--resume", str(run))
    assert repaired.returncode == 0
    assert "step-00002/trainer.pt cannot be loaded" in repaired.stderr
    assert "going on from step-00001" in repaired.stderr
    assert "warning: step-00000-val-0.parquet cannot be read" in repaired.stderr
    assert [line["step"] for line in RunDir.open(run).metrics()] == [0, 1, 2]
    assert RunDir.open(run).checkpoints.last_step() == 2
    (run / "config.json").write_text("{")
    broken = _run("--resume", str(run))
    assert broken.returncode == 1
    assert len(broken.stderr.strip().splitlines()) == 1


def test_a_broken_database_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "data" / "database" / "broken").mkdir(parents=True)
    (tmp_path / "data" / "database" / "broken" / "broken.sqlite").write_bytes(b"this is no database" * 100)
    for name in ("train_spider.json", "dev.json"):
        row = {"db_id": "broken", "question": "How many?", "query": "SELECT count(*) FROM t"}
        (tmp_path / "data" / name).write_text(json.dumps([row]))
    done = _run("--data-dir", str(tmp_path / "data"), "--output-dir", str(tmp_path / "runs"))
    assert done.returncode != 0
    assert "broken" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
