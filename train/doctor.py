"""``python -m train.doctor``: is this machine ready, and if not, what to do.

Each line is ``ok``, ``warning`` or ``failure``; the exit status is 1 where there is a failure. Nothing is changed and
nothing is fetched. Without any GPU package it says that the local trainer is what will be used, and why.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from groundwire.tools.terminal import Version, console
from groundwire.train.policy.tool_parsers import FORMATS
from groundwire.train.verl.checks import peft_problem
from groundwire.train.verl.hydra_config import INSTALL

__all__ = ["KNOWN_GOOD", "Line", "app", "examine"]

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
"""The GPU packages that were seen to work together; docs/verl.md says how to install them."""

_CORE = {"agentlightning": "0.3.0"}
_OTEL_LIMIT = (1, 45)
_DISK_GB = {"verl": 50, "local": 1}
_TIMEOUT_S = 10.0
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where Ray keeps objects on Linux)


@dataclass(frozen=True)
class Line:
    """One finding: ``level`` is ok, warning or failure."""

    level: str
    text: str
    what_to_do: str = ""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked about."""

    trainer: str | None = None
    model: str | None = None
    tool_format: str = "hermes"
    store: str | None = None
    endpoint: str | None = None
    port: int = 0
    output_dir: str = "runs"


@app.command()
def main(
    trainer: Annotated[str | None, typer.Option(help="local or verl: fail where that one cannot run")] = None,
    model: Annotated[str | None, typer.Option(help="A model's folder: does its chat template fit?")] = None,
    tool_format: Annotated[str, typer.Option(help="How its tool calls are read: hermes or llama3_json")] = "hermes",
    external_store_address: Annotated[str | None, typer.Option(help="A store: is it reachable?")] = None,
    endpoint: Annotated[str | None, typer.Option(help="An OpenAI base URL (…/v1): does it send token ids?")] = None,
    proxy_port: Annotated[int, typer.Option(help="A port: is it free?")] = 0,
    output_dir: Annotated[str, typer.Option(help="Where runs are to go: is there room?")] = "runs",
    version: Version = False,
) -> None:
    """Check this machine, line by line."""
    for name, said, known in (("trainer", trainer, sorted(_DISK_GB)), ("tool-format", tool_format, sorted(FORMATS))):
        if said is not None and said not in known:
            typer.echo(f"error: --{name} is {said!r}; it is one of {', '.join(known)}", err=True)
            raise typer.Exit(2)
    options = Options(
        trainer=trainer,
        model=model,
        tool_format=tool_format,
        store=external_store_address,
        endpoint=endpoint,
        port=proxy_port,
        output_dir=output_dir,
    )
    colours = {"ok": "green", "warning": "yellow", "failure": "red"}
    failed, shown = 0, console()
    for line in examine(options):
        shown.print(f"{line.level:8}", style=colours[line.level], end=" ")
        shown.print(line.text, markup=False)
        if line.what_to_do:
            shown.print(f"         → {line.what_to_do}", markup=False)
        failed += line.level == "failure"
    raise typer.Exit(1 if failed else 0)


def examine(options: Options) -> Iterator[Line]:
    """Every finding, in order. A check that breaks is a failure of its own."""
    wants_verl = options.trainer == "verl"
    checks: list[Callable[[], Iterator[Line]]] = [
        _python,
        _core,
        lambda: _gpu(wants_verl),
        lambda: _ports(options.port),
        lambda: _disk(options.output_dir, "verl" if wants_verl else "local"),
        _logins,
    ]
    if options.model is not None:
        checks.append(lambda: _tool_calls(options.model or "", options.tool_format))
    if options.store is not None:
        checks.append(lambda: _store(options.store or ""))
    if options.endpoint is not None:
        checks.append(lambda: _endpoint(options.endpoint or ""))
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # a doctor who falls ill says so, and goes on
            yield Line("failure", f"a check broke: {type(error).__name__}: {error}", "report this")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _python() -> Iterator[Line]:
    version = platform.python_version()
    fits = (3, 10) <= sys.version_info[:2] < (3, 14)
    yield Line("ok" if fits else "failure", f"Python {version}", "" if fits else "use Python 3.10 to 3.13")


