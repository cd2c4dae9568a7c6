"""verl on processors, for tests of what several GPUs do: ``VERL_USE_EXTERNAL_MODULES=verl_on_cpu VERL_PLATFORM=cpu``.

verl imports this module in each of its processes. They exchange tensors with Gloo.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry

__all__ = ["ENVIRONMENT", "PlatformCPU"]

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # engines are registered for GPUs
    "OMP_NUM_THREADS": "1",
}


class _Device(str):
    """A device for torch, and the number of one where verl writes ``f"{name}:{number}"``."""

    def __format__(self, _: str) -> str:
        return "0"


class _Module(types.ModuleType):
    """``torch.cpu`` with the functions of ``torch.cuda`` that verl calls."""

    def __getattr__(self, name: str) -> Any:
        if name == "mem_get_info":
            return lambda *_: (0, 0)
        if name == "get_device_name":
            return lambda *_: "cpu"
        if "memory" in name or name in ("ipc_collect", "empty_cache"):
            return lambda *_: 0
        return getattr(torch if "rng_state" in name else torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformCUDA):
    """Processors in place of GPUs."""

    device_name, device_module = "cpu", _Module("cpu")

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return _Device("cpu")

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def communication_backend_name(self) -> str:
        return "gloo"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield


_init_process_group = torch.distributed.init_process_group


def _init_gloo(backend: str | None = None, **options: Any) -> None:
    _init_process_group("gloo", **options)  # verl's name has the processors twice


def _broadcast(module: torch.nn.Module, parameters: list[torch.Tensor], process_group: Any) -> None:
    """As FSDP 1 does it on GPUs only."""
    for tensor in (*parameters, *module.buffers()):
        torch.distributed.broadcast(tensor.detach(), 0, group=process_group)


def patch_torch() -> None:
    """For a process of its own."""
    torch.distributed.init_process_group = _init_gloo
    torch.distributed.fsdp._init_utils._sync_module_params_and_buffers = _broadcast


if torch.distributed.is_torchelastic_launched():
    patch_torch()
