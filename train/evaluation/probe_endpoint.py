"""An endpoint of somebody else's, asked one thing before it is asked a thousand: does it answer, and with token ids?

Some servers send ids, some ignore the wish, some refuse a request that has it. A wrong address, model or key is said
here, in one sentence, rather than as so many failed rollouts.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from groundwire.train.config.errors import ConfigError
from groundwire.train.rollouts.runtime import Upstream

__all__ = ["EndpointUnusableError", "find_upstream"]

_REFUSALS = (400, 422)
_TIMEOUT_S = 60.0


class EndpointUnusableError(ConfigError):
    """The endpoint does not answer a chat completion; the message has its own words."""


def find_upstream(
    *, base_url: str, model: str, api_key: str | None, sampling: Mapping[str, Any]
) -> tuple[Upstream, bool]:
    """The endpoint as a policy, and whether it sends token ids. Raises :class:`EndpointUnusableError`.

    One short request is made, with the sampling that the evaluation uses.
    """
    base = base_url.rstrip("/")
    asked = {"model": model, "messages": [{"role": "user", "content": "Say hello."}], **sampling}
    for ids in (True, False):
        body = {**asked, **({"return_token_ids": True, "logprobs": True} if ids else {})}
        try:
            reply = _post(f"{base}/chat/completions", body, api_key)
            sent = bool(reply.get("prompt_token_ids") and reply["choices"][0].get("token_ids"))
        except urllib.error.HTTPError as error:
            if ids and error.code in _REFUSALS:
                continue
            raise EndpointUnusableError(f"{base} answered {error.code}: {_words(error)}") from error
        except urllib.error.URLError as error:
            raise EndpointUnusableError(f"{base} does not answer as an OpenAI endpoint: {error.reason}") from error
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise EndpointUnusableError(
                f"{base} does not answer as an OpenAI endpoint: {error}; its base URL usually ends in /v1"
            ) from error
        return Upstream(base_url=base, model=model, api_key=api_key, ids=ids), sent
    raise AssertionError("the second request either answers or raises")


def _post(url: str, body: Mapping[str, Any], api_key: str | None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=headers)  # noqa: S310
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_TIMEOUT_S) as reply:
        answer: dict[str, Any] = json.loads(reply.read())
        return answer


def _words(error: urllib.error.HTTPError) -> str:
    text = error.read(2000).decode("utf-8", "replace")
    try:
        said = json.loads(text)["error"]
        return str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, LookupError, TypeError):
        return text.strip() or str(error.reason)