def _core() -> Iterator[Line]:
    for package, good in _CORE.items():
        found = _version(package)
        if found is None:
            yield Line("failure", f"{package} is not installed", "pip install -e . in a clone")
        else:
            yield Line("ok" if found == good else "warning", f"{package} {found} (known good: {good})")
    found = _version("opentelemetry-sdk")
    if found is not None and tuple(int(part) for part in found.split(".")[:2]) >= _OTEL_LIMIT:
        yield Line("failure", f"opentelemetry-sdk {found}: spans get lost", "pip install 'opentelemetry-sdk<1.45'")


def _gpu(wanted: bool) -> Iterator[Line]:
    """The stack of ``--trainer verl``, and which trainer it comes to."""
    bad = "failure" if wanted else "warning"
    missing = [package for package in KNOWN_GOOD if _version(package) is None]
    for package, good in KNOWN_GOOD.items():
        found = _version(package)
        if found is not None and (wanted or "verl" not in missing or package not in ("torch", "transformers")):
            fits = found.split("+")[0] == good  # 2.11.0+cu130
            yield Line("ok" if fits else "warning", f"{package} {found} (known good: {good})", "" if fits else INSTALL)
    cuda, why = _cuda()
    if "verl" in missing and not wanted:
        yield Line("ok", f"trainer: local, because verl is not installed; {why}")
        return
    if missing:
        yield Line(bad, f"not installed: {', '.join(missing)}", INSTALL)
    yield Line("ok" if cuda else bad, why, "" if cuda else "install a driver and a torch built for it")
    if "verl" not in missing and (problem := peft_problem()):
        yield Line("warning", f"LoRA: {problem[0]}", problem[1])
    if importlib.util.find_spec("flash_attn") is None:
        yield Line("ok", "flash-attn is not installed: torch's own attention (sdpa) is used")
    if _SHARED_MEMORY.exists() and (shared := shutil.disk_usage(_SHARED_MEMORY).total / 1e9) < 1:
        hint = "docker run --shm-size=16g, where this is a container"
        yield Line("warning", f"{_SHARED_MEMORY} has {shared:.1f} GB, and Ray keeps objects there", hint)
    if cuda and not missing:
        yield Line("ok", "trainer: verl")
    elif cuda and "verl" not in missing and not wanted:
        hint = "mend the warnings above, or say --trainer local"
        yield Line("warning", "trainer: verl, which a run takes by itself here, and which cannot run", hint)
    elif wanted:
        yield Line("failure", "trainer: verl cannot run here", "mend the failures above, or train with --trainer local")
    else:
        yield Line("ok", "trainer: local")


def _cuda() -> tuple[bool, str]:
    if importlib.util.find_spec("torch") is None:
        return False, "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return False, f"torch {torch.__version__} sees no GPU"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return True, f"torch {torch.__version__} sees {len(names)} GPU(s): {', '.join(sorted(set(names)))}"


def _ports(port: int) -> Iterator[Line]:
    what = f"port {port}" if port else "a free port"
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
        yield Line("ok", f"{what} on 127.0.0.1")
    except OverflowError:
        yield Line("failure", f"{port} is no port", "give a --proxy-port of 0 (any) to 65535")
    except OSError as error:
        yield Line("failure", f"{what} on 127.0.0.1: {error.strerror}", "give another --proxy-port, or 0 for any")


