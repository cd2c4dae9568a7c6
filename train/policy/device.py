"""Whether torch can compute where it was told to."""

from __future__ import annotations

import torch

from groundwire.train.config.errors import ConfigError

__all__ = ["check_device"]


def check_device(device: str) -> None:
    """Raise :class:`ConfigError` where torch cannot use ``device`` on this machine."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device is {device}, but torch {torch.__version__} sees no GPU; use cpu")
    try:
        torch.zeros(1, device=device).item()  # names and builds of torch are many: it is asked, not listed
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"device is {device!r}, which torch {torch.__version__} cannot use here; use cpu or cuda"
        ) from error
