"""Requests to the judge's model: an OpenAI-compatible endpoint over HTTP, or any provider through LiteLLM.

LiteLLM takes seconds to import, so it is imported only for a judge without a ``base_url``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from groundwire.rewards.judge.prompt import RESPONSE_FORMAT
from groundwire.rewards.judge.settings import API_KEY, JudgeSettings
from groundwire.tools.secrets import mask_secrets

if TYPE_CHECKING:
    import httpx

_TRANSIENT = {408, 409, 425, 429}
_SERVER_ERROR = 500
_MILLION = 1_000_000
_REQUEST_SHARE = 2 / 3
"""Of the deadline, what one request may take: then another has time."""


class JudgeReply(NamedTuple):
    """The model's reply; ``usd`` is None if the reply has no token counts."""

    text: str
    usd: float | None


class JudgeRequestError(Exception):
    """A request without a reply.

    ``transient``: a retry may help, after ``retry_after_s`` at the earliest. ``billed``: it may have cost something.
    """

    def __init__(self, message: str, *, transient: bool, retry_after_s: float = 0.0, billed: bool = False) -> None:
        super().__init__(mask_secrets(message))
        self.transient, self.retry_after_s, self.billed = transient, retry_after_s, billed


class JudgeClient:
    """Requests of one judge or teacher, on the event loop of the first one.

    Raises ``ModuleNotFoundError`` if it needs LiteLLM, which is not installed: a run says so before it begins.
    """

    def __init__(self, settings: JudgeSettings, *, role: str = "judge") -> None:
        assert settings.model is not None
        if settings.base_url is None and find_spec("litellm") is None:
            raise ModuleNotFoundError("No module named 'litellm'", name="litellm")
        self._settings, self._model = settings, settings.model
        self._name = f"the {role} {self._model} at {settings.base_url or 'its provider'}"
        self._timeout_s = settings.deadline_s * _REQUEST_SHARE
        self._http: httpx.AsyncClient | None = None

    async def ask(self, messages: list[dict[str, str]], *, structured: bool = True) -> JudgeReply:
        """Send one request, for a verdict if ``structured``, else for text. Raises :class:`JudgeRequestError`."""
        if self._settings.base_url is None:
            await asyncio.to_thread(_import_litellm)  # takes seconds, and must not count as the request's time
            send = self._send_to_litellm
        else:
            send = self._send_to_endpoint
        payload: dict[str, Any] = {"model": self._model, "messages": messages}
        payload |= {"temperature": self._settings.temperature, "max_tokens": self._settings.max_tokens}
        payload |= {"response_format": RESPONSE_FORMAT} if structured else {}
        try:
            body = await asyncio.wait_for(send(payload), self._timeout_s)
        except (asyncio.TimeoutError, TimeoutError) as error:
            message = f"{self._name} gave no reply within {self._timeout_s:g} s"
            raise JudgeRequestError(message, transient=True, billed=True) from error
        try:
            text = body["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise JudgeRequestError(f"{self._name} sent no chat completion", transient=True, billed=True) from error
        text = mask_secrets(text) if isinstance(text, str) else ""
        return JudgeReply(text=text, usd=await self._cost(body.get("usage")))

    async def max_cost(self, messages: list[dict[str, str]]) -> float:
        """The most that a request can cost, in USD: a text has at most as many tokens as bytes."""
        input_usd, output_usd = await self._prices()
        size = sum(len(message["content"].encode("utf-8", "replace")) for message in messages) + 1000
        return (size * input_usd + self._settings.max_tokens * output_usd) / _MILLION

    async def _send_to_endpoint(self, payload: Mapping[str, Any]) -> Any:
        import httpx

        settings = self._settings
        base_url = str(settings.base_url)
        if self._http is None:
            # A judge on this machine is not behind the network's HTTP proxy.
            local = urlsplit(base_url).hostname in ("127.0.0.1", "localhost", "::1")
            self._http = httpx.AsyncClient(timeout=self._timeout_s, trust_env=not local)
        headers = {"Authorization": f"Bearer {os.environ.get(API_KEY) or 'none'}"}
        try:
            answer = await self._http.post(f"{base_url.rstrip('/')}/chat/completions", json=payload, headers=headers)
        except httpx.TimeoutException as error:
            raise TimeoutError from error
        except httpx.HTTPError as error:
            raise JudgeRequestError(f"{self._name} cannot be reached: {error}", transient=True) from error
        if not answer.is_success:
            raise self._refusal(answer.status_code, answer.text, answer.headers)
        try:
            return answer.json()
        except ValueError as error:
            raise JudgeRequestError(f"{self._name} sent no JSON", transient=True, billed=True) from error

    async def _send_to_litellm(self, payload: Mapping[str, Any]) -> Any:
        litellm = _import_litellm()
        key = os.environ.get(API_KEY)
        options: dict[str, Any] = {"api_key": key} if key else {}
        try:
            options |= {"timeout": self._timeout_s, "max_retries": 0, "drop_params": True}
            answer = await litellm.acompletion(**payload, **options)
        except litellm.Timeout as error:
            raise TimeoutError from error
        except Exception as error:  # each provider has its own exceptions
            response = getattr(error, "response", None)
            headers = getattr(response, "headers", None) or {}
            raise self._refusal(getattr(error, "status_code", None), str(error), headers) from error
        return answer.model_dump()

    def _refusal(self, status: int | None, message: str, headers: Mapping[str, str]) -> JudgeRequestError:
        message = mask_secrets(message)  # before it is cut
        if status is None:
            return JudgeRequestError(f"{self._name} cannot be asked: {message[:500]}", transient=False)
        hint = f" (set {API_KEY} in the environment of every process that runs agents)" if status in (401, 403) else ""
        wait = headers.get("retry-after", "")
        return JudgeRequestError(
            f"{self._name} answered {status}: {message[:500]}{hint}",
            transient=status in _TRANSIENT or status >= _SERVER_ERROR,
            retry_after_s=float(wait) if wait.replace(".", "", 1).isdigit() else 0.0,
        )

    async def _cost(self, usage: Mapping[str, Any] | None) -> float | None:
        if not usage:
            return None
        input_usd, output_usd = await self._prices()
        tokens = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
        return (tokens[0] * input_usd + tokens[1] * output_usd) / _MILLION

    async def _prices(self) -> tuple[float, float]:
        """USD per million prompt and reply tokens; 0 if they are unknown and there is no cap."""
        settings = self._settings
        if settings.prices is not None:
            input_usd, output_usd = map(float, settings.prices.split(","))
            return input_usd, output_usd
        if settings.base_url is not None:
            return 0.0, 0.0
        litellm = await asyncio.to_thread(_import_litellm)
        try:
            price = litellm.get_model_info(self._model)
            return float(price["input_cost_per_token"]) * _MILLION, float(price["output_cost_per_token"]) * _MILLION
        except Exception as error:  # LiteLLM raises a plain Exception for an unknown model
            if settings.max_usd is None:
                return 0.0, 0.0
            raise JudgeRequestError(
                f"LiteLLM knows no price for {self._model}, and max_usd needs one: set prices", transient=False
            ) from error


def _import_litellm() -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it downloads a list of prices
    import litellm

    litellm.suppress_debug_info = True
    return litellm
