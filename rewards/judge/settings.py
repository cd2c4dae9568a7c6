"""The judge's settings: a flat record that is stored with the run's settings and sent to every runner.

API keys are not in it. The process that calls the judge reads them from its environment, so no run directory, store or
log has one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from pydantic import model_validator

from groundwire.tools.errors import UserError
from groundwire.tools.secrets import has_credentials
from groundwire.tools.settings import Settings, setting

API_KEY = "GROUNDWIRE_JUDGE_API_KEY"
"""The environment variable with the judge's key. Without ``base_url``, LiteLLM's own variables work, too."""

CRITERIA = ("accuracy", "completeness", "clarity", "professionalism")


class JudgeSettingsError(UserError):
    """A setting of the judge is unknown or out of range."""


class JudgeSettings(Settings):
    """How answers are judged: by a model, or (``model`` None) by the local grader. Values may be given as text."""

    error = JudgeSettingsError
    label = "judge "
    renamed = {"swap": "swap_order"}
    gone = {
        **dict.fromkeys(CRITERIA, "give all four as weights=0.4,0.3,0.15,0.15"),
        **dict.fromkeys(("input_usd", "output_usd"), "give both as prices=0.25,2"),
        "timeout_s": "a request may take two thirds of deadline_s",
        "retries": "a request is sent up to four times within deadline_s",
        "concurrency": "each process sends up to 32 requests at once",
    }

    model: str | None = setting(None, "Its name at base_url, else LiteLLM's (openai/gpt-5-mini)")
    base_url: str | None = setting(None, "OpenAI-compatible endpoint, up to and including /v1")

    weights: str = setting(
        "0.4,0.3,0.15,0.15", "Of accuracy, completeness, clarity and professionalism; divided by their sum"
    )

    teacher: str | None = setting(None, "Model that writes missing reference answers, named as model")
    teacher_base_url: str | None = setting(None, "As base_url, for the teacher")
    without_reference: bool = setting(False, "Also judge answers to tasks without a reference")

    temperature: float = setting(0.0, "Sampling temperature", ge=0)
    max_tokens: int = setting(512, "Tokens of a verdict, reasoning included", ge=1)
    samples: int = setting(1, "Verdicts per answer; their mean counts", ge=1)
    swap_order: bool = setting(False, "Ask again with reference and answer swapped; take the mean")

    deadline_s: float = setting(
        30.0,
        "Seconds for all requests of a rollout or group, with waiting and retries, two thirds for one; then "
        "the judge abstains",
        gt=0,
    )

    max_calls: int | None = setting(None, "Most requests, counted in cache; then the judge abstains", ge=0)
    max_usd: float | None = setting(None, "Most USD, likewise", ge=0)
    prices: str | None = setting(None, "USD per million tokens read and written, e.g. 0.25,2; default: LiteLLM's list")
    cache: str = setting(
        "~/.cache/groundwire/judge.sqlite", "File with verdicts and costs, shared by a machine's processes"
    )

    @model_validator(mode="after")
    def _check_combination(self) -> JudgeSettings:
        urls = [url for url in (self.base_url, self.teacher_base_url) if url is not None]
        problem, weights = "", numbers(self.weights)
        if wrong := next((url for url in urls if not re.match("https?://[^/]", url)), None):
            problem = f"judge base_url is {wrong!r}; it must be like http://127.0.0.1:8000/v1"
        elif any(map(has_credentials, urls)):  # the run directory would contain it
            problem = f"judge base_url has a key in it: put the key into {API_KEY}"
        elif len(weights) != len(CRITERIA) or not sum(weights):
            problem = (
                f"judge weights is {self.weights!r}; it must be like 0.4,0.3,0.15,0.15, one for each of "
                f"{', '.join(CRITERIA)}, not all 0"
            )
        elif self.prices is not None and len(numbers(self.prices)) != 2:
            problem = (
                f"judge prices is {self.prices!r}; it must be like 0.25,2: USD per million tokens read and written"
            )
        elif self.samples > 1 and not self.temperature:
            problem = f"judge samples is {self.samples} at temperature 0, where all are the same: set a temperature"
        elif self.teacher_base_url is not None and self.teacher is None:
            problem = "judge teacher_base_url is given without the teacher"
        elif self.without_reference and (self.model is None or self.teacher is not None):
            problem = (
                "judge without_reference needs a judge's model, and no teacher: the local grader compares an answer "
                "with its reference"
            )
        elif self.base_url is not None and self.model is None:
            problem = "judge base_url is given without the judge's model"
        elif self.max_usd is not None and self.base_url is not None and self.prices is None:
            problem = "judge max_usd needs the endpoint's prices: give judge prices (USD per million tokens: 0.25,2)"
        if problem:
            raise JudgeSettingsError(problem)
        return self

    def weighted(self, scores: Mapping[str, float]) -> float:
        """The weighted mean of a verdict's four scores, 0 to 1."""
        weights = numbers(self.weights)
        return sum(weight * scores[name] for name, weight in zip(CRITERIA, weights, strict=True)) / sum(weights)

    def describe(self) -> str:
        """One line about the judge for the user."""
        judge = f"answers are judged by {self.model} at {self.base_url or 'its provider, through LiteLLM'}"
        if self.model is None:
            judge = (
                "answers are graded by the local grader, which calls no model: by the rows that the queries read, and "
                "by the presence of the reference's facts. Hedges and other words need a judge: --judge-model"
            )
        return judge + (f"; {self.teacher} writes missing reference answers" if self.teacher else "")


def numbers(text: str) -> list[float]:
    """The numbers between commas; none if one is negative, infinite or none."""
    try:
        values = list(map(float, text.split(",")))
    except ValueError:
        return []
    return values if all(math.isfinite(value) and value >= 0 for value in values) else []
