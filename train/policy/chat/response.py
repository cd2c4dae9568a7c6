"""Chat completion responses, whole or as the events of a stream.

:meth:`ChatResponse.parse` makes a message of what was sampled, for both: first its reasoning, then its content and tool
calls (:mod:`groundwire.train.policy.chat.tool_formats`). A model has reasoning if its chat template has ``<think>``. It
begins the reply, with ``<think>`` unless the prompt ends with that, and ends with ``</think>`` or with the reply.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from groundwire.adapters.tracing.calls import to_json
from groundwire.adapters.tracing.wire.exchange import HttpExchange
from groundwire.train.policy.chat.request import ChatRequest
from groundwire.train.policy.chat.tool_formats import END_THINK, THINK, ToolFormat
from groundwire.train.policy.types import Completion

HELD_TOKENS = 4
"""Tokens that a stream holds back: a later token can change the text of the last few."""
_WINDOW = 16  # tokens that a stream decodes again with each new one, at least


class ChatResponse:
    """The response to one request. ``prompt_ids`` are its messages as token ids, ``model`` is the served name."""

    def __init__(
        self,
        request: ChatRequest,
        prompt_ids: tuple[int, ...],
        *,
        model: str,
        tokenizer: Any,
        tool_format: ToolFormat,
        exchange: HttpExchange,
    ) -> None:
        self.request, self.prompt_ids, self.tool_format = request, prompt_ids, tool_format
        self.tools = {tool["function"]["name"]: tool["function"].get("parameters") for tool in request.callable_tools}
        self._tokenizer = tokenizer
        self._shown, self.hidden = _special_tokens(tokenizer, tool_format.special if self.tools else ())
        """The special tokens that are part of the text, and those that are not."""
        self._thinks = not (request.raw_prompt or request.grammar) and THINK in str(tokenizer.chat_template)
        self._opened = self._thinks and tokenizer.decode(prompt_ids[-_WINDOW:]).rstrip().endswith(THINK)
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self._new_id, origin = exchange.new_id, exchange.origin
        reply_id, created = f"chatcmpl-{origin.reply_key}", int(origin.started)
        self._head = {"id": reply_id, "object": kind, "created": created, "model": model}

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of sampled ids. Of the special tokens it has those of tool calls, if tools may be called."""
        return str(self._tokenizer.decode([token for token in token_ids if token not in self.hidden]))

    def parse(self, text: str, *, ended: bool = True) -> tuple[str, str | None, list[dict[str, Any]]]:
        """The reasoning, content and tool calls in the text of a reply.

        If it has not ``ended``, only what no later text can change.
        """
        begun = text.lstrip()
        if self._opened or (self._thinks and begun.startswith(THINK)):
            reasoning, end, text = (text if self._opened else begun[len(THINK) :]).partition(END_THINK)
            if not end:
                return reasoning if ended else reasoning[: 1 - len(END_THINK)], None, []
        elif self._thinks and not ended and THINK.startswith(begun):
            return "", None, []
        else:
            reasoning = ""
        return reasoning, *(self.tool_format.parse(text, self.tools, ended=ended) if self.tools else (text, []))

    def message(self, reply: Completion, choice: int = 0) -> tuple[dict[str, Any], str]:
        """The assistant's message of a choice, and its finish reason, ``length`` also if the limit came after a whole
        tool call.

        Reasoning has two names: vLLM says ``reasoning``, before 0.16 ``reasoning_content``, as many clients still do.
        """
        reasoning, content, calls = self.parse(self._said(reply))
        if not self.request.parallel_tool_calls:
            calls = calls[:1]
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if reasoning or calls else "")}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            prefix, length = self.tool_format.id_form
            ids = (f"{prefix}{self._new_id(f'{choice}/{place}', length)}" for place in range(len(calls)))
            message["tool_calls"] = [{"id": made, **call} for made, call in zip(ids, calls, strict=True)]
        return message, "tool_calls" if calls and reply.finish_reason == "stop" else reply.finish_reason

    def _said(self, reply: Completion) -> str:
        """The text before what ended the reply: the engine's, unless it lacks the special tokens of calls."""
        ids, request = reply.token_ids, self.request
        if self._shown.isdisjoint(ids):
            return reply.text
        text = self.text(ids[:-1] if ids[-1] in request.stop_token_ids else ids)
        return text[: min((at for stop in request.stop_strings if (at := text.find(stop)) >= 0), default=len(text))]

    def sampled(self, reply: Completion, message: Mapping[str, Any], finish_reason: str) -> dict[str, Any]:
        """The fields of the traced LLM call."""
        return {
            "prompt_ids": list(reply.prompt_ids),
            "response_ids": reply.token_ids,
            "reply_id": self._head["id"],
            "logprobs": reply.logprobs,
            "finish_reason": finish_reason,
            "reply_json": to_json(message),
            "grammar": self.request.grammar,
            "cached_tokens": reply.cached_tokens or None,
            **versions(reply),
        }

    def body(self, replies: list[Completion], messages: list[tuple[dict[str, Any], str]]) -> dict[str, Any]:
        """The whole response, one choice for each of ``replies``, with its :meth:`message`."""
        choices = []
        for index, (reply, (message, finish_reason)) in enumerate(zip(replies, messages, strict=True)):
            logprobs = self.logprobs(reply.token_ids, reply.logprobs)
            choice = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}
            choice |= self.stop_reason(reply)
            if self.request.return_token_ids:
                choice |= {"token_ids": reply.token_ids, **self.grammar()}
            choices.append(choice)
        body = {**self._head, "choices": choices, "usage": self.usage(replies), **versions(replies[0])}
        if self.request.return_token_ids:
            body["prompt_token_ids"] = self.prompt_ids
        return body

    def stop_reason(self, reply: Completion) -> dict[str, str]:
        """The stop string that ended a reply, in the field that vLLM has for it."""
        if not self.request.stop or reply.finish_reason != "stop":
            return {}
        rest = self.text(reply.token_ids)[len(self._said(reply)) :]
        return next(({"stop_reason": stop} for stop in self.request.stop if rest.startswith(stop)), {})

    def grammar(self) -> dict[str, str]:
        """The constraint, without which training cannot compute the logprobs again."""
        return {"grammar": grammar} if (grammar := self.request.grammar) else {}

    def event(self, *choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """An event of a stream."""
        return {**self._head, "choices": choices, **fields}

    def logprobs(self, token_ids: list[int], logprobs: list[float]) -> dict[str, Any] | None:
        """The sampled tokens with their logprobs, if the request asks for them."""
        if not self.request.logprobs:
            return None
        tokens = (_token_entry(self._tokenizer, token) for token in token_ids)
        return {"content": [{"logprob": lp, **token} for token, lp in zip(tokens, logprobs, strict=True)]}

    def usage(self, replies: list[Completion]) -> dict[str, Any]:
        """The numbers of tokens."""
        prompt_tokens, generated = len(self.prompt_ids), sum(len(reply.token_ids) for reply in replies)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": replies[0].cached_tokens},
        }


