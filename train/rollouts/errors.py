"""Errors that end a run because of its rollouts, and the refusal of a single one."""

from __future__ import annotations

from groundwire.tools.errors import UserError


class RequestRefusedError(Exception):
    """The rollout's request names something that the runner's command line does not allow; the message says what."""

    kind = "refused"


class UnreadableAnswerError(Exception):
    """A reward raised about an answer: it is of another form than the reward reads. It has the reward of a failure."""

    kind = "unreadable_answer"


class RolloutsFailedError(UserError):
    """So many rollouts fail that training cannot continue; the message gives the reason."""

    exit_code = 1


class RunnersEndedError(UserError):
    """All runner processes of the run have ended, so no rollout can end any more."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.is_said = f"status {UserError.exit_code}:" in message  # each has printed what is wrong with its input


class EventLoopError(UserError):
    """The agents' event loop is blocked, or has ended; the message says where or why."""

    exit_code = 1
    exits_at_once = True
