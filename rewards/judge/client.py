"""Requests to the judge's model: an OpenAI-compatible endpoint over HTTP, or any provider through LiteLLM.

LiteLLM takes seconds to import, so it is imported only for a judge without a ``base_url``.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from groundwire.rewards._types import JudgeAbstainedError
from groundwire.rewards.judge.settings import API_KEY, JudgeSettings, numbers
from groundwire.tools.secrets import mask_secrets

if TYPE_CHECKING:
    import httpx

_TRANSIENT = {408, 409, 425, 429}
_SERVER_ERROR = 500
_MILLION = 1_000_000
_REQUEST_SHARE = 2 / 3  # of the deadline, what one request may take: then another has time


class JudgeRequestError(Exception):
    """A request without a reply.

    ``transient``: a retry may help, after ``retry_after_s`` at the earliest. ``billed``: it may have cost something.
    """

    def __init__(self, message: str, *, transient: bool, retry_after_s: float = 0.0, billed: bool = False) -> None:
        super().__init__(mask_secrets(message))
        self.transient, self.retry_after_s, self.billed = transient, retry_after_s, billed


class JudgeClient:
    """Requests of the judge, or of the teacher, on the event loop of the first one.

    Raises ``ModuleNotFoundError`` if it needs LiteLLM, which is not installed.
    """

    def __init__(self, settings: JudgeSettings, *, teacher: bool = False) -> None:
        self._settings = settings
        self.model = settings.teacher if teacher else settings.model
        self._base_url = settings.teacher_base_url if teacher else settings.base_url
        if self._base_url is None and find_spec("litellm") is None:
            raise ModuleNotFoundError("No module named 'litellm'", name="litellm")
        self.name = f"the {'teacher' if teacher else 'judge'} {self.model}"
        self._place = f"{self.name} at {self._base_url or 'its provider'}"
        self._timeout_s = settings.deadline_s * _REQUEST_SHARE
        self._http: httpx.AsyncClient | None = None

    async def ask(self, messages: list[dict[str, str]], response_format: Any) -> tuple[str, float | None]:
        """The reply to a request, and its cost in USD, if it has token counts. Raises :class:`JudgeRequestError`."""
        settings = self._settings
        payload: dict[str, Any] = {"model": self.model, "messages": messages}
        payload |= {"temperature": settings.temperature, "max_tokens": settings.max_tokens}
        payload |= {"response_format": response_format} if response_format else {}
        if self._base_url is None:
            await asyncio.to_thread(_import_litellm)  # takes seconds, and must not count as the request's time
        send = self._send_to_litellm if self._base_url is None else self._send_to_endpoint
        try:
            body = await asyncio.wait_for(send(payload), self._timeout_s)
            text = body["choices"][0]["message"]["content"]
        except asyncio.TimeoutError as error:
            message = f"{self._place} gave no reply within {self._timeout_s:g} s"
            raise JudgeRequestError(message, transient=True, billed=True) from error
        except (ValueError, LookupError, TypeError) as error:  # it is no JSON, or another
            message = f"{self._place} sent no chat completion"
            raise JudgeRequestError(message, transient=True, billed=True) from error
        usage = body.get("usage") or {}
        tokens = [usage.get(name) or 0 for name in ("prompt_tokens", "completion_tokens")]
        return mask_secrets(text) if isinstance(text, str) else "", await self._cost(*tokens) if usage else None

    async def max_cost(self, messages: list[dict[str, str]]) -> float:
        """The most that a request can cost, in USD: a text has at most as many tokens as bytes."""
        size = sum(len(message["content"].encode("utf-8", "replace")) for message in messages)
        return await self._cost(size + 1000, self._settings.max_tokens)

    async def _send_to_endpoint(self, payload: Mapping[str, Any]) -> Any:
        import httpx

        base_url = str(self._base_url)
        if self._http is None:
            # A judge on this machine is not behind the network's HTTP proxy.
            local = urlsplit(base_url).hostname in ("127.0.0.1", "localhost", "::1")
            self._http = httpx.AsyncClient(timeout=self._settings.deadline_s, trust_env=not local)
        headers = {"Authorization": f"Bearer {os.environ.get(API_KEY) or 'none'}"}
        try:
            answer = await self._http.post(f"{base_url.rstrip('/')}/chat/completions", json=payload, headers=headers)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise JudgeRequestError(f"{self._place} cannot be reached: {error}", transient=True) from error
        if not answer.is_success:
            raise self._refusal(answer.status_code, answer.text, answer.headers)
        return answer.json()

    async def _send_to_litellm(self, payload: Mapping[str, Any]) -> Any:
        litellm = _import_litellm()
        key = os.environ.get(API_KEY)
        options: dict[str, Any] = {"api_key": key} if key else {}
        try:
            answer = await litellm.acompletion(**payload, **options, max_retries=0, drop_params=True)
        except Exception as error:  # each provider has its own exceptions
            response = getattr(error, "response", None)
            headers = getattr(response, "headers", None) or {}
            raise self._refusal(getattr(error, "status_code", None), str(error), headers) from error
        return answer.model_dump()

    def _refusal(self, status: int | None, message: str, headers: Mapping[str, str]) -> JudgeRequestError:
        message = mask_secrets(message)[:500]  # masked before it is cut
        if status is None:
            return JudgeRequestError(f"{self._place} cannot be asked: {message}", transient=False)
        hint = f" (set {API_KEY} in the environment of every process that runs agents)" if status in (401, 403) else ""
        wait = headers.get("retry-after", "")
        return JudgeRequestError(
            f"{self._place} answered {status}: {message}{hint}",
            transient=status in _TRANSIENT or status >= _SERVER_ERROR,
            retry_after_s=float(wait) if wait.replace(".", "", 1).isdigit() else 0.0,
        )

    async def _cost(self, prompt_tokens: int, reply_tokens: int) -> float:
        """USD; 0 if the prices are unknown and there is no cap."""
        settings, prices = self._settings, [0.0, 0.0]
        if settings.prices is not None:
            prices = numbers(settings.prices)
        elif self._base_url is None:
            litellm = await asyncio.to_thread(_import_litellm)
            try:
                info = litellm.get_model_info(self.model)
                prices = [float(info[f"{kind}_cost_per_token"]) * _MILLION for kind in ("input", "output")]
            except Exception as error:  # LiteLLM raises a plain Exception for an unknown model
                if settings.max_usd is not None:
                    raise JudgeAbstainedError(
                        f"LiteLLM knows no price for {self.model}, and max_usd needs one: set prices"
                    ) from error
        return (prompt_tokens * prices[0] + reply_tokens * prices[1]) / _MILLION


def _import_litellm() -> Any:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it downloads a list of prices
    import litellm

    litellm.suppress_debug_info = True
    return litellm
