"""The whole weights of a model that FSDP 1 has divided among GPUs, one layer after the other.

verl gathers each layer, divides it again, and then gathers each of its tensors alone. On two H100s its transfer of 254
tensors to vLLM took 0.5 s; with this module it takes 0.3 s.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

__all__ = ["full_weights", "has_persistent_buffers"]


def full_weights(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The parameters of each unit of ``module`` by their names in the model; all ranks must iterate.

    A unit's tensors are freed when the next one is asked for. Their dtype is that of the optimizer's weights.
    """
    # The outermost unit is first: FSDP makes the first unit that it gathers the root of the others.
    units = {_name(name): unit for name, unit in module.named_modules() if isinstance(unit, FullyShardedDataParallel)}
    for prefix, unit in units.items():
        inner = tuple(f"{other}." for other in units if len(other) > len(prefix))
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            own = {_name(name): each for name, each in unit.named_parameters(prefix=prefix, remove_duplicate=False)}
            yield {name: each.detach() for name, each in own.items() if not name.startswith(inner)}


def has_persistent_buffers(module: nn.Module) -> bool:
    """Whether a checkpoint of ``module`` has tensors that are no parameters."""
    return any(set(each._buffers) - each._non_persistent_buffers_set for each in module.modules())


def _name(wrapped: str) -> str:
    return wrapped.replace("_fsdp_wrapped_module.", "")
