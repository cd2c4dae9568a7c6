"""Checks of this machine for ``groundwire doctor``: Python, versions of packages, GPUs, disk and shared memory."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from groundwire.tools.errors import UserError
from groundwire.tools.terminal import installed_version
from groundwire.train.cli.options import with_preset
from groundwire.train.config.overrides import merge_overrides, parse_overrides
from groundwire.train.config.resolve import resolve, with_file
from groundwire.train.job.trainer import default_trainer, trainer_of
from groundwire.train.verl.hydra_config import INSTALL
from groundwire.train.verl.launch import peft_problem

_VERL = {"verl": "0.9.1", "ray": "2.60.0", "TransferQueue": "0.1.11", "tensordict": "0.10.0", "transformers": "5.10.4"}
VERSION_SETS = {
    "verl": {"torch": "2.11.0", "vllm": "0.24.0", **_VERL},
    "verl-newest": {"torch": "2.13.0", "vllm": "0.31.0", **_VERL},
    "laptop": {
        "torch": "2.13.0",
        "transformers": "5.23.0",
        "tokenizers": "0.23.3",
        "llguidance": "1.9.1",
        "langgraph": "1.2.22",
        "openai-agents": "0.20.0",
    },
}
"""Sets of versions that were tested together: ``verl`` and ``verl-newest``, the extras of these names, on Python 3.12,
CUDA 13 and a GPU (docs/verl.md has their installation), ``laptop`` is that of requirements/train.txt."""

_AGENTLIGHTNING = "0.3.0"
_OTEL_LIMIT = (1, 45)
_DRIVERS = {13: 580, 12: 525}
"""The oldest major version of NVIDIA's driver for each major version of CUDA (CUDA's release notes)."""
_IMPORT_S, _SMI_S = 180.0, 20.0
_IMPORTED = ("omegaconf", "ray", "flash_attn", "vllm", "verl")
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (where Ray keeps objects on Linux)
_SMI = ("nvidia-smi", "--query-gpu=driver_version,name,memory.total,memory.free", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Check:
    """``level`` is ok, warning or failure; ``remedy`` is the advice to the user."""

    level: str
    text: str
    remedy: str = ""

    @classmethod
    def that(cls, fine: bool, text: str, remedy: str = "", *, level: str = "warning") -> Check:
        """ok if it is ``fine``, else ``level`` with the remedy."""
        return cls("ok", text) if fine else cls(level, text, remedy)


def check_python() -> Iterator[Check]:
    """The version of Python."""
    text, minor = f"Python {platform.python_version()}", sys.version_info[:2]
    if minor == (3, 14):
        yield Check("warning", f"{text} runs agents (--runner-python)", "for the trainer use 3.10 to 3.13")
    elif (3, 10) <= minor < (3, 14):
        yield Check("ok", text)
    else:
        yield Check("failure", text, "use Python 3.10 to 3.13")


def check_packages() -> Iterator[Check]:
    """PyTorch, Agent Lightning, and how this laptop's versions differ from those that were tested."""
    if installed_version("torch") is None:
        yield Check("failure", "torch is not installed, so nothing can be trained", "pip install 'groundwire[train]'")
        return
    if (lightning := installed_version("agentlightning")) is not None:
        yield Check.that(lightning == _AGENTLIGHTNING, f"agentlightning {lightning} (known good: {_AGENTLIGHTNING})")
        tracing = installed_version("opentelemetry-sdk")
        if tracing is not None and tuple(map(int, tracing.split(".")[:2])) >= _OTEL_LIMIT:
            remedy = "pip install 'opentelemetry-sdk<1.45'"
            yield Check("failure", f"opentelemetry-sdk {tracing} loses the spans of agentlightning", remedy)
    if installed_version("verl") is not None:
        return  # compared with verl's set
    installed = {name: installed_version(name) or "missing" for name in VERSION_SETS["laptop"]}
    others = [
        f"{name} {installed[name]} ({good})" for name, good in VERSION_SETS["laptop"].items() if _differs(name, good)
    ]
    text = f"other versions than in requirements/train.txt: {', '.join(others)}" if others else "as tested together"
    yield Check("ok", f"packages: {text}")


