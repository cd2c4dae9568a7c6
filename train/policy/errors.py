"""Errors of the policy: its model's files, its training, its sampling engine, and its HTTP API.

    UserError
    ├── ConfigError
    │   └── ModelUnreadableError   a model or tokenizer cannot be loaded
    ├── UnsupportedModelError      the engine does not implement the architecture
    └── NonFiniteGradientError     several updates in a row had a gradient that is not finite
    EngineError                    the engine could not complete a request
    └── EngineClosedError          because it was closed
    ContextLengthError             the prompt leaves no tokens for a reply
    ChatRequestError               a request is malformed, or asks for something unsupported

The last four become HTTP responses.
"""

from __future__ import annotations

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


class EngineError(RuntimeError):
    """The engine could not complete a request."""


class EngineClosedError(EngineError):
    """The engine was closed before or during the request."""


class ContextLengthError(ValueError):
    """The prompt leaves no tokens for a reply."""

    def __init__(self, prompt_length: int, max_model_len: int, *, unit: str = "tokens") -> None:
        super().__init__(
            f"the prompt has {prompt_length} {unit}, and the model's context of {max_model_len} tokens must also hold "
            "the reply; shorten the messages (the table info, or earlier turns), or serve with a longer context"
        )


class ChatRequestError(ValueError):
    """A request that cannot be served. ``param`` names the field at fault, ``status`` is the HTTP status."""

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code
