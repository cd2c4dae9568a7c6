"""What a program of ours prints is its own lines: agentlightning, and what it brings, announce much."""

from __future__ import annotations

import logging
import os
import warnings

__all__ = ["quiet"]


def quiet(debug: bool = False) -> None:
    """Log only errors, and what this project's trainers wait for, but nothing of those who log as errors what is none.

    With ``debug`` everything.
    """
    plain = logging.BASIC_FORMAT if debug else "%(message)s"
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, format=plain, force=True)
    if not debug:
        warnings.filterwarnings("ignore")
        os.environ.setdefault("AGENTOPS_LOG_LEVEL", "CRITICAL")
        logging.getLogger("groundwire").setLevel(logging.WARNING)
        for name in ("agentlightning", "agentops", "LiteLLM", "httpx", "openai"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
