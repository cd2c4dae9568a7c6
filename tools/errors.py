"""The base class of every error that a user can fix, in the input or on the machine.

Each package derives its own errors from it and draws them once: ``tools.plugins``, ``adapters.tracing.proxy``,
``train.config.errors``, ``train.artifacts.run_dir``, ``train.store.errors``, ``train.policy.errors``,
``train.rollouts.errors``. Errors of a single rollout (``adapters.BackendError``, ``rewards.RewardError``,
``tools.sql.QueryError``) are not among them: a run counts those and continues.
"""

from __future__ import annotations

__all__ = ["CommandError", "UserError"]


class UserError(Exception):
    """An error that a command prints as one line, without a traceback.

    The message names what was wrong, with which value, and what to do.
    """

    exit_code = 2
    """Exit code of the command. 2: the input is wrong; 1: something failed."""
    exits_at_once = False
    """True where blocked threads would keep the process from exiting normally."""


class CommandError(UserError):
    """A command cannot continue. Exit code 130 stands for an interrupt, which is no error."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
