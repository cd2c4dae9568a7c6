"""Settings given as options, as ``KEY=VALUE`` and in a file, merged under the names of :class:`RunConfig`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from groundwire.rewards import JudgeSettings
from groundwire.tools.errors import UserError
from groundwire.tools.files import GivenTwiceError, parse_toml, read_bytes, shorten_repr, unique_keys
from groundwire.tools.settings import suggestion_for
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig

TABLES = ("agent_options", "judge", "verl")
"""Settings whose values are tables, which are merged name by name."""
WITHOUT_EFFECT = ("llm_proxy",)
"""Names of published commands that are accepted: LLM calls always go through the proxy."""
NAMES = [name for name in RunConfig.model_fields if name not in TABLES]
"""The settings that have one plain value."""


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """``key=value`` arguments as a dictionary; values are JSON where they can be read as such, else text."""
    overrides: dict[str, Any] = {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key.strip("+~"):
            raise ConfigError(not_a_pair(argument))
        if key in overrides:
            raise ConfigError(f"{key} is given twice")
        overrides[key] = _parse_value(text)
    return overrides


def not_a_pair(argument: str) -> str:
    """The message for an argument without a key or a value; of a long one, which may be a secret, the beginning."""
    beginning = f"{argument[:20]}..." if len(argument) > 20 else argument
    return f"{beginning!r} is not key=value, e.g. learning_rate=1e-5"


_WORDS = {"True": "true", "False": "false", "None": "null"}


def _parse_value(text: str) -> Any:
    try:
        return json.loads(_WORDS.get(text, text), object_pairs_hook=unique_keys)
    except GivenTwiceError as error:
        raise ConfigError(f"{shorten_repr(text)}: {error}") from error
    except ValueError:
        if text.startswith("[") and text.endswith("]"):  # [console,wandb], as Hydra's command line has it
            return [_parse_value(item.strip()) for item in text[1:-1].split(",")]
        return text


def merge_overrides(options: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The given settings, checked, by their fields' names: ``options`` (None: not given) and ``overrides``.

    ``judge.NAME`` is a setting of the judge, ``agent_options.NAME`` an option of the agent. All other keys are verl's
    settings, returned under ``verl``. Raises :class:`ConfigError` for a wrong value or a name that is gone, and if an
    option and an override differ.
    """
    options = {name: value for name, value in options.items() if value is not None and name not in WITHOUT_EFFECT}
    agent_options, judge = dict(options.pop("agent_options", {})), dict(options.pop("judge", {}))
    settings = {name: RunConfig.check_value(name, value) for name, value in options.items()}
    verl: dict[str, Any] = {}
    for written_key, written in overrides.items():
        key = RunConfig.renamed.get(written_key, written_key)
        table, dot, name = key.partition(".")
        if key in WITHOUT_EFFECT:
            continue
        if dot and table == "agent_options":
            target, option, value = agent_options, f"--agent-option {name}=", written
        elif dot and table == "judge":
            name, value = JudgeSettings.names().get(name, name), JudgeSettings.check_value(name, written, shown_as=key)
            target, option = judge, f"--judge {name}="
        elif key in NAMES or key in RunConfig.gone:
            target, option, name, value = settings, f"{flag(key)} ", key, RunConfig.check_value(key, written)
        else:
            target, option, name, value = verl, "", key, written
        if target.setdefault(name, value) != value:
            raise ConfigError(f"{key}={value} but {option}{target[name]}: they are one setting, give it once")
    tables = {"agent_options": agent_options, "judge": judge, "verl": verl}
    return settings | {name: table for name, table in tables.items() if table}


def with_changes(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """``settings`` with ``changes``; tables are merged name by name."""
    tables = {name: {**settings.get(name, {}), **changes[name]} for name in TABLES if name in changes}
    return {**settings, **changes, **tables}


def flag(name: str) -> str:
    """The option of a setting."""
    return f"--{name.replace('_', '-')}"


SETTINGS_FILE = "groundwire.toml"
"""The settings of a folder, which ``groundwire look`` and ``groundwire train`` read, and ``groundwire init`` writes."""
SUFFIXES = (".toml", ".yaml", ".yml")
_MAX_BYTES = 1 << 20


def read_settings(file: Path) -> dict[str, Any]:
    """The settings in ``file`` by their fields, as :func:`merge_overrides` returns them.

    ``config`` names the preset that the file is based on, the tables ``judge`` and ``verl`` hold their settings.
    """
    try:
        values = _parse(file)
        by_name = unique_keys(flat(values)) if isinstance(values, dict) else None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:  # yaml raises all of them
        reason = "too many nested values" if isinstance(error, RecursionError) else " ".join(str(error).split())[:300]
        raise ConfigError(f"{file} is not valid {file.suffix[1:].upper()}: {reason}") from error
    if by_name is None:
        raise ConfigError(f"{file} holds no settings: write them as in docs/settings.md")
    overrides = {}
    for key, value in by_name.items():
        if "." not in key and key not in (*NAMES, *RunConfig.renamed, *RunConfig.gone, *WITHOUT_EFFECT):
            raise ConfigError(f"{file}: unknown setting {key[:100]}{suggestion_for(key, NAMES)}")
        overrides[key.removeprefix("verl.")] = value
    try:
        return merge_overrides({}, overrides)
    except UserError as error:
        raise ConfigError(f"{file}: {error}") from error


def _parse(file: Path) -> Any:
    text = read_bytes(file, max_bytes=_MAX_BYTES).decode()
    if file.suffix == ".toml":
        return parse_toml(text)
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML 1.1 takes 1e-5 for text, and a table can contain itself, or one many times."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError(f"aliases such as *{self.peek_event().anchor} are not read: write the value")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            unique_keys((str(key.value), None) for key, _ in node.value)
            return super().construct_mapping(node, deep)

    number = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, "-+0123456789")
    try:
        return yaml.load(text, Loader)  # noqa: S506 (a safe loader)
    except yaml.MarkedYAMLError as error:
        line = f" (at line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise ValueError(f"{error.problem}{line}") from error
    except yaml.YAMLError as error:
        raise ValueError(error) from error


def flat(values: Mapping[str, Any], separator: str = ".", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values with their names; those of nested tables one by one, by ``table.name``."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, separator, f"{prefix}{key}{separator}")
        else:
            yield f"{prefix}{key}", value
