"""The settings of a judge: a flat record that travels with the run's settings to every runner.

API keys are not in it. The process that calls the judge reads them from its environment, so no run folder, store or log
contains one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from groundwire.tools.errors import UserError

__all__ = ["API_KEY", "CRITERIA", "JudgeSettings", "JudgeSettingsError", "parse_settings"]

API_KEY = "GROUNDWIRE_JUDGE_API_KEY"
"""The environment variable with the judge's key. Without ``base_url``, LiteLLM's own variables work, too."""

CRITERIA = ("accuracy", "completeness", "clarity", "professionalism")

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class JudgeSettingsError(UserError):
    """A setting of the judge is unknown or out of range."""


class JudgeSettings(BaseModel):
    """How answers are judged: by a model, or (``model`` None) by the local grader. :meth:`of` checks everything."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str | None = None
    """With ``base_url`` the endpoint's name for the model, else a LiteLLM name (``openai/gpt-5-mini``)."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint, including ``/v1``."""

    accuracy: NonNegative = 0.4
    """Weight of the criterion; the four are divided by their sum."""
    completeness: NonNegative = 0.3
    clarity: NonNegative = 0.15
    professionalism: NonNegative = 0.15

    temperature: NonNegative = 0.0
    max_tokens: Count = 512
    """Tokens of a verdict, reasoning included."""
    samples: Count = 1
    """Verdicts per answer; their mean counts."""
    swap: bool = False
    """Also ask with reference and answer in the other order, and take the mean."""

    timeout_s: Positive = 20.0
    """For one request."""
    deadline_s: Positive = 30.0
    """For the whole verdict of a rollout, with waiting and retries; then the judge abstains."""
    retries: Annotated[int, Field(ge=0)] = 3
    """Further attempts after a transient failure (429, 5xx, a lost connection), with growing pauses."""
    concurrency: Count = 32
    """Concurrent requests of each process."""

    max_calls: Annotated[int | None, Field(ge=0)] = None
    """Requests in total, counted in ``cache``; then the judge abstains."""
    max_usd: Annotated[float | None, Field(ge=0)] = None
    """Spending in total, counted in ``cache``; then the judge abstains."""
    input_usd: Annotated[float | None, Field(ge=0)] = None
    """USD per million prompt tokens. Default: LiteLLM's prices."""
    output_usd: Annotated[float | None, Field(ge=0)] = None
    cache: str = "~/.cache/groundwire/judge.sqlite"
    """The file with all verdicts and the spending, shared by all processes of a machine."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> JudgeSettings:
        """The settings with ``given`` values, which may be texts. Raises :class:`JudgeSettingsError`."""
        settings = _parse(given)
        if problem := settings._conflict():
            raise JudgeSettingsError(problem)
        return settings

    def _conflict(self) -> str:
        """The problem of settings that do not go together; empty if there is none."""
        if not sum(self.weights().values()):
            return f"one of the judge's weights {', '.join(CRITERIA)} must be above 0"
        if self.samples > 1 and not self.temperature:
            return f"judge samples is {self.samples} at temperature 0, where all are the same: set a temperature"
        if self.base_url is not None and self.model is None:
            return "judge base_url is given without the judge's model"
        if (self.input_usd is None) != (self.output_usd is None):
            return "give both judge input_usd and output_usd"
        if self.max_usd is not None and self.base_url is not None and self.input_usd is None:
            return "judge max_usd needs the endpoint's prices: give judge input_usd and output_usd (USD per million)"
        return "" if self.base_url is None else _url_problem(self.base_url)

    def weights(self) -> dict[str, float]:
        """The four weights, not normalised."""
        return {name: getattr(self, name) for name in CRITERIA}

    def weighted(self, scores: Mapping[str, float]) -> float:
        """The weighted mean of a verdict's four scores, 0 to 1."""
        weights = self.weights()
        return sum(weight * scores[name] for name, weight in weights.items()) / sum(weights.values())

    def describe(self) -> str:
        """One line about the judge for the user."""
        if self.model is None:
            return (
                "answers are graded by the local grader, which compares their facts with the reference and calls no "
                "model; --judge-model sets one"
            )
        return f"answers are judged by {self.model} at {self.base_url or 'its provider, through LiteLLM'}"


def parse_settings(
    pairs: Iterable[str], *, model: str | None = None, base_url: str | None = None
) -> dict[str, Any] | None:
    """The settings on a command line (``["samples=3"]`` and two options), without defaults; None if there are none.

    Raises :class:`JudgeSettingsError` for an unknown name or a wrong value. :meth:`JudgeSettings.of` checks whether the
    settings go together: those of a resumed run are merged first.
    """
    given: dict[str, Any] = {"model": model, "base_url": base_url}
    for pair in pairs:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals:
            raise JudgeSettingsError(f"--judge {pair!r} is not a setting: write it as NAME=VALUE")
        if given.get(name) is not None:
            raise JudgeSettingsError(f"judge {name} is given twice: {given[name]!r} and {value!r}")
        given[name] = value
    given = {name: value for name, value in given.items() if value is not None}
    return _parse(given).model_dump(exclude_unset=True) or None


def _parse(given: Mapping[str, Any]) -> JudgeSettings:
    try:
        return JudgeSettings(**given)
    except ValidationError as caught:
        error = caught.errors()[0]
        name, problem = error["loc"][0], error["msg"]
        if error["type"] == "extra_forbidden":
            known = ", ".join(sorted(JudgeSettings.model_fields))
            raise JudgeSettingsError(f"unknown judge setting {name!r}; known: {known}") from caught
        raise JudgeSettingsError(f"judge {name} is {error['input']!r}: {problem[0].lower()}{problem[1:]}") from caught


def _url_problem(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"judge base_url is {url!r}; it must be like http://127.0.0.1:8000/v1"
    if parts.username or parts.password or parts.query:  # the run's folder would contain it
        return f"judge base_url of {parts.hostname} has a key in it: put the key into {API_KEY}"
    return ""