class _FinalText:
    """The text of a reply so far that no later token can change.

    Only a window of tokens is decoded again with each new one. It begins before the tokens whose text is not settled,
    because some tokenizers drop the space at the beginning of a text.
    """

    def __init__(self, response: ChatResponse) -> None:
        self._response, self._window = response, list[int]()
        self._decoded = deque([""] * (HELD_TOKENS + 1), HELD_TOKENS + 1)
        """The text of the window before its last tokens, with one of them more, and so on."""
        self._settled, self._skipped, self._text = "", 0, ""

    def add(self, token: int) -> str:
        """The final text, after one more token."""
        if token in self._response.hidden:
            return self._text
        self._window.append(token)
        self._decoded.append(text := self._response.text(self._window))
        final = self._decoded[0]
        if not text.startswith(final):
            final = next((final[:i] for i, (a, b) in enumerate(zip(final, text, strict=False)) if a != b), text)
        self._text = self._settled + final[self._skipped :]
        if len(self._window) >= 2 * _WINDOW:
            later = self._window[_WINDOW:]
            decoded = [self._response.text(later[: len(later) - held]) for held in range(HELD_TOKENS, -1, -1)]
            head, whole = decoded[0], decoded[-1]
            end = len(text) - len(whole) + len(head)
            if whole.startswith(head) and text[end:] == whole[len(head) :] and end <= len(final):
                self._settled += text[self._skipped : end]
                self._window, self._skipped = later, len(head)
                self._decoded.extend(decoded)
        return self._text


