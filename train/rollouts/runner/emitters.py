"""Agent Lightning's emitters in an agent (``emit_reward``), once it imports them: that takes seconds."""

from __future__ import annotations

import logging
import sys
from typing import Any

from wrapt import register_post_import_hook

_log = logging.getLogger(__name__)


class Emitters:
    """Agents may use the emitters while a pool runs, and in the processes of rollouts."""

    _pools, _is_hooked = 0, False

    @classmethod
    def count_pools(cls, change: int) -> None:
        """One more pool of this process runs, or one less."""
        cls._pools += change
        if not cls._is_hooked:
            cls._is_hooked = True
            register_post_import_hook(cls._serve, "agentlightning")  # calls it at once if it is imported
        elif "agentlightning" in sys.modules:
            cls._serve()

    @classmethod
    def _serve(cls, _: Any = None) -> None:
        try:
            from groundwire.train.rollouts.runner.lightning_agents import EmissionTracer
        except ImportError as error:  # for example version 1.0, which is another program
            _log.warning("agents cannot emit rewards: the agentlightning of this environment is not 0.3 (%s)", error)
        else:
            EmissionTracer.serve(running=cls._pools > 0)


def serve_emitters() -> None:
    """For a process in which one rollout runs."""
    Emitters.count_pools(1)
