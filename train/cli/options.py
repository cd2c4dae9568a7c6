"""Command-line options made from the settings' declarations in :class:`RunConfig`."""

from __future__ import annotations

import inspect
import json
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from groundwire import rewards
from groundwire.rewards import JudgeSettings, JudgeSettingsError
from groundwire.tools.errors import CommandError
from groundwire.tools.settings import Settings, suggestion_for
from groundwire.train.cli.complete import values_of
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.overrides import TABLES, WITHOUT_EFFECT, flag, merge_overrides, not_a_pair, parse_overrides
from groundwire.train.config.presets import GONE, PRESETS, VERL_PRESETS
from groundwire.train.config.run_config import RunConfig

_COMPLETES = "_GROUNDWIRE_COMPLETE" in os.environ  # the shell asks for completions, which leave out what is hidden
_judge_option = partial(typer.Option, rich_help_panel="Judge")
JudgeModel = Annotated[str | None, _judge_option(help="The judge's model; default: the local grader")]
JudgeBaseUrl = Annotated[str | None, _judge_option(help="The judge's OpenAI-compatible endpoint", metavar="URL")]
JudgePairs = Annotated[
    list[str] | None,
    _judge_option(help="Setting of the judge, e.g. max_usd=5 (docs/settings.md)", metavar="NAME=VALUE"),
]
BaseUrl = Annotated[
    str | None, typer.Option(help="OpenAI-compatible endpoint with --model, e.g. http://127.0.0.1:8000/v1")
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file")]


def parse_judge(
    *, judge_model: str | None = None, judge_base_url: str | None = None, judge: Iterable[str] | None = None
) -> dict[str, Any]:
    """The judge's settings that the three options give, by name, each checked alone."""
    options = (("model", judge_model), ("base_url", judge_base_url))
    settings: dict[str, Any] = {name: value for name, value in options if value is not None}
    for pair in judge or ():
        name, equals, value = (text.strip() for text in pair.partition("="))
        if not equals:
            raise JudgeSettingsError(f"--judge {pair!r} is not a setting: write it as NAME=VALUE")
        name = JudgeSettings.names().get(name, name)
        if name in settings:
            raise JudgeSettingsError(f"judge {name} is given twice: {settings[name]!r} and {value!r}")
        settings[name] = JudgeSettings.check_value(name, value)
    return settings


def get_reward(
    name: str, *, judge_model: str | None, judge_base_url: str | None, judge: Sequence[str] | None
) -> tuple[rewards.Reward, list[str]]:
    """The reward, and notes about it for the user."""
    settings = JudgeSettings(**parse_judge(judge_model=judge_model, judge_base_url=judge_base_url, judge=judge))
    return rewards.get(name, judge=settings), rewards.notes(name, judge=settings)


def write_json(file: Path, value: Any) -> None:
    """Write ``value`` for ``--json``."""
    write_file(file, json.dumps(value, indent=1, ensure_ascii=False) + "\n", option="--json")


def write_file(file: Path, text: str, *, option: str) -> None:
    """Write what an option asks for. Raises :class:`CommandError`."""
    try:
        file.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise CommandError(f"{option} {file} cannot be written: {error.strerror}") from error


AgentOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--agent-option",
        help=RunConfig.model_fields["agent_options"].description,
        metavar="NAME=VALUE",
        rich_help_panel="Agent",
    ),
]
_JUDGE = {"judge_model": JudgeModel, "judge_base_url": JudgeBaseUrl, "judge": JudgePairs}
_USUAL = (
    *("agent", "agent_input", "agent_output", "domain", "reward", "runner_python", "model", "config", "trainer"),
    *("output_dir", "steps", "tasks_per_step", "group_size", "learning_rate", "max_tokens", "max_model_len"),
    *("val_tasks", "rollout_timeout_s", "agent_options"),
)
"""The settings of a run that ``--help`` lists; ``--help-all`` lists all."""
_ALL = "--help-all"
_OF_REPLAY = (
    *("agent", "domain", "reward", "model", "seed", "backend", "agent_input", "agent_output", "agent_context"),
    *("agent_config", "agent_columns", "agent_options", "data_dir", "n_runners", "rollout_process", "runner_python"),
)
REPLAY_OPTIONS = {name: name for name in _OF_REPLAY}
"""The settings that a replay of a run may change, and the names of their options."""


