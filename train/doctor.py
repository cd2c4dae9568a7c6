"""``groundwire doctor``: check this machine, and give advice about each problem.

Each finding is ``ok``, ``warning`` or ``failure``; the exit code is 1 if there is a failure. Nothing is changed
here, but that a GGUF file is converted once into the user's cache folder.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from groundwire.tools.errors import UserError, exit_on_user_error, missing_layer
from groundwire.tools.http.access_token import token_for
from groundwire.tools.startup import read_env_file
from groundwire.tools.terminal import TokenFile, Version, console, installed_version, show_line
from groundwire.train.artifacts.tracking import logged_in
from groundwire.train.cli.machine_checks import (
    Check,
    check_disk,
    check_gpus,
    check_memory,
    check_packages,
    check_python,
    check_shared_memory,
    check_trainer,
    planned_settings,
)
from groundwire.train.config.errors import ConfigError
from groundwire.train.job.trainer import trainer_of
from groundwire.train.policy.chat.tool_formats import FORMATS, THINK, written_format
from groundwire.train.policy.pretrained.locate import find_model, is_hub_name, read_chat_templates

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_ENDPOINT_S = 10.0
_COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


@app.command()
def main(
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="With --plan: preset and settings, e.g. hf n_runners=64", metavar="[PRESET] [KEY=VALUE]..."
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="With --plan: preset or file of settings", show_default="hf", metavar="CONFIG")
    ] = None,
    trainer: Annotated[Literal["local", "verl"] | None, typer.Option(help="Fail if this trainer cannot run")] = None,
    model: Annotated[str | None, typer.Option(help="A model: check its chat template")] = None,
    tool_format: Annotated[
        Literal[tuple(FORMATS)] | None,  # type: ignore[valid-type]
        typer.Option(
            help="How tool calls are read. Default: as the template writes them; verl: hermes", metavar="FORMAT"
        ),
    ] = None,
    external_store_address: Annotated[
        str | None, typer.Option(help="A store's address: check that it answers", metavar="URL")
    ] = None,
    token_file: TokenFile = None,
    endpoint: Annotated[
        str | None, typer.Option(help="An OpenAI base URL (/v1): check that it sends token ids; key: OPENAI_API_KEY")
    ] = None,
    proxy_port: Annotated[
        int, typer.Option(help="A port: check that it is free", metavar="PORT", min=0, max=65535)
    ] = 0,
    output_dir: Annotated[str, typer.Option(help="The folder for runs: check its disk")] = "runs",
    plan: Annotated[bool, typer.Option("--plan", help="Predict a run's GPU memory")] = False,
    gpu_memory: Annotated[
        float | None, typer.Option(help="With --plan: GB of the GPU; default: this machine's", metavar="GB", min=0)
    ] = None,
    version: Version = False,
) -> None:
    """Check this machine, line by line."""
    with exit_on_user_error():
        read_env_file()
        of_plan = "the settings of a run have" if settings or config else ""
        of_plan = of_plan or (f"--gpu-memory {gpu_memory:g} has" if gpu_memory is not None else "")
        if of_plan and not plan:
            raise ConfigError(f"{of_plan} a use with --plan only: add it, or leave it out")
        if gpu_memory is not None and not 0 < gpu_memory < math.inf:
            raise ConfigError(f"--gpu-memory is {gpu_memory:g}: give the GB of the GPU, e.g. 80")
        planned = planned_settings(config, model, trainer, settings or []) if plan else None
    failed, output = False, console()
    for finding in examine(
        trainer=trainer,
        model=model,
        tool_format=tool_format,
        store=external_store_address,
        token_file=token_file,
        endpoint=endpoint,
        port=proxy_port,
        output_dir=output_dir,
        planned=planned,
        gpu_memory=gpu_memory,
    ):
        show_line(output, f"{finding.level:8}", _COLOURS[finding.level], end=" ")
        show_line(output, finding.text)
        if finding.remedy:
            show_line(output, f"         → {finding.remedy}")
        failed |= finding.level == "failure"
    raise typer.Exit(failed)


def examine(
    *,
    trainer: str | None = None,
    model: str | None = None,
    tool_format: str | None = None,
    store: str | None = None,
    token_file: Path | None = None,
    endpoint: str | None = None,
    port: int = 0,
    output_dir: str = "runs",
    planned: dict[str, Any] | None = None,
    gpu_memory: float | None = None,
) -> Iterator[Check]:
    """The findings, in order. A check that raises an error counts as a failure."""
    wanted = trainer_of(trainer or "local")
    checks = [  # generators: each runs, and fails, when it is iterated
        check_python(),
        check_packages(),
        check_gpus(),
        check_trainer(not wanted.in_process),
        _check_port(port),
        check_disk(output_dir, wanted.disk_gb),
        check_shared_memory(),
        _check_logins(),
    ]
    checks += [check_memory(planned, gpu_memory)] if planned is not None else []
    checks += (
        [_check_chat_template(model, tool_format or ("" if wanted.in_process else "hermes"))]
        if model is not None
        else []
    )
    checks += [_check_store(store, token_file)] if store is not None else []
    checks += [_check_endpoint(endpoint)] if endpoint is not None else []
    for check in checks:
        try:
            yield from check
        except UserError as error:
            yield Check("failure", str(error))
        except ModuleNotFoundError as error:
            yield Check("failure", missing_layer(error) or f"a module is missing: {error}")
        except Exception as error:
            yield Check("failure", f"a check raised {type(error).__name__}: {error}", "report this")


def _check_port(port: int) -> Iterator[Check]:
    name = f"port {port}" if port else "a free port"
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
        yield Check("ok", f"{name} on 127.0.0.1")
    except OSError as error:
        yield Check("failure", f"{name} on 127.0.0.1: {error.strerror}", "give another --proxy-port, or 0 for any")


def _check_logins() -> Iterator[Check]:
    cache = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    has_token = os.environ.get("HF_TOKEN") or (cache / "token").exists()
    state = "logged in" if has_token else "not logged in (only gated models, such as Llama, need it: hf auth login)"
    yield Check("ok", f"Hugging Face: {state}")
    if installed_version("wandb") is not None:
        state = "logged in" if logged_in("wandb") else "not logged in (--track wandb needs it: wandb login)"
        yield Check("ok", f"Weights & Biases: {state}")


def _check_chat_template(model: str, tool_format: str | None) -> Iterator[Check]:
    """Whether the model's chat template writes tool calls in the format that the server parses; None for any."""
    if is_hub_name(model):
        yield Check("warning", f"{model} is a model of the hub, so its chat template was not checked")
        return
    templates, _ = read_chat_templates(find_model(model))
    template = "\n".join(filter(None, templates.values()))
    if not template:
        yield Check("failure", f"{model} has no chat template", "use an instruct model, or set its chat_template")
        return
    written = written_format(template)
    if written is None:
        remedy = "use the langgraph backend, which calls no tools"
        yield Check("warning", f"the chat template of {model} has no tool calls", remedy)
    elif tool_format and FORMATS[written].read is not FORMATS[tool_format].read:
        remedy = f"actor_rollout_ref.rollout.multi_turn.format={written}"
        yield Check("failure", f"{model} writes tool calls as {written}, but they are parsed as {tool_format}", remedy)
    else:
        thinks = " and reasoning in <think>" if THINK in template else ""
        yield Check("ok", f"{model}: chat template with {written} tool calls{thinks}")


def _check_store(address: str, token_file: Path | None) -> Iterator[Check]:
    from groundwire.train.store.health import check_store

    try:
        check_store(address, token=token_for(address, token_file), timeout_s=0)
        yield Check("ok", f"store at {address}")
    except UserError as error:
        yield Check("failure", str(error), "start the store, or correct the address or the token")


def _check_endpoint(url: str) -> Iterator[Check]:
    """Training needs the token ids of prompt and reply, and a logprob for each token of the reply."""
    from groundwire.train.evaluation.probe_endpoint import probe_endpoint

    try:
        key = os.environ.get("OPENAI_API_KEY")
        probe = probe_endpoint(url, api_key=key, sampling={"max_tokens": 4}, timeout_s=_ENDPOINT_S)
    except ConfigError as error:
        yield Check("failure", str(error), "start the server, or correct --endpoint")
        return
    if probe.sends_ids:
        yield Check("ok", f"{url}: token ids and logprobs")
    else:
        yield Check("failure", f"{url} sends no token ids with logprobs", "serve the model with vLLM 0.10.2 or newer")


if __name__ == "__main__":
    app()
