"""Settings in a TOML or YAML file: ``--config my-run.toml``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from groundwire.tools.errors import UserError
from groundwire.tools.files import read_bytes
from groundwire.tools.settings import suggestion_for
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import NAMES, WITHOUT_EFFECT, merge_overrides
from groundwire.train.config.run_config import RunConfig

__all__ = ["SUFFIXES", "read_settings"]

SUFFIXES = (".toml", ".yaml", ".yml")
_MAX_BYTES, _MAX_VALUES, _MAX_DEPTH = 1 << 20, 10_000, 20


def read_settings(file: Path) -> dict[str, Any]:
    """The settings in ``file`` by their fields, as :func:`merge_overrides` returns them.

    ``config`` names the preset that the file is based on, the tables ``judge`` and ``verl`` hold their settings. Raises
    :class:`ConfigError`, which names the file and the key.
    """
    try:
        values = _parse(file)
        _check_size(values)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:  # yaml raises all of them
        reason = "too many nested values" if isinstance(error, RecursionError) else " ".join(str(error).split())[:300]
        raise ConfigError(f"{file} is not valid {file.suffix[1:].upper()}: {reason}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} holds no settings: write them as in docs/settings.md")
    overrides = {}
    for key, value in _flat(values):
        if "." not in key and key not in (*NAMES, *RunConfig.gone, *WITHOUT_EFFECT):
            raise ConfigError(f"{file}: unknown setting {key[:100]}{suggestion_for(key, NAMES)}")
        overrides[key.removeprefix("verl.")] = value
    try:
        return merge_overrides({}, overrides)
    except UserError as error:
        raise ConfigError(f"{file}: {error}") from error


def _parse(file: Path) -> Any:
    text = read_bytes(file, max_bytes=_MAX_BYTES).decode()
    if file.suffix == ".toml":
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
        return tomllib.loads(text)
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.1 takes 1e-5 for text."""

    Loader.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), "-+0123456789"
    )
    try:
        return yaml.load(text, Loader)  # noqa: S506 (a safe loader)
    except yaml.MarkedYAMLError as error:
        line = f" (at line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise ValueError(f"{error.problem}{line}") from error
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def _check_size(values: Any) -> None:
    """Raise ``ValueError`` for values without end: in YAML a table can contain itself, or one many times."""
    found, depth = [values], 0
    while found:
        depth += 1
        inner = (each.values() if isinstance(each, dict) else each for each in found if isinstance(each, dict | list))
        found = list(islice(chain.from_iterable(inner), _MAX_VALUES + 1))
        if len(found) > _MAX_VALUES or depth > _MAX_DEPTH:
            raise ValueError(f"it has more than {_MAX_VALUES} settings, or nests them more than {_MAX_DEPTH} times")


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
