"""A damaged file ends a command in one sentence that names it: no traceback, no hang, no full memory."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import file_damage
import fuzz_files
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from programs import ROOT
from spider_folder import make_spider
from typer.testing import CliRunner

from groundwire.domains import DataError
from groundwire.domains.spider.loader import domain
from groundwire.domains.spider.prepare import prepare
from groundwire.tools.files import parse_json, read_bytes
from groundwire.tools.sql import is_sqlite
from groundwire.train.artifacts.run_dir import RunDamagedError, RunDir, RunDirError
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import read_settings
from groundwire.train.config.resolve import resolve
from groundwire.train.doctor import examine
from groundwire.train.local.grpo import GRPO, GRPOConfig, check_state
from groundwire.train.policy import STARTER
from groundwire.train.policy.chat import template as chat_template
from groundwire.train.policy.chat.template import TemplateLimitError, TemplateRefusedError, is_trusted, render
from groundwire.train.policy.errors import EngineError, ModelUnreadableError
from groundwire.train.policy.model import load_initial_state, load_policy
from groundwire.train.report.__main__ import app as report_app

ROW = json.loads((ROOT / "tests" / "data" / "rollouts.json").read_text())["langgraph"]


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """A hang is a failure."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, backend="langgraph", domain="spider", config=resolve("fast", steps=2).to_dict())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(STARTER, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    prepare(make_spider(tmp_path / "source"), tmp_path / "prepared")
    return tmp_path / "prepared"


def test_seeded_damages_end_in_a_sentence(tmp_path: Path) -> None:
    """A short run of the fuzz; ``python tests/helpers/fuzz_files.py`` runs it for longer."""
    pristine = fuzz_files.make_pristine(tmp_path / "pristine")
    for case in itertools.islice(fuzz_files.cases(5, pristine, tmp_path), 4):
        assert not fuzz_files.problem(case), case


def test_pipes_and_devices_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with within(10):
        for file in (tmp_path / "pipe", Path("/dev/zero")):
            with pytest.raises(OSError, match="it is not a regular file"):
                read_bytes(file)
        with pytest.raises(OSError, match="larger than 1 MB"):
            read_bytes(STARTER / "model.safetensors", max_bytes=1 << 20)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "1" * 5000, '"\\ud80"', "", "\xff"])
def test_json_of_any_text_is_a_value_or_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(text.encode("latin-1"))


# -- run directories


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", "x"), ("agent_match", 3), ("agent_match", "("), ("judge", 3), ("verl", []), ("evaluation", [1])],
)
def test_settings_of_a_wrong_type_are_damage(run: RunDir, name: str, value: Any) -> None:
    run.write_config({**run.config(), name: value})
    with pytest.raises(RunDamagedError, match=rf"config\.json is damaged \({name}"):
        run.config()


def test_a_run_with_the_columns_of_an_older_version_is_refused(run: RunDir) -> None:
    run.write_json("config.json", {"format": 1, **run.config()})
    with pytest.raises(RunDirError, match="was written by an older version of groundwire"):
        RunDir.open(run.path)


def test_a_lock_that_is_a_pipe_is_refused(run: RunDir) -> None:
    os.mkfifo(run.path / ".lock")
    with pytest.raises(RunDirError, match=r"\.lock is not a regular file"), run.lock():
        pass


def test_a_report_is_not_written_to_a_pipe(run: RunDir) -> None:
    os.mkfifo(run.path / "report.html")
    with within(60):
        result = CliRunner().invoke(report_app, [str(run.path)])
    assert result.exit_code == 2
    assert "report.html is not a regular file: delete it" in result.stderr


def test_a_run_folder_that_links_to_itself_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("run")
    with pytest.raises(RunDirError, match="is not a run"):
        RunDir.open(tmp_path / "run")


@pytest.mark.parametrize(
    "line",
    [
        {"step": -1},
        {"step": "x"},
        {"step": 1, "reward": "high"},
        {"step": 1, "failures": ["timeout"]},
        {"step": 1, "seconds": {"update": "x"}},
        {"step": 1, "validation": {"accuracy": 0.5}},
        {"step": 1, "validation": {"accuracy": 1.0, "ci95": [0, 1], "n": 1, "total": 1, "by_hardness": {"easy": 3}}},
        {"step": 1, "entropy": "low"},
        {"step": 1, "same_prompt": {"pairs": "x"}},
        {"step": 1, "wall_time_s": None},
    ],
)
def test_a_wrong_value_in_the_metrics_is_named(run: RunDir, line: dict[str, Any]) -> None:
    run.append_metrics(line)
    with pytest.raises(RunDamagedError, match=r"metrics\.jsonl, line 1 cannot be read"):
        run.metrics()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"calls": [{**ROW["calls"][0], "weight": "x"}]}, "0.calls.0.weight"),
        ({"task": "[" * 5000}, "0.task"),
        ({"reward": "1"}, "0.reward is '1'"),
        ({"step": None}, "0.step is None"),
        ({"calls": [{"agent": "a"}]}, "there is no 0.calls.0.prompt_ids"),
        ({"calls": [{**ROW["calls"][0], "prompt_ids": [-1]}]}, "must be a list of token ids"),
        ({"calls": [{**ROW["calls"][0], "logprobs": [0.0] * 999}]}, "999 logprobs for"),
    ],
)
def test_a_wrong_value_in_a_file_of_rollouts_is_named(run: RunDir, change: dict[str, Any], found: str) -> None:
    run.write_rows(1, [{**ROW, **change}])
    unreadable: list[str] = []
    assert not list(run.rollout_batches(None, unreadable))
    assert "step-00001-train.parquet cannot be read" in unreadable[0]
    assert found in unreadable[0]


