"""verl's inference servers as the engine behind our OpenAI-compatible server.

verl gives an agent loop a client that works with token ids: it balances the load over the servers, keeps a session on
one server, applies a LoRA adapter, waits while weights change, continues a reply that the change interrupted, and
reports the versions of the weights. vLLM's own HTTP port does none of this, so calls go through the client.
"""

from __future__ import annotations

import asyncio
import pkgutil
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from groundwire.tools.secrets import mask_secrets
from groundwire.train.policy.errors import ChatRequestError, ContextLengthError, EngineClosedError, EngineError
from groundwire.train.policy.types import Completion, OnToken, Sampling
from groundwire.train.policy.vllm.sampling import completion, structured_outputs, vllm_grammar, vllm_parameters
from groundwire.train.step_timer import StepTimer
from groundwire.train.verl.shared_prefixes.prefixes import RouteKeys


@dataclass(eq=False)
class VerlEngine:
    """Answers requests of :class:`PolicyServer` with verl's servers; the ``timer`` counts them as sampling.

    ``client`` is verl's ``LLMServerClient`` and ``server`` its ``rollout.name``. ``interrupted``: verl ends requests to
    change the weights, and for that waits for their first token. ``together``: see :class:`.RouteKeys`.
    ``why_unconstrained`` is the end of an error if no reply can be constrained, else "".
    """

    client: Any
    tokenizer: Any
    max_model_len: int
    timer: StepTimer
    server: str
    interrupted: bool = True
    together: int = 1
    why_unconstrained: str = ""

    def __post_init__(self) -> None:
        self.weights_version, self._closed = 0, False
        self._route_keys = RouteKeys(self.together)
        self._running = set[Future[Completion]]()

    def submit(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, on_token: OnToken | None = None
    ) -> Future[Completion]:
        """Send a request; call it on the event loop. ``on_token`` gets all tokens and logprobs at the end."""
        if self._closed:
            raise EngineClosedError("the engine is closed")
        if len(prompt_ids) >= self.max_model_len:
            raise ContextLengthError(len(prompt_ids), self.max_model_len)
        if sampling.grammar and self.why_unconstrained:
            raise ChatRequestError(f"response_format and tool_choice {self.why_unconstrained}", param="response_format")
        work = self._generate(tuple(prompt_ids), sampling, on_token)
        future = asyncio.run_coroutine_threadsafe(work, asyncio.get_running_loop())
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def close(self) -> None:
        """Cancel the running requests and accept no more."""
        self._closed = True
        for future in list(self._running):
            future.cancel()

    async def _generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, on_token: OnToken | None) -> Completion:
        available = self.max_model_len - len(prompt_ids)
        limit = min(available, sampling.max_tokens or available)
        parameters = self._parameters(sampling, limit)
        key = self._route_keys.key(sampling.session or str(id(parameters)), prompt_ids)
        try:
            with self.timer.busy("sampling"):
                output = await self.client.generate(key, prompt_ids=list(prompt_ids), sampling_params=parameters)
        except Exception as error:  # Ray wraps the server's error
            raise EngineError(
                f"verl's server failed: {type(error).__name__}: {mask_secrets(str(error))[:500]}"
            ) from error
        tokens, logprobs = list(output.token_ids), list(output.log_probs or ())
        if not tokens or len(tokens) != len(logprobs):
            raise EngineError(f"verl's server sent {len(tokens)} tokens and {len(logprobs)} logprobs")
        first = output.extra_fields.get("min_global_steps")
        last = output.extra_fields.get("max_global_steps")
        if sampling.grammar and first != last:
            raise EngineError(
                f"the weights changed from version {first} to {last} during a constrained reply, and verl then starts "
                "its grammar again in the middle of the text; send the request again"
            )
        if last is not None:
            self.weights_version = last
        return completion(
            self.tokenizer,
            sampling,
            prompt_ids,
            list(zip(tokens, logprobs, strict=True)),
            stopped=len(tokens) < limit,
            on_token=on_token,
            weights_version=self.weights_version,
            first_weights_version=first,
            cached_tokens=output.extra_fields.get("num_cached_tokens") or 0,
        )

    def _parameters(self, sampling: Sampling, limit: int) -> dict[str, Any]:
        """The sampling parameters of vLLM, or of the other server, for at most ``limit`` tokens."""
        parameters = {**vllm_parameters(sampling, limit), "top_k": -1, "logprobs": True}
        if sampling.grammar:
            parameters["structured_outputs"] = structured_outputs(vllm_grammar(self.tokenizer, sampling.grammar))
        if self.server == "vllm":
            parameters["output_kind"] = None if self.interrupted else _FinalOnly()
        else:  # SGLang refuses them
            parameters = {name: value for name, value in parameters.items() if name not in ("seed", "detokenize")}
        return {name: value for name, value in parameters.items() if value is not None}


class _FinalOnly:
    """A value that vLLM gets as its ``RequestOutputKind.FINAL_ONLY``: it then sends a reply once, and otherwise all
    tokens again with each new one. Not that value itself, because its import takes this process seconds.
    """

    def __reduce__(self) -> Any:
        """Unpickled, in the server's process, it is the value of this name."""
        return pkgutil.resolve_name, ("vllm.sampling_params:RequestOutputKind.FINAL_ONLY",)
