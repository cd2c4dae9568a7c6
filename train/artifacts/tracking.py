"""Sends the metrics of a run to TensorBoard, Weights & Biases and SwanLab, for the local trainer.

verl has its own trackers and only gets their names (:mod:`groundwire.train.verl.hydra_config`). A resumed run continues
in the same TensorBoard folder, and as the same run of W&B or SwanLab.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from groundwire.tools.secrets import has_credentials, mask_secrets, masked_values, say
from groundwire.train.artifacts.run_dir import RunDir
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import flat

TENSORBOARD_FOLDER = "tensorboard"
_PROJECT = "groundwire"
_OTLP_S = 5.0
_WANDB_URL = "https://api.wandb.ai"
_OFFLINE = {"wandb": ("offline", "disabled", "dryrun"), "swanlab": ("local", "offline", "disabled")}
"""The modes in which a service needs no login."""

Log = Callable[[int, dict[str, float]], None]


def check_trackers(names: Sequence[str]) -> None:
    """Raise :class:`ConfigError` if a tracker is not installed or not logged in, without importing it."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            extra = "swanlab" if name == "swanlab" else "track"
            raise ConfigError(f"--track {name}: its package is not installed: pip install -e '.[{extra}]' in a clone")
        if not logged_in(name):
            raise ConfigError(
                f"--track {name}: nobody is logged in: run {name} login, or set {name.upper()}_API_KEY, or "
                f"{name.upper()}_MODE=offline"
            )


def check_otlp(url: str) -> None:
    """Raise :class:`ConfigError` if ``url`` is no address, or nothing answers there."""
    import httpx

    if not url.startswith(("http://", "https://")) or has_credentials(url):
        raise ConfigError(
            f"--otlp {mask_secrets(url)}: give http://HOST:PORT without user and query; headers with keys go into "
            "OTEL_EXPORTER_OTLP_HEADERS"
        )
    check_otlp_package("--otlp")
    try:
        httpx.get(url, timeout=_OTLP_S)
    except httpx.HTTPError as error:
        raise ConfigError(f"--otlp {url}: nothing answers there ({error or type(error).__name__})") from error


def check_otlp_package(option: str) -> None:
    """Raise :class:`ConfigError` if what ``option`` needs is not installed."""
    parents = ("opentelemetry.exporter", "opentelemetry.exporter.otlp")  # a missing parent is an error
    if any(importlib.util.find_spec(name) is None for name in (*parents, "opentelemetry.exporter.otlp.proto.http")):
        raise ConfigError(f"{option}: its package is not installed: pip install 'groundwire[otlp]'")


def logged_in(name: str) -> bool:
    """Whether a tracker is installed and can be used without a question; nothing is imported."""
    if importlib.util.find_spec(name) is None:
        return False
    if name not in _OFFLINE:
        return True
    variable = name.upper()
    if os.environ.get(f"{variable}_MODE") in _OFFLINE[name] or os.environ.get(f"{variable}_API_KEY"):
        return True
    if name == "wandb":
        host = str(urlsplit(os.environ.get("WANDB_BASE_URL") or _WANDB_URL).hostname)
        with suppress(OSError):
            return host in Path(os.environ.get("NETRC") or Path.home() / ".netrc").read_text(errors="replace")
        return False
    own = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR") or Path.home() / ".swanlab"
    return any((Path(folder) / ".netrc").is_file() for folder in (".swanlab", own))


@contextmanager
def open_trackers(config: Any, run: RunDir, *, first_step: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Open the trackers in ``config.track``; yields a function that logs a line of ``metrics.jsonl`` to all of them.

    ``first_step`` is the last step of the run before it was resumed, or 0.
    """
    with ExitStack() as stack:
        logs = [stack.enter_context(_TRACKERS[name](config, run, first_step)) for name in config.track]

        def log_line(line: Mapping[str, Any]) -> None:
            for log in logs:
                log(int(line["step"]), dict(flat_numbers(line)))

        yield log_line


def flat_numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers in a line of ``metrics.jsonl``, without its step, by names such as ``validation/accuracy``."""
    for name, value in flat(line, "/"):
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            yield name, float(value)


def wandb_environment(run: RunDir) -> dict[str, str]:
    """Variables with which W&B recognises a resumed run, and writes its files to the run directory."""
    return {"WANDB_RUN_ID": run.resources_id, "WANDB_RESUME": "allow", "WANDB_DIR": str(run.path.resolve())}


@contextmanager
def _tensorboard(config: Any, run: RunDir, first_step: int) -> Iterator[Log]:
    from torch.utils.tensorboard import SummaryWriter

    folder = run.path / TENSORBOARD_FOLDER
    # Hides steps without a checkpoint, which a resumed run repeats.
    purge = first_step + 1 if folder.exists() and first_step else None
    writer = SummaryWriter(str(folder), purge_step=purge)

    def log(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def _wandb(config: Any, run: RunDir, first_step: int) -> Iterator[Log]:
    import wandb

    variables = {name: os.environ.get(name) or value for name, value in wandb_environment(run).items()}
    options = {"id": variables["WANDB_RUN_ID"], "resume": "allow", "dir": variables["WANDB_DIR"]}
    options["settings"] = wandb.Settings(silent=True, console="off")
    project = os.environ.get("WANDB_PROJECT")
    with _opened("wandb", wandb.init, project, config, run, options) as wandb_run:
        address = wandb_run.url or f"offline; wandb sync {wandb_run.settings.sync_dir} uploads it"
        say(f"wandb: {address}", err=True)
        yield lambda step, metrics: wandb_run.log(metrics, step=step)


@contextmanager
def _swanlab(config: Any, run: RunDir, first_step: int) -> Iterator[Log]:
    import swanlab

    mode = os.environ.get("SWANLAB_MODE") or "online"
    folder = os.environ.get("SWANLAB_LOG_DIR") or str(run.path.resolve() / "swanlab")
    options = {"mode": mode, "log_dir": folder}
    options |= {"id": run.resources_id, "resume": "allow"} if mode == "online" else {}
    project = os.environ.get("SWANLAB_PROJ_NAME")
    with _opened("swanlab", swanlab.init, project, config, run, options) as swanlab_run:
        yield lambda step, metrics: swanlab_run.log(metrics, step=step)


@contextmanager
def _opened(
    name: str, init: Callable[..., Any], project: str | None, config: Any, run: RunDir, options: Mapping[str, Any]
) -> Iterator[Any]:
    """The run of a service, which has the run's settings, and is finished at the end."""
    settings = masked_values(config.to_dict())
    try:
        opened = init(project=project or _PROJECT, name=run.path.name, config=settings, **options)
    except Exception as error:  # SwanLab has no base class for its errors
        message = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--track {name}: {message} ({name} login, or {name.upper()}_MODE=offline)") from error
    try:
        yield opened
    finally:
        opened.finish()


_TRACKERS: dict[str, Callable[[Any, RunDir, int], AbstractContextManager[Log]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "swanlab": _swanlab,
}