def test_a_file_of_rollouts_without_a_column_is_named(run: RunDir) -> None:
    run.write_rows(1, [{name: value for name, value in ROW.items() if name != "reward"}])
    unreadable: list[str] = []
    assert not list(run.rollout_batches(["step", "reward"], unreadable))
    assert "it has no column 'reward'" in unreadable[0]


def test_a_column_that_is_gone_is_not_read(run: RunDir) -> None:
    run.write_rows(1, [{**ROW, "further": False}])
    unreadable: list[str] = []
    assert len([*run.rollout_batches(None, unreadable)]) == 1
    assert not unreadable


def test_files_of_rollouts_with_other_columns_are_left_out_of_the_merged_file(run: RunDir) -> None:
    run.write_rows(1, [ROW])
    pq.write_table(pa.table({"reward": [b"x"]}), run.path / "rollouts" / "step-00002-train.parquet")
    [message] = run.merge_rollouts()
    assert message.startswith("step-00002-train.parquet cannot be read")
    assert pq.read_metadata(run.path / "rollouts.parquet").num_rows == 1


# -- trainer.pt


def _state(model: torch.nn.Module) -> dict[str, Any]:
    grpo = GRPO(model, GRPOConfig())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    grpo.optimizer.step()
    return grpo.state()


def _moment(state: Any, **moments: Any) -> Any:
    state["optimizer"]["state"][0].update(moments)
    return state


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: {},
        lambda state: [state],
        lambda state: {**state, "updates": "x"},
        lambda state: {**state, "updates": -1},
        lambda state: {**state, "steps": None},
        lambda state: {**state, "rates": (1.0, "x")},
        lambda state: {**state, "random": (3, (1, 2), None)},
        lambda state: {**state, "random": (3, (2**70,) * 625, None)},
        lambda state: {**state, "random": (*state["random"][:2], "x")},
        lambda state: {**state, "optimizer": {"state": {99: {}}}},
        lambda state: _moment(state, exp_avg=torch.zeros(3)),
        lambda state: _moment(state, exp_avg=torch.zeros(1).expand(10**12)),
        lambda state: _moment(state, exp_avg_sq=None),
        lambda state: _moment(state, step=torch.zeros(2)),
    ],
)
def test_a_state_of_another_shape_is_not_a_trainers(tiny_policy: Any, damage: Callable[[Any], Any]) -> None:
    model = deepcopy(tiny_policy[0])
    check_state(model, _state(model))
    with pytest.raises(ValueError, match=r"."):
        check_state(model, damage(_state(model)))


def test_a_trainers_state_of_another_shape_is_replaced_by_the_checkpoint_before(run: RunDir) -> None:
    model, _ = load_policy(STARTER)
    state = _state(model)
    for step, each in ((1, state), (2, {**state, "updates": "x"})):
        with run.checkpoints.write(step) as folder:
            shutil.copytree(STARTER, folder, dirs_exist_ok=True)
            torch.save(each, folder / "trainer.pt")
    start = load_initial_state(resolve("fast", steps=3), run, check_state)
    assert start.state is not None
    assert start.state["updates"] == 0
    assert "step-00002/trainer.pt cannot be loaded: updates is 'x'" in start.note


# -- models


def _set(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 10**9},
        {"vocab_size": 10**9},
        {"hidden_size": 10**9},
        {"head_dim": 10**9},
        {"num_attention_heads": 0},
        {"num_key_value_heads": None, "num_attention_heads": "x"},
        {"eos_token_id": ["x"]},
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused(model: Path, values: dict[str, Any]) -> None:
    _set(model / "config.json", **values)
    with within(60), pytest.raises(ModelUnreadableError, match=r"the model in .* cannot be loaded: "):
        load_policy(model)


def test_a_model_may_name_an_attention_that_this_machine_does_not_have(model: Path) -> None:
    _set(model / "config.json", attn_implementation="one_of_others")
    assert load_policy(model)[0].config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_deep_json_in_a_model_is_refused(model: Path, name: str) -> None:
    (model / name).write_text("[" * 100_000)
    with pytest.raises(ModelUnreadableError, match="recursion limit exceeded"):
        load_policy(model)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja", "trainer.pt"])
def test_a_pipe_in_a_model_is_refused(model: Path, name: str) -> None:
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with within(60), pytest.raises((ModelUnreadableError, FileNotFoundError), match=r"is not a regular file|no checkp"):
        load_policy(model)