class StreamedChoice:
    """One choice of a stream: sends text as soon as no later token can change it."""

    def __init__(self, index: int, response: ChatResponse) -> None:
        self._index, self._response, self._request = index, response, response.request
        self._tokens, self._logprobs = list[int](), list[float]()
        self._text = _FinalText(response)
        self._sent = Counter[tuple[str, ...]]()
        self._held_chars = max(map(len, self._request.stop_strings), default=1) - 1

    def start(self) -> dict[str, Any]:
        """The choice of its first event."""
        chunk = self._chunk({"role": "assistant", "content": ""})
        return {**chunk, **self._response.grammar()} if self._request.return_token_ids else chunk

    def add(self, token: int, logprob: float) -> dict[str, Any]:
        """The choice after one more token. Text that may become part of a stop string or a tool call is held back."""
        self._tokens.append(token)
        self._logprobs.append(logprob)
        text = self._text.add(token)
        reasoning, content, _ = self._response.parse(text[: max(len(text) - self._held_chars, 0)], ended=False)
        logprobs = self._response.logprobs([token], [logprob])
        return self._chunk(self._delta(reasoning, content), token_ids=[token], logprobs=logprobs)

    def cut_short(self, weights_version: int) -> Completion:
        """The reply that ends with the last sent token, because nobody reads on."""
        ids, text = self._tokens, self._response.text(self._tokens)
        return Completion(self._response.prompt_ids, ids, self._logprobs, text, "length", weights_version)

    def end(self, message: Mapping[str, Any], finish_reason: str) -> dict[str, Any]:
        """The choice of its last event, which completes ``message``."""
        delta = self._delta(message.get("reasoning", ""), message["content"])
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
        return self._chunk(delta, finish_reason=finish_reason, token_ids=[])

    def _delta(self, reasoning: str, content: str | None) -> dict[str, Any]:
        """What was not sent yet."""
        delta: dict[str, Any] = {}
        for names, text in ((("reasoning_content", "reasoning"), reasoning), (("content",), content or "")):
            if new := text[self._sent[names] :]:
                delta |= dict.fromkeys(names, new)
                self._sent[names] = len(text)
        return delta

    def _chunk(self, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        if not self._request.return_token_ids:
            fields.pop("token_ids", None)
        return {"index": self._index, "delta": delta, "finish_reason": None, "logprobs": None, **fields}


@functools.lru_cache(maxsize=1 << 17)
def _token_entry(tokenizer: Any, token: int) -> dict[str, Any]:
    text = tokenizer.decode([token])
    return {"token": text, "bytes": list(text.encode()), "top_logprobs": []}


@functools.lru_cache(maxsize=64)
def _special_tokens(tokenizer: Any, shown: tuple[str, ...]) -> tuple[frozenset[int], frozenset[int]]:
    special = {i: token.content for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    found = frozenset(i for i, text in special.items() if text in shown)
    return found, frozenset(special) - found


def versions(reply: Completion) -> dict[str, int]:
    """The fields that name the weights of a reply."""
    first = reply.first_weights_version
    return {"weights_version": reply.weights_version, **({} if first is None else {"first_weights_version": first})}
