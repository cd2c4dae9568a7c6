"""``python -m train.config > docs/settings.md``: the table of all settings, made from their declarations."""

from __future__ import annotations

import typing
from collections.abc import Iterator

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from groundwire.rewards import JudgeSettings
from groundwire.tools.settings import Settings
from groundwire.train.config.presets import PRESETS
from groundwire.train.config.run_config import RunConfig
from groundwire.train.config.verl_presets import VERL_PRESETS

__all__ = ["settings_page"]

_KINDS = {str: "text", bool: "true or false", int: "whole number", float: "number"}

_INTRODUCTION = """# Settings

With either trainer every setting is an option (`--learning-rate 1e-5`), a name (`learning_rate=1e-5`) and a key of a file:

```bash
groundwire run --config my-run.toml learning_rate=1e-5 --judge samples=3
```

```toml
# my-run.toml (my-run.yaml works alike)
config = "hf"                # the preset that the file is based on
learning_rate = 1e-5
track = ["tensorboard"]

[judge]                      # or --judge NAME=VALUE, or judge.NAME=VALUE
model = "openai/gpt-5-mini"

[verl]                       # with --trainer verl: any setting of verl's own
data.shuffle = false
```

What comes later wins: the defaults, the preset (`--config`), the file, `--ci` or `--ci-fast`, the command line.
`--print-config` shows the result, which is stored in the run's `config.json`. `groundwire evaluate --help` lists the
settings of an evaluation; its `--temperature` and `--tasks` are `val_temperature` and `val_tasks`.

This page is made by `python -m train.config > docs/settings.md`.
"""


def settings_page() -> str:
    """The page as Markdown."""
    panels: dict[str, list[str]] = {}
    for name in RunConfig.model_fields:
        if name not in ("judge", "verl"):
            panels.setdefault(RunConfig.option(name)["panel"], []).append(name)
    lines = [_INTRODUCTION]
    for panel, names in panels.items():
        lines += [f"## {panel}\n", "| name | values | default | presets | meaning |", "|---|---|---|---|---|"]
        lines += [*(_row(RunConfig, name, _presets(name)) for name in names), ""]
    lines += ["## Judge\n", "| name | values | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*lines, *(_row(JudgeSettings, name) for name in JudgeSettings.model_fields), ""])


def _row(settings: type[Settings], name: str, *more: str) -> str:
    field, old = settings.model_fields[name], settings.option(name)["old_name"]
    default = field.get_default(call_default_factory=True)
    cells = (
        f"`{name}`" + (f" (was `{old}`)" if old else ""),
        _values(field),
        "" if default in (None, []) else f"`{_text(default)}`",
        *more,
        str(field.description),
    )
    return f"| {' | '.join(cells)} |"


def _values(field: FieldInfo) -> str:
    """The allowed values, e.g. ``int ≥ 1``."""
    kind, *_ = typing.get_args(field.annotation) or (field.annotation,)
    if choices := typing.get_args(kind) or typing.get_args(field.annotation) * isinstance(kind, str):
        return ", ".join(f"`{choice}`" for choice in choices)
    signs = {Ge: "ge ≥", Gt: "gt >", Le: "le ≤"}
    bounds = []
    for bound in field.metadata:
        if type(bound) in signs:
            attribute, sign = signs[type(bound)].split()
            bounds.append(f"{sign} {getattr(bound, attribute)}")
    return f"{_KINDS[kind]} {' and '.join(bounds)}".strip()


def _presets(name: str) -> str:
    """The values that presets give a setting, e.g. ```3`: hf, verl's except starter``."""
    usual = RunConfig.model_fields[name].default
    local = {preset: changes.get(name, usual) for preset, changes in PRESETS.items()}
    verl = {preset: changes.get(name, usual) for preset, changes in VERL_PRESETS.items()}
    values = dict.fromkeys(value for value in [*local.values(), *verl.values()] if value != usual)
    return "; ".join(
        f"`{_text(value)}`: {', '.join(filter(None, _with_value(value, local, verl)))}" for value in values
    )


def _with_value(value: object, local: dict[str, object], verl: dict[str, object]) -> Iterator[str]:
    yield from (preset for preset in local if local[preset] == value)
    having = [preset for preset in verl if verl[preset] == value]
    others = [preset for preset in verl if preset not in having]
    if len(others) > 2:
        yield f"verl's {', '.join(having)}" if having else ""
    else:
        yield "verl's" + (f" except {', '.join(others)}" if others else "")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    print(settings_page(), end="")
