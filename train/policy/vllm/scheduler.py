"""vLLM's scheduler, which sends a reply that nobody reads before its end once, and not each token by itself.

With log-probabilities each token is a message of three arrays, which vLLM's engine packs and its front end unpacks.
With hundreds of requests at once this takes longer than computing the tokens, whatever the size of the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.outputs import LogprobsLists

_FIRST = ("new_prompt_logprobs_tensors", "prefill_stats", "trace_headers", "num_nans_in_logits")
"""Fields of a reply's first output that later ones do not repeat."""
_JOINED = {"request_id", "new_token_ids", "new_logprobs", "events", "finish_reason", "stop_reason", *_FIRST}
"""Fields that are put together, or belong to the end. An output with another one, as newer versions have, is sent."""


class WholeReplies(AsyncScheduler):
    """For ``scheduler_cls``. Replies with stop strings, which the front end looks for, are sent token by token."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._held = dict[str, list[Any]]()  # the outputs so far of each reply that has not ended

    def update_from_output(self, *arguments: Any, **options: Any) -> Any:
        """As vLLM's: the outputs of a step for each client."""
        clients = super().update_from_output(*arguments, **options)
        for outputs in clients.values():
            outputs.outputs = [output for output in map(self._hold, outputs.outputs) if output is not None]
        for request in self._held.keys() - self.requests.keys():  # cancelled
            del self._held[request]
        return clients

    def _hold(self, output: Any) -> Any:
        """None while the reply goes on, and all of it at the end."""
        more = any(getattr(output, name) is not None for name in output.__struct_fields__ if name not in _JOINED)
        if output.finish_reason is None and not more and self._waits(self.requests.get(output.request_id)):
            self._held.setdefault(output.request_id, []).append(output)
            return None
        parts = [*self._held.pop(output.request_id, ()), output]
        if len(parts) == 1:
            return output
        output.new_token_ids = [token for part in parts for token in part.new_token_ids]
        logprobs = [part.new_logprobs for part in parts if part.new_logprobs is not None]
        if logprobs:
            arrays = list(zip(*logprobs, strict=True))[:3]
            output.new_logprobs = LogprobsLists(*map(np.concatenate, arrays))
        output.events = [event for part in parts for event in part.events or ()] or None
        for name in _FIRST:
            setattr(output, name, getattr(output, name) or getattr(parts[0], name))
        return output

    def _waits(self, request: Any) -> bool:
        """Whether nobody reads a request's tokens before the last one."""
        sampling = request and request.sampling_params
        return (
            sampling is not None
            and sampling.output_kind == RequestOutputKind.FINAL_ONLY
            and not (sampling.stop or request.resumable)
        )