def _differs(name: str, known: str) -> bool:
    return (installed_version(name) or "").split("+")[0] != known  # 2.11.0+cu130


def check_trainer(wanted: bool) -> Iterator[Check]:
    """The packages and devices of ``--trainer verl``, then the trainer that a run would use."""
    sets = [VERSION_SETS["verl"], VERSION_SETS["verl-newest"]]
    known = min(sets, key=lambda versions: sum(_differs(*version) for version in versions.items()))
    missing = [package for package in known if installed_version(package) is None]
    cuda, devices = cuda_devices()
    if "verl" in missing and not wanted:
        yield Check("ok", f"trainer: local, because verl is not installed; {devices}")
        return
    bad = "failure" if wanted else "warning"
    for package, good in known.items():
        if package not in missing:
            text = f"{package} {installed_version(package)} (known good: {good})"
            yield Check.that(not _differs(package, good), text, INSTALL)
    if missing:
        yield Check(bad, f"not installed: {', '.join(missing)}", INSTALL)
    yield Check.that(cuda, devices, "install a driver and a torch built for it", level=bad)
    yield from check_imports(bad)
    if "verl" not in missing and (problem := peft_problem()):
        yield Check("warning", f"LoRA: {problem[0]}", problem[1])
    attention = installed_version("flash-attn")
    yield Check("ok", f"flash-attn {attention or 'is not installed: torch has its own attention'}")
    if cuda and not missing:
        yield Check("ok", "trainer: verl")
    elif wanted:
        yield Check("failure", "trainer: verl cannot run here", "fix the failures above, or use --trainer local")
    elif cuda:
        remedy = "fix the warnings above, or use --trainer local"
        yield Check("warning", "trainer: verl is this machine's default, but it cannot run", remedy)
    else:
        yield Check("ok", "trainer: local")