def _disk(output_dir: str, trainer: str) -> Iterator[Line]:
    folder = Path(output_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        yield Line("failure", f"{folder} is a file: {output_dir} cannot be made", "give another --output-dir")
        return
    free = shutil.disk_usage(folder).free / 1e9
    wanted = _DISK_GB[trainer]
    hint = f"{wanted} GB are a fair start for checkpoints; --output-dir takes another disk"
    yield Line("ok" if free >= wanted else "warning", f"{free:.0f} GB free in {folder}", "" if free >= wanted else hint)
    if not os.access(folder, os.W_OK):
        yield Line("failure", f"{folder} cannot be written to", "give another --output-dir")


def _logins() -> Iterator[Line]:
    cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    if os.environ.get("HF_TOKEN") or (cache / "token").exists():
        yield Line("ok", "Hugging Face: logged in")
    else:
        yield Line("ok", "Hugging Face: not logged in (only gated models, such as Llama, need it: hf auth login)")
    if _version("wandb") is not None:
        netrc = Path.home() / ".netrc"
        inside = netrc.exists() and "api.wandb.ai" in netrc.read_text(errors="replace")
        known = bool(os.environ.get("WANDB_API_KEY")) or inside
        hint = "wandb login, before --track wandb"
        yield Line("ok", "Weights & Biases: logged in") if known else Line("ok", f"Weights & Biases: no login ({hint})")


def _tool_calls(model: str, tool_format: str) -> Iterator[Line]:
    """How the model was taught to write tool calls, by its chat template."""
    folder = Path(model)
    if not (folder / "config.json").is_file():
        yield Line("warning", f"{model} is no folder here: its chat template is not looked at")
        return
    template = ""
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text()
    elif (folder / "tokenizer_config.json").is_file():
        try:
            template = str(json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template") or "")
        except (ValueError, AttributeError) as error:
            yield Line("failure", f"{folder / 'tokenizer_config.json'} is damaged: {error}", "copy the model once more")
            return
    if not template:
        yield Line("failure", f"{model} has no chat template", "take an instruct model, or set its chat_template")
        return
    found = _tool_format(template)
    if found is None:
        hint = "use the langgraph backend, which calls no tools"
        yield Line("warning", f"{model}: its chat template knows no tool calls", hint)
    elif found != tool_format:
        hint = f"actor_rollout_ref.rollout.multi_turn.format={found}"
        yield Line("failure", f"{model} writes {found} tool calls, and {tool_format} is what is read", hint)
    else:
        yield Line("ok", f"{model}: chat template with {found} tool calls")


def _tool_format(template: str) -> str | None:
    if "<tool_call>" in template and "<function=" not in template:  # Qwen3-Coder has XML in it instead of JSON
        return "hermes"
    return "llama3_json" if '"parameters"' in template else None


def _store(address: str) -> Iterator[Line]:
    from groundwire.train.store.errors import StoreAddressError
    from groundwire.train.store.health import check_store

    try:
        check_store(address, starting=False)
        yield Line("ok", f"store at {address}")
    except StoreAddressError as error:
        yield Line("failure", str(error), "python -m train.store --path store.db")


def _endpoint(url: str) -> Iterator[Line]:
    """What training needs of a server: token ids of prompt and reply, and a logprob for each."""
    base = url.rstrip("/")
    try:
        models = json.loads(_get(f"{base}/models"))
        body = {
            "model": models["data"][0]["id"],
            "messages": [{"role": "user", "content": "Say hello."}],
            "max_tokens": 4,
            "logprobs": True,
            "return_token_ids": True,
        }
        reply = json.loads(_get(f"{base}/chat/completions", body))
        choice: dict[str, Any] = reply["choices"][0]
    except urllib.error.HTTPError as error:
        said = error.read(300).decode(errors="replace")
        hint = "its base URL ends in /v1" if error.code == 404 else f"it said: {said}"
        yield Line("failure", f"{base} answered HTTP {error.code} {error.reason}", hint)
        return
    except OSError as error:
        yield Line("failure", f"{base} does not answer: {getattr(error, 'reason', error)}", "start the server there")
        return
    except (ValueError, LookupError, TypeError) as error:
        yield Line("failure", f"{base} does not answer as an OpenAI endpoint: {error!r}", "its base URL ends in /v1")
        return
    ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("content")
    if not reply.get("prompt_token_ids") or not ids or not logprobs or len(ids) != len(logprobs):
        yield Line("failure", f"{base} sends no token ids with logprobs", "serve the model with vLLM 0.10.2 or newer")
    else:
        yield Line("ok", f"{base}: token ids and logprobs")


def _get(url: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})  # noqa: S310
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_TIMEOUT_S) as reply:
        answer: bytes = reply.read()
        return answer


if __name__ == "__main__":
    app()
