"""Test an OpenAI-compatible endpoint with one short request before it gets a thousand.

A wrong address, model or key then ends the command with one message, not with as many failed rollouts. Some servers
return token ids, some ignore ``return_token_ids``, and some refuse a request that has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from groundwire.tools.secrets import has_credentials, mask_secrets, register_secret
from groundwire.train.config.errors import ConfigError

_REFUSED = (400, 422)


class EndpointProbe(NamedTuple):
    """``accepts_ids``: the request for token ids is not refused. ``sends_ids``: they come, with their logprobs."""

    accepts_ids: bool
    sends_ids: bool


def probe_endpoint(
    base_url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    sampling: Mapping[str, Any],
    timeout_s: float = 60.0,
) -> EndpointProbe:
    """Request one chat completion of ``model`` (default: the endpoint's first) with ``sampling``.

    Raises :class:`ConfigError`, which quotes the endpoint's own error, if there is no answer.
    """
    if has_credentials(base_url):
        raise ConfigError(
            "the endpoint's base URL has a user, a password or a query: leave it out, and put the key into "
            "OPENAI_API_KEY or the variable of --api-key-env"
        )
    register_secret(api_key)
    base = base_url.rstrip("/")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=timeout_s, trust_env=False) as client:
            name = model or _checked(client.get("/models"), base)["data"][0]["id"]
            body = {"model": name, "messages": [{"role": "user", "content": "Say hello."}], **sampling}
            response = client.post("/chat/completions", json={**body, "return_token_ids": True, "logprobs": True})
            accepts_ids = response.status_code not in _REFUSED
            if not accepts_ids:
                response = client.post("/chat/completions", json=body)
            reply = _checked(response, base)
            choice = reply["choices"][0]
            ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("content")
            sends_ids = bool(reply.get("prompt_token_ids") and ids and logprobs and len(ids) == len(logprobs))
            return EndpointProbe(accepts_ids=accepts_ids, sends_ids=sends_ids)
    except (httpx.RequestError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"{base} does not answer as an OpenAI endpoint ({error}): start the server, or correct the address"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{base} does not answer as an OpenAI endpoint: {error!r}; its base URL usually ends in /v1"
        ) from error


def _checked(response: httpx.Response, base: str) -> Any:
    if response.is_success:
        return response.json()
    try:
        error = response.json()["error"]
        message = mask_secrets(str(error["message"] if isinstance(error, dict) else error))
    except (ValueError, LookupError, TypeError):
        message = " ".join(mask_secrets(response.text).split())[:200] or response.reason_phrase
        if "html" in response.headers.get("Content-Type", ""):  # the text of a web page does not help
            message = f"{response.reason_phrase}; its base URL usually ends in /v1"
    raise ConfigError(f"{base} answered {response.status_code}: {message}")
