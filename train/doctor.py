"""``python -m train.doctor``: check this machine, and give advice about each problem.

Each finding is ``ok``, ``warning`` or ``failure``; the exit code is 1 if there is a failure. Nothing is changed or
downloaded.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from groundwire.tools.env_file import read_env_file
from groundwire.tools.errors import exit_on_user_error
from groundwire.tools.files import read_bytes, read_json
from groundwire.tools.http.access_token import TokenError, token_for
from groundwire.tools.secrets import mask_secrets
from groundwire.tools.terminal import TokenFile, Version, console, installed_version
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import parse_overrides
from groundwire.train.config.resolve import resolve
from groundwire.train.verl.checks import peft_problem
from groundwire.train.verl.hydra_config import INSTALL

__all__ = ["KNOWN_GOOD", "Check", "app", "examine"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

KNOWN_GOOD = {
    "torch": "2.11.0",
    "vllm": "0.24.0",
    "verl": "0.9.1",
    "ray": "2.60.0",
    "TransferQueue": "0.1.11",
    "tensordict": "0.10.0",
    "transformers": "5.10.4",
}
"""Versions of the GPU packages that work together; docs/verl.md describes their installation."""

_AGENTLIGHTNING = "0.3.0"
_OTEL_LIMIT = (1, 45)
_DISK_GB = {"verl": 50, "local": 1}
_TIMEOUT_S, _IMPORT_S = 10.0, 180.0
_IMPORTED = ("omegaconf", "ray", "flash_attn", "vllm", "verl")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where Ray keeps objects on Linux)
_COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


@dataclass(frozen=True)
class Check:
    """``level`` is ok, warning or failure; ``remedy`` is the advice to the user."""

    level: str
    text: str
    remedy: str = ""


@app.command()
def main(
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="With --plan: the run's settings, e.g. max_batch=64", metavar="[KEY=VALUE]..."),
    ] = None,
    trainer: Annotated[Literal["local", "verl"] | None, typer.Option(help="Fail if this trainer cannot run")] = None,
    model: Annotated[str | None, typer.Option(help="A model's folder: check its chat template")] = None,
    tool_format: Annotated[
        Literal["hermes", "llama3_json"],
        typer.Option(help="How the model writes tool calls: hermes or llama3_json", metavar="FORMAT"),
    ] = "hermes",
    external_store_address: Annotated[
        str | None, typer.Option(help="Address of a store: check that it answers", metavar="URL")
    ] = None,
    token_file: TokenFile = None,
    endpoint: Annotated[
        str | None, typer.Option(help="An OpenAI base URL that ends in /v1: check that it sends token ids")
    ] = None,
    proxy_port: Annotated[
        int, typer.Option(help="A port: check that it is free", metavar="PORT", min=0, max=65535)
    ] = 0,
    output_dir: Annotated[str, typer.Option(help="The folder for runs: check its disk")] = "runs",
    plan: Annotated[
        bool, typer.Option("--plan", help="Predict the GPU memory of a local run with --model and the settings")
    ] = False,
    gpu_memory: Annotated[
        float | None, typer.Option(help="With --plan: GB of the GPU. Without it, this machine's", metavar="GB", min=0)
    ] = None,
    version: Version = False,
) -> None:
    """Check this machine, line by line."""
    with exit_on_user_error():
        read_env_file()
    failed, out = False, console()
    for finding in examine(
        trainer=trainer,
        model=model,
        tool_format=tool_format,
        store=external_store_address,
        token_file=token_file,
        endpoint=endpoint,
        port=proxy_port,
        output_dir=output_dir,
        planned=parse_overrides(settings or []) if plan else None,
        gpu_memory=gpu_memory,
    ):
        out.print(f"{finding.level:8}", style=_COLOURS[finding.level], end=" ")
        out.print(mask_secrets(finding.text), markup=False)
        if finding.remedy:
            out.print(f"         → {finding.remedy}", markup=False)
        failed |= finding.level == "failure"
    raise typer.Exit(failed)


def examine(
    *,
    trainer: str | None = None,
    model: str | None = None,
    tool_format: str = "hermes",
    store: str | None = None,
    token_file: Path | None = None,
    endpoint: str | None = None,
    port: int = 0,
    output_dir: str = "runs",
    planned: dict[str, Any] | None = None,
    gpu_memory: float | None = None,
) -> Iterator[Check]:
    """The findings, in order. A check that raises an error counts as a failure."""
    verl = trainer == "verl"
    checks: list[Callable[[], Iterator[Check]]] = [
        _check_python,
        _check_packages,
        lambda: _check_trainer(verl),
        lambda: _check_port(port),
        lambda: _check_disk(output_dir, _DISK_GB["verl" if verl else "local"]),
        _check_logins,
    ]
    if planned is not None:
        checks.append(lambda: _check_memory({"model": model, **planned}, gpu_memory))
    if model is not None:
        checks.append(lambda: _check_chat_template(model, tool_format))
    if store is not None:
        checks.append(lambda: _check_store(store, token_file))
    if endpoint is not None:
        checks.append(lambda: _check_endpoint(endpoint))
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Check("failure", f"a check raised {type(error).__name__}: {error}", "report this")


def _check_python() -> Iterator[Check]:
    version = platform.python_version()
    if (3, 10) <= sys.version_info[:2] < (3, 14):
        yield Check("ok", f"Python {version}")
    else:
        yield Check("failure", f"Python {version}", "use Python 3.10 to 3.13")


def _check_packages() -> Iterator[Check]:
    found = installed_version("agentlightning")
    if found is None:
        yield Check("failure", "agentlightning is not installed", "pip install -e '.[train]' in a clone")
    else:
        level = "ok" if found == _AGENTLIGHTNING else "warning"
        yield Check(level, f"agentlightning {found} (known good: {_AGENTLIGHTNING})")
    found = installed_version("opentelemetry-sdk")
    if found is not None and tuple(int(part) for part in found.split(".")[:2]) >= _OTEL_LIMIT:
        yield Check("failure", f"opentelemetry-sdk {found} loses spans", "pip install 'opentelemetry-sdk<1.45'")


def _check_trainer(wanted: bool) -> Iterator[Check]:
    """The packages and devices of ``--trainer verl``, then the trainer that a run would use."""
    bad = "failure" if wanted else "warning"
    missing = [package for package in KNOWN_GOOD if installed_version(package) is None]
    for package, good in KNOWN_GOOD.items():
        found = installed_version(package)
        if found is not None and (wanted or "verl" not in missing or package not in ("torch", "transformers")):
            same = found.split("+")[0] == good  # 2.11.0+cu130
            yield Check("ok" if same else "warning", f"{package} {found} (known good: {good})", "" if same else INSTALL)
    cuda, devices = _cuda_devices()
    if "verl" in missing and not wanted:
        yield Check("ok", f"trainer: local, because verl is not installed; {devices}")
        return
    if missing:
        yield Check(bad, f"not installed: {', '.join(missing)}", INSTALL)
    yield Check("ok", devices) if cuda else Check(bad, devices, "install a driver and a torch built for it")
    yield from _check_imports(bad)
    if "verl" not in missing and (problem := peft_problem()):
        yield Check("warning", f"LoRA: {problem[0]}", problem[1])
    if importlib.util.find_spec("flash_attn") is None:
        yield Check("ok", "flash-attn is not installed: torch's own attention is used")
    if _SHARED_MEMORY.exists() and (size := shutil.disk_usage(_SHARED_MEMORY).total / 1e9) < 1:
        remedy = "in a container: docker run --shm-size=16g"
        yield Check("warning", f"{_SHARED_MEMORY} has {size:.1f} GB, and Ray keeps its objects there", remedy)
    if cuda and not missing:
        yield Check("ok", "trainer: verl")
    elif cuda and "verl" not in missing and not wanted:
        remedy = "fix the warnings above, or use --trainer local"
        yield Check("warning", "trainer: verl is this machine's default, but it cannot run", remedy)
    elif wanted:
        yield Check("failure", "trainer: verl cannot run here", "fix the failures above, or use --trainer local")
    else:
        yield Check("ok", "trainer: local")


def _check_imports(level: str) -> Iterator[Check]:
    """Import the packages of ``--trainer verl`` that are installed, each in a process of its own: some end with it."""
    found = [name for name in _IMPORTED if importlib.util.find_spec(name) is not None]
    programs = {
        name: subprocess.Popen(  # noqa: S603 (our own interpreter)
            [sys.executable, "-c", f"import {name}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for name in found
    }
    for name, program in programs.items():
        try:
            errors = program.communicate(timeout=_IMPORT_S)[1]
        except subprocess.TimeoutExpired:
            program.kill()
            program.communicate()
            yield Check(level, f"import {name} takes more than {_IMPORT_S:g} s")
            continue
        if program.returncode:
            lines = [line.strip() for line in errors.splitlines() if line.strip()]
            reason = lines[-1] if lines else f"the process ended with {program.returncode}"
            yield Check(level, f"import {name} fails: {reason}", INSTALL)
        else:
            yield Check("ok", f"import {name}")


def _check_memory(given: dict[str, Any], gigabytes: float | None) -> Iterator[Check]:
    """The predicted memory of a local run on a GPU."""
    import torch

    from groundwire.train.local.update.memory_plan import plan_run

    if gigabytes is None:
        if not torch.cuda.is_available():
            yield Check("failure", "memory: there is no GPU here", "give that of another machine: --gpu-memory 80")
            return
        gigabytes = torch.cuda.get_device_properties(0).total_memory / 1e9
    try:
        plan = plan_run(resolve("hf", trainer="local", device="cuda", **given), int(gigabytes * 1e9))
    except ConfigError as error:
        yield Check("failure", f"memory: {error}")
    else:
        yield Check("ok", f"memory: {plan} predicted, of {gigabytes:.0f} GB")


def _cuda_devices() -> tuple[bool, str]:
    if importlib.util.find_spec("torch") is None:
        return False, "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return False, f"torch {torch.__version__} sees no GPU"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return True, f"torch {torch.__version__} sees {len(names)} GPU(s): {', '.join(sorted(set(names)))}"


def _check_port(port: int) -> Iterator[Check]:
    name = f"port {port}" if port else "a free port"
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
        yield Check("ok", f"{name} on 127.0.0.1")
    except OSError as error:
        yield Check("failure", f"{name} on 127.0.0.1: {error.strerror}", "give another --proxy-port, or 0 for any")


def _check_disk(output_dir: str, wanted_gb: int) -> Iterator[Check]:
    folder = Path(output_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        yield Check("failure", f"{output_dir} cannot be created: {folder} is a file", "give another --output-dir")
        return
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb >= wanted_gb:
        yield Check("ok", f"{free_gb:.0f} GB free in {folder}")
    else:
        remedy = f"checkpoints need about {wanted_gb} GB; give an --output-dir on another disk"
        yield Check("warning", f"{free_gb:.0f} GB free in {folder}", remedy)
    if not os.access(folder, os.W_OK):
        yield Check("failure", f"{folder} cannot be written to", "give another --output-dir")


def _check_logins() -> Iterator[Check]:
    cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    if os.environ.get("HF_TOKEN") or (cache / "token").exists():
        yield Check("ok", "Hugging Face: logged in")
    else:
        yield Check("ok", "Hugging Face: not logged in (only gated models, such as Llama, need it: hf auth login)")
    if installed_version("wandb") is not None:
        netrc = Path.home() / ".netrc"
        in_netrc = netrc.exists() and "api.wandb.ai" in netrc.read_text(errors="replace")
        logged_in = os.environ.get("WANDB_API_KEY") or in_netrc
        state = "logged in" if logged_in else "not logged in (--track wandb needs it: wandb login)"
        yield Check("ok", f"Weights & Biases: {state}")


def _check_chat_template(model: str, tool_format: str) -> Iterator[Check]:
    """Whether the model's chat template writes tool calls in the format that the server parses."""
    folder = Path(model)
    if not (folder / "config.json").is_file():
        yield Check("warning", f"{model} is not a local folder, so its chat template was not checked")
        return
    template, file = "", folder / "chat_template.jinja"
    try:
        if file.is_file():
            template = read_bytes(file).decode()
        elif (file := folder / "tokenizer_config.json").is_file():
            template = str(read_json(file).get("chat_template") or "")
    except (OSError, ValueError, AttributeError) as error:
        yield Check("failure", f"{file} is damaged: {error}", "copy the model again")
        return
    if not template:
        yield Check("failure", f"{model} has no chat template", "use an instruct model, or set its chat_template")
        return
    found = _tool_format(template)
    if found is None:
        remedy = "use the langgraph backend, which calls no tools"
        yield Check("warning", f"the chat template of {model} has no tool calls", remedy)
    elif found != tool_format:
        remedy = f"actor_rollout_ref.rollout.multi_turn.format={found}"
        yield Check("failure", f"{model} writes tool calls as {found}, but they are parsed as {tool_format}", remedy)
    else:
        yield Check("ok", f"{model}: chat template with {found} tool calls")


