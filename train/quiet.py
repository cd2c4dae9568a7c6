"""What a program of ours prints is its own lines: agentlightning, and what it brings, announce much."""

from __future__ import annotations

import logging
import os
import warnings

__all__ = ["quiet"]


def quiet(debug: bool = False) -> None:
    """Log only errors, and nothing of those who log as errors what is none; with ``debug`` everything."""
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, force=True)
    if not debug:
        warnings.filterwarnings("ignore")
        os.environ.setdefault("AGENTOPS_LOG_LEVEL", "CRITICAL")
        for name in ("agentlightning", "agentops", "LiteLLM", "httpx", "openai"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
