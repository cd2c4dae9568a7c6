"""``python -m dev.settings_page``: writes what the settings' declarations make: the lists of ``docs/settings.md``, and
the types of the functions' settings, from which editors complete.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from groundwire.rewards import JudgeSettings
from groundwire.tools.settings import Settings
from groundwire.train.config.overrides import TABLES
from groundwire.train.config.presets import PRESETS, VERL_PRESETS
from groundwire.train.config.run_config import AGENT_FUNCTIONS, RunConfig
from groundwire.train.config.sft_settings import SFTSettings

_KINDS = {str: "text", bool: "boolean", int: "integer", float: "number"}


def lists() -> str:
    """One list for each panel of ``--help``, one for ``groundwire sft`` and one for the judge, as Markdown."""
    lines: dict[str, list[str]] = {}
    for name in RunConfig.model_fields:
        if name not in TABLES[1:]:
            lines.setdefault(RunConfig.option(name)["panel"], []).append(_line(RunConfig, name, _presets(name)))
    lines["Supervised fine-tuning: groundwire sft"] = [
        _line(SFTSettings, name, "") for name in SFTSettings.model_fields
    ]
    lines["Judge"] = [_line(JudgeSettings, name, "") for name in JudgeSettings.model_fields]
    return "\n\n".join(f"## {panel}\n\n" + "\n".join(of_panel) for panel, of_panel in lines.items()) + "\n"


TYPES = Path("train/api/typed_settings.pyi")
_POSITIONAL = ("agent", "reward")
_PATHS = ("DIR", "FILE", "NAME|FILE", "RUN_DIR", "PYTHON")


def types() -> str:
    """The stub file :data:`TYPES`."""
    lines = [
        f"# Made by python -m dev.settings_page from {RunConfig.__module__} and {SFTSettings.__module__}.",
        "from collections.abc import Callable, Mapping",
        "from pathlib import Path",
        "from typing import Any, Literal, TypedDict",
    ]
    for name, record in (("Settings", RunConfig), ("SFT", SFTSettings)):
        lines += ["", f"class {name}(TypedDict, total=False):"]
        lines += [f"    {field}: {_type(record, field)}" for field in record.model_fields if field not in _POSITIONAL]
    return "\n".join(lines) + "\n"


def _type(record: type[Settings], name: str) -> str:
    kind, more = record.model_fields[name].annotation, ""
    if name == "model" or record.option(name)["metavar"] in _PATHS:
        more = " | Path" + (" | str" if name == "prompts" else "")
    elif name in AGENT_FUNCTIONS:
        more = " | Callable[..., Any]"
    if isinstance(kind, type) and issubclass(kind, Settings):
        return "Mapping[str, Any] | None"
    text = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    text = re.sub(r"\b(typing|collections\.abc)\.", "", text).replace("'", '"')
    return f"{text.removesuffix(' | None')}{more} | None"


def _line(settings: type[Settings], name: str, presets: str) -> str:
    field, old = settings.model_fields[name], {new: old for old, new in settings.renamed.items()}.get(name)
    default = field.get_default(call_default_factory=True)
    shown = [] if default in (None, [], {}, "") else [f"`{_text(default)}`"]
    named = f"`{name}`" + (f" (was `{old}`)" if old else "")
    values, defaults = _values(field, settings.option(name)["metavar"]), "; ".join([*shown, *[presets] * bool(presets)])
    return f"- {named}, {values}: {field.description}" + (f" ({defaults})" if defaults else "")


def _values(field: Any, metavar: str | None) -> str:
    """The allowed values, e.g. ``integer ≥ 1``."""
    kinds = get_args(field.annotation) or (field.annotation,)
    if choices := get_args(kinds[0]) or [kind for kind in kinds if isinstance(kind, str)]:
        return f"`{'|'.join(choices)}`"
    if metavar:
        return f"`{metavar}`"
    signs = {"ge": "≥", "gt": ">", "le": "≤"}
    bounds = [f"{signs[key]} {getattr(bound, key)}" for bound in field.metadata for key in signs if hasattr(bound, key)]
    return " ".join([_KINDS[kinds[0]], *bounds])


def _presets(name: str) -> str:
    """The presets that change a setting, by its value."""
    by_value: dict[str, list[str]] = {}
    for trainer, presets in (("", PRESETS), ("verl/", VERL_PRESETS)):
        known = [preset for preset in presets if "-" not in preset]  # else a variant of the preset before its hyphen
        values = {preset: _text(presets[preset][name]) for preset in known if name in presets[preset]}
        for value in dict.fromkeys(values.values()):
            these = [preset for preset in known if values.get(preset) == value]
            others = [preset for preset in known if preset not in these]
            texts = [f"{trainer}{preset}" for preset in these]
            if len(others) + 2 < len(these):
                texts = ["verl" + f" but {', '.join(others)}" * bool(others)]
            by_value.setdefault(value, []).extend(texts)
    return "; ".join(f"`{value}`: {', '.join(texts)}" for value, texts in by_value.items())


def _text(value: object) -> str:
    if value is None:
        return "by the model's size"
    if isinstance(value, list):
        return ",".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{name}={_text(inner)}" for name, inner in value.items())
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    page = Path("docs/settings.md")
    introduction = page.read_text(encoding="utf-8").partition("## ")[0]
    page.write_text(introduction + lists(), encoding="utf-8")
    TYPES.write_text(types(), encoding="utf-8")
