"""What a run says about its judge: one flat record that travels with the run's settings to every runner.

Keys are not in it. They are read from the environment of the process that calls the judge, so no run folder, store or
log ever has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from groundwire.tools.errors import UserError

__all__ = ["API_KEY", "CRITERIA", "JudgeSettings", "JudgeSettingsError", "parse_settings"]

API_KEY = "GROUNDWIRE_JUDGE_API_KEY"
"""The environment variable with the judge's key. Without ``base_url`` LiteLLM's own (OPENAI_API_KEY, …) serve, too."""

CRITERIA = ("accuracy", "completeness", "clarity", "professionalism")


class JudgeSettingsError(UserError):
    """A setting of the judge is unknown or out of range."""


@dataclass(frozen=True, kw_only=True)
class JudgeSettings:
    """How answers are judged: by a model, or (``model`` None) by the local grader."""

    model: str | None = None
    """With ``base_url`` the name that the endpoint knows, else a LiteLLM name (``openai/gpt-5-mini``)."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint, up to and including ``/v1``."""

    accuracy: float = 0.4
    """Weight of the criterion; the four are divided by their sum."""
    completeness: float = 0.3
    clarity: float = 0.15
    professionalism: float = 0.15

    temperature: float = 0.0
    max_tokens: int = 512
    """Tokens that a verdict may have, thinking included."""
    samples: int = 1
    """How often a verdict is asked for; the mean counts."""
    swap: bool = False
    """Ask again with reference and answer in the other order, and take the mean."""

    timeout_s: float = 20.0
    """For one request."""
    deadline_s: float = 30.0
    """For a rollout's whole verdict, waiting for a turn and trying again included; then the judge abstains."""
    retries: int = 3
    """Further tries of a request that failed for now (429, 5xx, a lost connection), with growing pauses."""
    concurrency: int = 32
    """Requests at once, in each process."""

    max_calls: int | None = None
    """Requests that may be made in all, counted in ``cache``; then the judge abstains."""
    max_usd: float | None = None
    """What may be spent in all, counted in ``cache``."""
    input_usd: float | None = None
    """USD for a million tokens read. Default: LiteLLM's price list."""
    output_usd: float | None = None
    cache: str = "~/.cache/groundwire/judge.sqlite"
    """File with every verdict so far, and with what was spent; all processes of a machine share it."""

    def __post_init__(self) -> None:
        for name in ("samples", "max_tokens", "concurrency"):
            if getattr(self, name) < 1:
                raise JudgeSettingsError(f"judge {name} is {getattr(self, name)}; it must be at least 1")
        for name in ("timeout_s", "deadline_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise JudgeSettingsError(f"judge {name} is {getattr(self, name)}; it must be above 0")
        for name in (*CRITERIA, "temperature", "retries", "max_calls", "max_usd", "input_usd", "output_usd"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise JudgeSettingsError(f"judge {name} is {value}; it must be 0 or above")
        priced = self.input_usd is not None and self.output_usd is not None
        for wrong, message in (
            (not sum(self.weights().values()), f"one of the judge's weights {', '.join(CRITERIA)} must be above 0"),
            (
                self.samples > 1 and not self.temperature,
                f"judge samples is {self.samples} at temperature 0, where all are the same: set a temperature",
            ),
            (self.base_url is not None and self.model is None, "judge base_url is given without the judge's model"),
            ((self.input_usd is None) != (self.output_usd is None), "give both judge input_usd and output_usd"),
            (
                self.max_usd is not None and self.base_url is not None and not priced,
                "judge max_usd needs what the endpoint charges: give judge input_usd and output_usd (USD per million)",
            ),
        ):
            if wrong:
                raise JudgeSettingsError(message)
        if self.base_url is not None:
            _check_url(self.base_url)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> JudgeSettings:
        """The settings that ``given`` says by name, as values or as text. Raises :class:`JudgeSettingsError`."""
        return cls(**_typed(given))

    def weights(self) -> dict[str, float]:
        """The four weights as they were given."""
        return {name: float(getattr(self, name)) for name in CRITERIA}

    def weighted(self, scores: Mapping[str, float]) -> float:
        """The mean of a verdict's four scores by the weights: 0 to 1."""
        weights = self.weights()
        return sum(weight * scores[name] for name, weight in weights.items()) / sum(weights.values())

    def describe(self) -> str:
        """Who judges, in one sentence."""
        if self.model is None:
            return (
                "answers are graded by the local grader, which compares their facts with the reference and calls no "
                "model; --judge-model sets one"
            )
        return f"answers are judged by {self.model} at {self.base_url or 'its provider, through LiteLLM'}"


def parse_settings(
    pairs: Iterable[str], *, model: str | None = None, base_url: str | None = None
) -> dict[str, Any] | None:
    """What a command line says of the judge: ``["samples=3"]`` and two options of their own, or None for nothing.

    Raises :class:`JudgeSettingsError` for an unknown name or a value that cannot be read; whether they go together,
    :class:`JudgeSettings` says.
    """
    given: dict[str, Any] = {"model": model, "base_url": base_url}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise JudgeSettingsError(f"--judge {pair!r} is no setting: write it as NAME=VALUE")
        if given.get(name) is not None:
            raise JudgeSettingsError(f"judge {name} is given twice: {given[name]!r} and {value!r}")
        given[name] = value
    return _typed({name: value for name, value in given.items() if value is not None}) or None


def _typed(given: Mapping[str, Any]) -> dict[str, Any]:
    known = {field.name: str(field.type) for field in fields(JudgeSettings)}
    if unknown := sorted(set(given) - set(known)):
        raise JudgeSettingsError(f"unknown judge setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
    return {name: _read(name, value, known[name]) for name, value in given.items()}


def _read(name: str, value: Any, type_: str) -> Any:
    if not isinstance(value, str):
        return value
    if type_.startswith("str"):
        return value
    try:
        if type_ == "bool":
            return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[value.lower()]
        return int(value) if type_.startswith("int") else float(value)
    except (KeyError, ValueError) as error:
        kind = {"bool": "true or false", "int": "a whole number"}.get(type_.partition(" ")[0], "a number")
        raise JudgeSettingsError(f"judge {name} is {value!r}; it must be {kind}") from error


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise JudgeSettingsError(f"judge base_url is {url!r}; it must be like http://127.0.0.1:8000/v1")
    if parts.username or parts.password or parts.query:
        # It would be written to the run's folder.
        raise JudgeSettingsError(f"judge base_url of {parts.hostname} has a key in it: put the key into {API_KEY}")