def takes_settings(
    options: Mapping[str, str] | None = None, record: type[Settings] = RunConfig, /, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that gives a command an option for every setting of ``record``; a run's have the agent's and the
    judge's, too.

    The command receives their values, None where not given, as the dictionary ``settings``. ``options`` are the
    settings that the command has, and their options' names; ``defaults`` are those shown in ``--help``.
    """
    names = options or {name: name for name in record.model_fields}
    names = {name: option for name, option in names.items() if name not in TABLES}
    judge = _JUDGE if "judge" in record.model_fields else {}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True).parameters.values()
        annotations = {option: _option(record, name, option, defaults) for name, option in names.items()}
        annotations |= {"agent_option": AgentOptions, **judge}
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [parameter.replace(kind=keyword) for parameter in own if parameter.name != "settings"]
        parameters += [
            inspect.Parameter(option, keyword, default=None, annotation=annotation)
            for option, annotation in annotations.items()
        ]

        @wraps(function)
        def command(**values: Any) -> None:
            settings = {name: values.pop(option) for name, option in names.items()}
            settings["agent_options"] = parse_overrides(values.pop("agent_option") or ())
            if judge:
                settings["judge"] = {option: values.pop(option) for option in judge}
            function(settings=settings, **values)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.gone = record.gone  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


class SettingsCommand(TyperCommand):
    """A command that says of an option that is gone what to write in its place, and shows its usual options first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments. Raises a usage error."""
        hidden = [parameter for parameter in self.params if getattr(parameter, "hidden", False)]
        if _ALL in args:
            for parameter in hidden:
                parameter.hidden = False  # type: ignore[attr-defined]
            args = ["--help"]
        elif hidden:
            self.epilog = f"{_ALL} also lists {len(hidden)} more options: {', '.join(_panels(hidden))}."
        args = [text for text in args if text.removeprefix("--").replace("-", "_") not in WITHOUT_EFFECT]
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            option, gone = str(getattr(error, "option_name", "")), getattr(self.callback, "gone", {})
            if (name := option.removeprefix("--no-").removeprefix("--").replace("-", "_")) in gone:
                error.message = f"{option} is no setting any more: {gone[name]}"  # type: ignore[attr-defined]
                error.possibilities = None  # type: ignore[attr-defined]
            raise


def _panels(options: Iterable[Any]) -> list[str]:
    """The groups of options, in words."""
    panels = dict.fromkeys(option.rich_help_panel for option in options if option.rich_help_panel)
    return [panel[0].lower() + panel[1:] for panel in panels]


def _option(record: type[Settings], name: str, option: str, defaults: Mapping[str, Any]) -> Any:
    field, declared = record.model_fields[name], record.option(name)
    make: Any = field.default_factory
    default: Any = make() if make else field.default  # get_default() inspects the factory for milliseconds
    default = ",".join(default) if isinstance(default, list) else default
    if record is RunConfig:
        default = defaults.get(name, _with_presets(name, default))
    kind = _option_type(field.annotation)
    info = typer.Option(
        f"{flag(option)}/{flag(f'no_{option}')}" if kind is bool else flag(option),
        *declared["flags"],
        help=field.description,
        metavar=declared["metavar"],
        autocompletion=values_of(name),
        rich_help_panel=declared["panel"],
        hidden=record is RunConfig and name not in _USUAL and not _COMPLETES,
        show_default=str(default) if default not in (None, False, "") else False,
    )
    return Annotated[kind | None, info]


def _with_presets(name: str, default: Any) -> Any:
    """A default with those of the presets of the local trainer that have another one."""
    others = {preset: values[name] for preset, values in PRESETS.items() if values.get(name, default) != default}
    texts = [f"{preset} {'by the size of the model' if value is None else value}" for preset, value in others.items()]
    return "; ".join((str(default), *texts)) if texts else default


def _option_type(annotation: Any) -> Any:
    """bool, int or float as declared, with or without None; text for everything else."""
    kinds = [kind for kind in (typing.get_args(annotation) or (annotation,)) if kind is not NoneType]
    return kinds[0] if kinds[0] in (bool, int, float) else str


def with_preset(settings: Mapping[str, Any], arguments: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    """The options and the ``KEY=VALUE`` arguments; a first argument that names a preset becomes ``config``."""
    arguments, presets = list(arguments), {*PRESETS, *VERL_PRESETS}
    if not arguments or arguments[0] not in presets:
        if arguments and "=" not in arguments[0]:
            not_known = f"{not_a_pair(arguments[0])}, and not a preset: {', '.join(sorted(presets))}"
            raise ConfigError(GONE.get(arguments[0], not_known))
        return dict(settings), arguments
    if settings.get("config") not in (None, arguments[0]):
        raise ConfigError(f"{arguments[0]} but --config {settings['config']}: give one preset")
    return {**settings, "config": arguments[0]}, arguments[1:]


def given_settings(
    settings: Mapping[str, Any], pairs: Iterable[str], names: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The options' values (``settings``) and ``KEY=VALUE`` pairs by the settings' names, checked.

    ``names`` are the settings that the command has, as for :func:`takes_settings`. Raises :class:`ConfigError`.
    """
    options = {**settings, "judge": parse_judge(**settings["judge"])}
    overrides = parse_overrides(pairs)
    if names is not None:
        renamed = {option: name for name, option in names.items() if option != name}
        for key, value in overrides.items():
            if key not in (*names, *renamed, *RunConfig.gone) and key.partition(".")[0] not in TABLES[:2]:
                raise ConfigError(f"unknown setting {key}={value}{suggestion_for(key, [*names, *renamed])}")
        for option, name in renamed.items():  # merged under the settings' names, which the user may not have written
            for written, value in ((flag(option), settings[name]), (option, overrides.get(option))):
                if value is not None:
                    RunConfig.check_value(name, value, shown_as=written)
        overrides = {renamed.get(key, key): value for key, value in overrides.items()}
    return merge_overrides(options, overrides)
