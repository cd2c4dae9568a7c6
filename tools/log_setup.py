"""The log output of our commands: errors and our own warnings, without the noise of libraries."""

from __future__ import annotations

import logging
import os
import warnings

__all__ = ["setup_logging", "silence_libraries"]


def setup_logging(debug: bool = False) -> None:
    """Show errors and our own warnings; silence libraries that log non-errors as errors. ``debug`` shows everything."""
    if debug:
        logging.basicConfig(level=logging.DEBUG, force=True)
        return
    logging.basicConfig(level=logging.ERROR, format="%(message)s", force=True)
    logging.getLogger("groundwire").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    os.environ.setdefault("AGENTOPS_LOG_LEVEL", "CRITICAL")
    silence_libraries()


def silence_libraries() -> None:
    """Show only critical messages of the libraries that log non-errors as errors."""
    for name in ("agentlightning", "agentops", "LiteLLM", "httpx", "openai"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
