"""One request to the judge's model: an OpenAI-compatible endpoint over plain HTTP, or whatever LiteLLM has a name for.

LiteLLM is imported here and nowhere else, and only for a judge without a ``base_url``: it takes seconds. What fails is
told apart by whether asking again can help, and says whether it may have been paid for.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from groundwire.rewards.judge.prompt import RESPONSE_FORMAT
from groundwire.rewards.judge.settings import API_KEY, JudgeSettings

if TYPE_CHECKING:
    import httpx

__all__ = ["JudgeClient", "JudgeRequestError", "Reply"]

_FOR_NOW = {408, 409, 425, 429}
_SERVER = 500
_MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the model said; ``usd`` is None where the reply does not say how many tokens it took."""

    text: str
    usd: float | None


class JudgeRequestError(Exception):
    """No reply. ``again`` where another try may help, ``after_s`` as the server wished, ``paid`` where it may cost."""

    def __init__(self, message: str, *, again: bool, after_s: float = 0.0, paid: bool = False) -> None:
        super().__init__(_without_keys(message))
        self.again, self.after_s, self.paid = again, after_s, paid


class JudgeClient:
    """Requests of one judge. Lives on the event loop that it is first used on."""

    def __init__(self, settings: JudgeSettings) -> None:
        assert settings.model is not None
        self._settings, self._model = settings, settings.model
        self._http: httpx.AsyncClient | None = None

    async def ask(self, messages: list[dict[str, str]]) -> Reply:
        """Ask once. Raises :class:`JudgeRequestError`."""
        send = self._litellm if self._settings.base_url is None else self._endpoint
        body = await send(
            {
                "model": self._model,
                "messages": messages,
                "temperature": self._settings.temperature,
                "max_tokens": self._settings.max_tokens,
                "response_format": RESPONSE_FORMAT,
            }
        )
        try:
            text = body["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise JudgeRequestError(f"{self._where} sent no chat completion", again=True, paid=True) from error
        return Reply(text=text if isinstance(text, str) else "", usd=await self._cost(body.get("usage")))

    async def most(self, messages: list[dict[str, str]]) -> float:
        """What a request may cost at most, in USD: no text has more tokens than bytes."""
        read, written = await self._prices()
        bytes_ = sum(len(message["content"].encode("utf-8", "replace")) for message in messages) + 1000
        return (bytes_ * read + self._settings.max_tokens * written) / _MILLION

    @property
    def _where(self) -> str:
        return f"the judge {self._model} at {self._settings.base_url or 'its provider'}"

    async def _endpoint(self, payload: Mapping[str, Any]) -> Any:
        import httpx

        settings = self._settings
        if self._http is None:
            limits = httpx.Limits(max_connections=settings.concurrency)
            # A judge on this machine is not behind the proxy that the environment may name for the network.
            near = urlsplit(str(settings.base_url)).hostname in ("127.0.0.1", "localhost", "::1")
            self._http = httpx.AsyncClient(timeout=settings.timeout_s, limits=limits, trust_env=not near)
        headers = {"Authorization": f"Bearer {os.environ.get(API_KEY) or 'none'}"}
        url = f"{str(settings.base_url).rstrip('/')}/chat/completions"
        try:
            answer = await asyncio.wait_for(self._http.post(url, json=payload, headers=headers), settings.timeout_s)
        except (asyncio.TimeoutError, httpx.TimeoutException) as error:
            message = f"{self._where} gave no reply within {settings.timeout_s:g} s"
            raise JudgeRequestError(message, again=True, paid=True) from error
        except httpx.HTTPError as error:
            raise JudgeRequestError(f"{self._where} cannot be reached: {error}", again=True) from error
        if not answer.is_success:
            raise self._refused(answer.status_code, answer.text, answer.headers)
        try:
            return answer.json()
        except ValueError as error:
            raise JudgeRequestError(f"{self._where} sent no JSON", again=True, paid=True) from error

    async def _litellm(self, payload: Mapping[str, Any]) -> Any:
        litellm = await asyncio.to_thread(_import_litellm)
        key = os.environ.get(API_KEY)
        options = {"api_key": key} if key else {}
        timeout_s = self._settings.timeout_s
        try:
            answer = await asyncio.wait_for(
                litellm.acompletion(**payload, timeout=timeout_s, max_retries=0, drop_params=True, **options), timeout_s
            )
        except (asyncio.TimeoutError, litellm.Timeout) as error:
            message = f"{self._where} gave no reply within {timeout_s:g} s"
            raise JudgeRequestError(message, again=True, paid=True) from error
        except Exception as error:  # every provider has its own
            status = getattr(error, "status_code", None)
            response = getattr(error, "response", None)
            raise self._refused(status, str(error), getattr(response, "headers", None) or {}) from error
        return answer.model_dump()

    def _refused(self, status: int | None, message: str, headers: Mapping[str, str]) -> JudgeRequestError:
        if status is None:
            return JudgeRequestError(f"{self._where} cannot be asked: {message[:500]}", again=False)
        again = status in _FOR_NOW or status >= _SERVER
        after = headers.get("retry-after", "")
        after_s = float(after) if after.replace(".", "", 1).isdigit() else 0.0
        said = f"{self._where} answered {status}: {message[:500]}"
        if status in (401, 403):
            said += f" (set {API_KEY} in the environment of every process that runs agents)"
        return JudgeRequestError(said, again=again, after_s=after_s)

    async def _cost(self, usage: Mapping[str, Any] | None) -> float | None:
        if not usage:
            return None
        read, written = await self._prices()
        tokens = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        return (tokens[0] * read + tokens[1] * written) / _MILLION

    async def _prices(self) -> tuple[float, float]:
        """USD for a million tokens, read and written; 0 where nobody said and there is no cap to keep."""
        settings = self._settings
        if settings.input_usd is not None and settings.output_usd is not None:
            return settings.input_usd, settings.output_usd
        if settings.base_url is not None:
            return 0.0, 0.0
        litellm = await asyncio.to_thread(_import_litellm)
        try:
            price = litellm.get_model_info(self._model)
            return float(price["input_cost_per_token"]) * _MILLION, float(price["output_cost_per_token"]) * _MILLION
        except Exception as error:  # it raises a plain Exception for a model that it does not know
            if settings.max_usd is None:
                return 0.0, 0.0
            raise JudgeRequestError(
                f"LiteLLM knows no price for {self._model}, and max_usd needs one: set input_usd and output_usd",
                again=False,
            ) from error


def _import_litellm() -> Any:
    # Otherwise it fetches a list of prices from the network.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    litellm.suppress_debug_info = True
    return litellm


def _without_keys(message: str) -> str:
    """A provider may repeat the key that it refuses."""
    for name, value in os.environ.items():
        if name.endswith(("_API_KEY", "_TOKEN", "_SECRET")) and len(value) > 5:
            message = message.replace(value, f"${name}")
    return message