def test_a_tokenizer_that_fails_at_its_first_use_is_refused(model: Path) -> None:
    _set(model / "tokenizer_config.json", model_max_length="long")
    with pytest.raises(ModelUnreadableError, match=r"the tokenizer in .* cannot be loaded: "):
        load_policy(model)


def test_the_doctor_names_a_damaged_template(model: Path) -> None:
    (model / "chat_template.jinja").write_bytes(b"\xff\xfe")
    [failure] = [each for each in examine(model=str(model)) if "chat_template.jinja" in each.text]
    assert failure.level == "failure"
    assert "is damaged" in failure.text


# -- chat templates


@pytest.mark.parametrize(
    "template",
    [
        *(text for text in file_damage.TEMPLATES if "c in range" in text or "10 ** 11" in text or "set ns" in text),
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ 'x' * 10 ** 7 }}",
    ],
)
def test_a_template_that_loops_or_grows_is_ended(
    tiny_policy: Any, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if template == file_damage.TEMPLATES[0]:  # it uses all of its time
        monkeypatch.setattr(chat_template, "_MAX_CPU_S", 0.2)
    tokenizer = _with_template(tiny_policy, template)
    with within(100), pytest.raises(TemplateLimitError, match=r"runs for too long|too much memory|characters"):
        render(tokenizer, [{"role": "user", "content": "hello"}])


def test_a_model_with_a_template_that_loops_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MAX_CPU_S", 0.2)
    (model / "chat_template.jinja").write_text(file_damage.TEMPLATES[0])
    with within(100), pytest.raises(ModelUnreadableError, match=r"the chat template in .* it runs for too long"):
        load_policy(model)


def test_a_model_with_a_broken_template_is_refused(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% fxr message in messages %}")
    with pytest.raises(ModelUnreadableError, match=r"the chat template in .* cannot be loaded: Encountered unknown"):
        load_policy(model)


def test_a_template_of_others_makes_the_same_prompt_in_its_process(tiny_policy: Any) -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b\N{GRINNING FACE}"}]
    expected = render(tiny_policy[1], messages)
    assert is_trusted(tiny_policy[1])
    other = _with_template(tiny_policy, tiny_policy[1].chat_template + "{# other #}")
    assert not is_trusted(other)
    assert render(other, messages) == expected
    refusing = _with_template(tiny_policy, "{{ raise_exception('no ' + eos_token) }}")
    with pytest.raises(TemplateRefusedError, match=f"no {tiny_policy[1].eos_token}"):
        render(refusing, messages)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_template_that_cannot_be_written_for_lack_of_files_refuses_no_messages(
    tiny_policy: Any, monkeypatch: pytest.MonkeyPatch, trusted: bool
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    tokenizer = deepcopy(tiny_policy[1])
    monkeypatch.setattr(tokenizer, "apply_chat_template", fail)
    monkeypatch.setattr("groundwire.train.policy.chat.template._workers.ask", fail)
    monkeypatch.setattr("groundwire.train.policy.chat.template.is_trusted", lambda _: trusted)
    with pytest.raises(EngineError, match="files are open, as many as may be") as refused:
        render(tokenizer, [{"role": "user", "content": "a"}], add_generation_prompt=True)
    assert refused.value.status == 503


def _with_template(policy: Any, template: str) -> Any:
    tokenizer = deepcopy(policy[1])
    tokenizer.chat_template = template
    return tokenizer


# -- data and settings


def test_a_pipe_is_no_database_and_no_download(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.sqlite")
    with within(10):
        assert not is_sqlite(tmp_path / "pipe.sqlite")
        with pytest.raises(DataError, match="is neither a folder nor a file"):
            prepare(tmp_path / "pipe.sqlite", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("report.json", '{"left_out_of_training": 3}'),
        ("report.json", '{"left_out_of_training": {"gold fails": "x"}}'),
        ("report.json", "[" * 100_000),
    ],
)
def test_a_wrong_report_of_prepare_is_named(prepared: Path, name: str, text: str) -> None:
    (prepared / name).write_text(text)
    with pytest.raises(DataError, match=name):
        domain.load(str(prepared))


@pytest.mark.parametrize("row", [{"db_path": 3}, {"hardness": ["easy"]}, {"db_id": "a\0b"}])
def test_a_wrong_value_in_a_task_is_named(tmp_path: Path, row: dict[str, Any]) -> None:
    task = {"db_id": "pets", "question": "How many?", "query": "SELECT 1", **row}
    with pytest.raises(DataError, match=rf"{next(iter(row))}"):
        domain.load(str(make_spider(tmp_path, train=[task])))


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 30_000,
        "a: &a {x: *a}",
        "".join(
            f"a{n}: &a{n} {{{', '.join(f'{m}: *a{n - 1}' if n else f'{m}: 1' for m in range(9))}}}\n" for n in range(9)
        ),
        "steps: !!timestamp x",
        "seed: " + "9" * 5000,
    ],
)
def test_yaml_without_end_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with within(60), pytest.raises(ConfigError, match=r"run\.yaml"):
        read_settings(tmp_path / "run.yaml")


def test_deep_toml_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("a = " + "[" * 30_000)
    with pytest.raises(ConfigError, match="too many nested values"):
        read_settings(tmp_path / "run.toml")
