"""Errors of the policy: its model's files, its training, its sampling engine, and its HTTP API."""

from __future__ import annotations

from groundwire.adapters.tracing.wire.request import RefusedError
from groundwire.tools.errors import UserError
from groundwire.train.config.errors import ConfigError


class ModelUnreadableError(ConfigError):
    """The model or the tokenizer in a folder cannot be loaded; the message says which, and why."""


class UnsupportedModelError(UserError):
    """The engine does not implement the model's architecture."""

    exit_code = 1


class NonFiniteGradientError(UserError):
    """Several updates in a row had a gradient that is not finite; the message says what to change."""

    exit_code = 1


class EngineError(RefusedError):
    """The engine could not complete a request."""

    def __init__(self, message: str, status: int = 500, code: str | None = None) -> None:
        super().__init__(status, message, code=code)


class EngineClosedError(EngineError):
    """The engine was closed before or during the request."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 503, "engine_closed")


class ContextLengthError(RefusedError):
    """The prompt leaves no tokens for a reply."""

    def __init__(self, prompt_length: int, max_model_len: int, *, unit: str = "tokens") -> None:
        message = (
            f"the prompt has {prompt_length} {unit}, and the model's context of {max_model_len} tokens must also hold "
            "the reply; shorten the messages (the table info, or earlier turns), or serve with a longer context"
        )
        super().__init__(400, message, code="context_length_exceeded", param="messages")


class ChatRequestError(RefusedError):
    """A request that cannot be served."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str = "invalid_value"
    ) -> None:
        super().__init__(status, message, code=code, param=param)
