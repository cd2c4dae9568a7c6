"""Settings as pydantic models: each field declares its type, default, bounds, help text and command-line option.

Command-line options, ``KEY=VALUE``, configuration files, checks, error messages and the table in the documentation are
made from these declarations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails

from groundwire.tools.errors import UserError
from groundwire.tools.files import shorten_repr
from groundwire.tools.text import valid_text

_CONFIG = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True)
_KINDS = {
    **{"int": "a whole number", "float": "a number", "finite": "a finite number", "bool": "true or false"},
    **{"string": "text", "list": "a list", "dict": "a table", "model": "a table"},
}
"""What a value must be, by the first word of pydantic's type of error."""
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
}


def setting(
    default: Any, help: str, *, panel: str = "", metavar: str | None = None, flags: tuple[str, ...] = (), **field: Any
) -> Any:
    """A field of :class:`Settings`. ``help`` describes it in ``--help`` and in the documentation.

    ``panel`` groups options in ``--help``, ``metavar`` and ``flags`` are those of the option. Everything else (``ge``,
    ``gt``, ``le``, ``strict``) goes to pydantic's ``Field``.
    """
    extra: dict[str, Any] = {"panel": panel, "metavar": metavar, "flags": flags}
    field["default_factory" if callable(default) else "default"] = default
    return Field(description=help, json_schema_extra=extra, **field)


class Settings(BaseModel):
    """A frozen record. A wrong value raises :attr:`error`, which names the setting, its value and what is allowed."""

    model_config = _CONFIG
    error: ClassVar[type[UserError]] = UserError
    label: ClassVar[str] = ""
    """Text before a setting's name in messages, with a space at its end."""
    renamed: ClassVar[Mapping[str, str]] = {}
    """Names of earlier versions that are accepted, and the settings that they are now."""
    gone: ClassVar[Mapping[str, str]] = {}
    """Names of earlier versions that are no setting any more, each with a sentence on what takes its place."""

    @model_validator(mode="wrap")
    @classmethod
    def _check_values(cls, values: Any, handler: Any) -> Any:
        try:
            if isinstance(values, Mapping):
                names = cls.names()
                values = {names.get(name, name): value for name, value in values.items()}
                for name, value in values.items():
                    if isinstance(value, str) and valid_text(value) != value:  # a path in another encoding
                        raise cls.error(f"{cls.label}{name} is {value!a}, which is no valid Unicode; rename it")
            return handler(values)
        except ValidationError as error:
            raise cls.error(cls._message(error.errors()[0])) from None
        except UserError as error:  # of a nested record
            raise cls.error(str(error)) from None

    @classmethod
    @cache
    def names(cls) -> dict[str, str]:
        """Every accepted name, old ones included, and the field that it stands for."""
        return {**{name: name for name in cls.model_fields}, **cls.renamed}

    @classmethod
    def option(cls, name: str) -> dict[str, Any]:
        """The ``panel``, ``metavar`` and ``flags`` of a field."""
        extra: Any = cls.model_fields[name].json_schema_extra
        return dict(extra)

    @classmethod
    def check_value(cls, name: str, value: Any, *, shown_as: str = "") -> Any:
        """``value`` as the field ``name`` holds it. Raises :attr:`error`, which names it as ``shown_as``."""
        if name not in cls.names():
            raise cls.error(cls._unknown(name))
        name = cls.names()[name]
        try:
            return _adapter(cls, name).validate_python(value)
        except ValidationError as error:
            raise cls.error(cls._message(error.errors()[0], shown_as=shown_as or f"{cls.label}{name}")) from None

    @classmethod
    def _message(cls, error: ErrorDetails, *, shown_as: str = "") -> str:
        kind, value = error["type"], error["input"]
        name = shown_as or f"{cls.label}{error['loc'][0] if error['loc'] else ''}".strip()
        if kind == "extra_forbidden":
            return cls._unknown(error["loc"][0])
        if kind in _BOUNDS:
            bound, words = _BOUNDS[kind]
            return f"{name} is {shorten_repr(value)}; it must be {words} {error['ctx'][bound]:g}"
        if kind == "literal_error":
            return f"{name} is {shorten_repr(value)}; it must be {error['ctx']['expected']}"
        needed = _KINDS.get(kind.partition("_")[0])
        return f"{name} is {shorten_repr(value)}; it must be {needed}" if needed else f"{name}: {error['msg']}"

    @classmethod
    def _unknown(cls, name: Any) -> str:
        if name in cls.gone:
            return f"{cls.label}{name} is no setting any more: {cls.gone[name]}"
        return f"unknown {cls.label}setting {shorten_repr(name)}{suggestion_for(str(name), cls.names())}"


def suggestion_for(name: str, names: Collection[str]) -> str:
    """The end of a message about an unknown setting: the most similar ``names``, and where all are listed."""
    close = get_close_matches(name, names, n=3, cutoff=0.7)
    question = f"did you mean {' or '.join(close)}? " if close else ""
    return f"; {question}docs/settings.md lists all settings"


@cache
def _adapter(settings: type[Settings], name: str) -> TypeAdapter[Any]:
    field = settings.model_fields[name]
    kind: Any = Annotated[field.annotation, field]
    return TypeAdapter(kind, config=settings.model_config)