def check_imports(level: str) -> Iterator[Check]:
    """Import the packages of ``--trainer verl`` that are installed, each in a process of its own: some end with it."""
    programs = {
        name: subprocess.Popen(  # noqa: S603 (our own interpreter)
            [sys.executable, "-c", f"import {name}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for name in _IMPORTED
        if importlib.util.find_spec(name) is not None
    }
    for name, program in programs.items():
        try:
            errors = program.communicate(timeout=_IMPORT_S)[1]
        except subprocess.TimeoutExpired:
            program.kill()
            program.communicate()
            yield Check(level, f"import {name} takes more than {_IMPORT_S:g} s")
            continue
        last = errors.strip().rpartition("\n")[2].strip() or f"the process ended with {program.returncode}"
        failed = f" fails: {last}" if program.returncode else ""
        yield Check.that(not failed, f"import {name}{failed}", INSTALL, level=level)


def cuda_devices() -> tuple[bool, str]:
    """Whether torch sees a GPU, and a sentence about it."""
    if importlib.util.find_spec("torch") is None:
        return False, "torch is not installed"
    import torch

    built = f"torch {torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    if not torch.cuda.is_available():
        return False, f"{built} sees no GPU"
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return True, f"{built} sees {len(names)} GPU(s): {', '.join(sorted(set(names)))}"


def check_gpus() -> Iterator[Check]:
    """The driver and the memory of each GPU by ``nvidia-smi``, and whether the driver fits torch's CUDA."""
    if shutil.which(_SMI[0]) is None:
        return  # no driver of NVIDIA's; torch says whether it sees a GPU
    try:
        done = subprocess.run(_SMI, capture_output=True, text=True, timeout=_SMI_S, check=True)  # noqa: S603 (constants)
        rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
        gpus = [(driver, name, float(total) / 1024, float(free) / 1024) for driver, name, total, free in rows]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = str(getattr(error, "stdout", None) or getattr(error, "stderr", None) or error).strip()
        yield Check("warning", f"nvidia-smi fails: {said[:200]}", "install NVIDIA's driver again, or reboot")
        return
    for index, (driver, name, total, free) in enumerate(gpus):
        yield Check("ok", f"GPU {index}: {name}, {free:.0f} of {total:.0f} GiB free, driver {driver}")
    if not gpus or importlib.util.find_spec("torch") is None:
        return
    import torch

    cuda, driver = torch.version.cuda, gpus[0][0]
    oldest = _DRIVERS.get(int(cuda.partition(".")[0])) if cuda else None
    if cuda is None:
        remedy = "pip install a torch that is built for CUDA, to train on the GPU"
        yield Check("warning", f"torch {torch.__version__} is built without CUDA, and there is a GPU", remedy)
    elif oldest and int(driver.partition(".")[0]) < oldest:
        remedy = f"install driver {oldest} or newer, or a torch built for an earlier CUDA"
        yield Check("failure", f"driver {driver} is too old for torch's CUDA {cuda}", remedy)


def check_shared_memory() -> Iterator[Check]:
    """The size of ``/dev/shm``, where Ray keeps its objects."""
    if not _SHARED_MEMORY.exists():
        return
    usage = shutil.disk_usage(_SHARED_MEMORY)
    text = f"{_SHARED_MEMORY}: {usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free for objects of Ray"
    yield Check.that(usage.total >= 1e9, text, "in a container: docker run --shm-size=16g")


def check_disk(output_dir: str, wanted_gb: int) -> Iterator[Check]:
    """The free space for runs, and whether the folder can be written to."""
    folder = Path(output_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        yield Check("failure", f"{output_dir} cannot be created: {folder} is a file", "give another --output-dir")
        return
    free_gb = shutil.disk_usage(folder).free / 1e9
    remedy = f"checkpoints need about {wanted_gb} GB; give an --output-dir on another disk"
    yield Check.that(free_gb >= wanted_gb, f"{free_gb:.0f} GB free in {folder}", remedy)
    if not os.access(folder, os.W_OK):
        yield Check("failure", f"{folder} cannot be written to", "give another --output-dir")


def planned_settings(config: str | None, model: str | None, trainer: str | None, settings: list[str]) -> dict[str, Any]:
    """The settings of the run to be planned, as ``groundwire run`` reads them. Raises :class:`ConfigError`."""
    options, pairs = with_preset({"config": config, "model": model}, settings)
    planned = with_file(merge_overrides(options, parse_overrides(pairs)))
    preset = planned.get("config") or ("fast" if config else "hf")  # a file without one is fast, as for groundwire run
    trainer = planned.get("trainer") or trainer or default_trainer(preset, device=None, dev=True)
    return {**planned, "config": preset, "trainer": trainer, "device": "cuda"}


def check_memory(planned: Mapping[str, Any], gigabytes: float | None) -> Iterator[Check]:
    """The predicted memory of a run on a GPU."""
    import torch

    if gigabytes is None:
        if not torch.cuda.is_available():
            yield Check("failure", "memory: there is no GPU here", "give that of another machine: --gpu-memory 80")
            return
        gigabytes = torch.cuda.get_device_properties(0).total_memory / 1e9
    try:
        config = resolve(planned["config"], **planned)
        plan, unchecked = trainer_of(config.trainer).plan_memory(config, int(gigabytes * 1e9))
    except UserError as error:
        yield Check("failure", f"memory: {error}")
        return
    if unchecked:
        pairs = ", ".join(f"{name}={value}" for name, value in unchecked.items())
        remedy = "run this where verl is installed: it refuses settings that verl does not have"
        yield Check("warning", f"memory: without verl, its settings were not checked: {pairs}", remedy)
    yield Check("ok", f"memory: predicted {plan}")