def _tool_format(template: str) -> str | None:
    if "<tool_call>" in template and "<function=" not in template:  # Qwen3-Coder has XML inside the tag, not JSON
        return "hermes"
    return "llama3_json" if '"parameters"' in template else None


def _check_store(address: str, token_file: Path | None) -> Iterator[Check]:
    from groundwire.train.store.errors import StoreAddressError
    from groundwire.train.store.health import check_store

    try:
        check_store(address, token=token_for(address, token_file), starting=False)
        yield Check("ok", f"store at {address}")
    except TokenError as error:
        yield Check("failure", str(error), "correct the token")
    except StoreAddressError as error:
        yield Check("failure", str(error), "start the store, or correct the address or the token")


def _check_endpoint(url: str) -> Iterator[Check]:
    """Training needs the token ids of prompt and reply, and a logprob for each token of the reply."""
    from groundwire.train.evaluation.probe_endpoint import EndpointUnusableError, probe_endpoint

    try:
        probe = probe_endpoint(url, sampling={"max_tokens": 4}, timeout_s=_TIMEOUT_S)
    except EndpointUnusableError as error:
        yield Check("failure", str(error), "start the server, or correct --endpoint")
        return
    if probe.sends_ids:
        yield Check("ok", f"{url}: token ids and logprobs")
    else:
        yield Check("failure", f"{url} sends no token ids with logprobs", "serve the model with vLLM 0.10.2 or newer")


if __name__ == "__main__":
    app()
