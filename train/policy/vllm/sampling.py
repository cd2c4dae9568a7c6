"""Sampling parameters and replies as vLLM has them, for its own process and for verl's servers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from groundwire.train.policy.constraint import removes_glue
from groundwire.train.policy.grammar import to_lark
from groundwire.train.policy.types import Completion, OnToken, Sampling

_log = logging.getLogger(__name__)


def vllm_parameters(sampling: Sampling, max_tokens: int) -> dict[str, Any]:
    """The arguments of vLLM's ``SamplingParams``, without its constraint, which :func:`structured_outputs` makes.

    Making text is more than half of vLLM's CPU work per token, and only stop strings need it.
    """
    parameters = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": max_tokens,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "seed": sampling.seed,
        "detokenize": bool(sampling.stop),
    }
    return {name: value for name, value in parameters.items() if value is not None}


def structured_outputs(lark: str) -> Any:
    """vLLM's constraint. Its choice of a library falls on llguidance: the first line of ``lark`` is for that alone, and
    another would allow other JSON than the masks in training.
    """
    from vllm.sampling_params import StructuredOutputsParams

    return StructuredOutputsParams(grammar=lark)


def vllm_grammar(tokenizer: Any, grammar: str) -> str:
    """The Lark grammar of a constraint of a span. Warns once of a tokenizer like the starter's."""
    if removes_glue(tokenizer):
        _warn_of_glue()
    return to_lark(grammar)


@functools.cache
def _warn_of_glue() -> None:
    _log.warning(
        "this model's tokenizer joins words with a character that vLLM's grammars do not know: most replies under a "
        "schema or a required tool will be wrong or cut off. Take another model, or trainer=local sampler=embedded"
    )


def completion(
    tokenizer: Any,
    sampling: Sampling,
    prompt_ids: tuple[int, ...],
    sampled: Sequence[tuple[int, float]],
    *,
    stopped: bool,
    on_token: OnToken | None,
    **fields: Any,
) -> Completion:
    """The reply of the ``sampled`` ids and log-probabilities, at least one, with further ``fields``.

    ``stopped``: whether the server says that it is complete. ``on_token`` gets all now.
    """
    for token, logprob in sampled if on_token else ():
        on_token(token, logprob)  # type: ignore[misc]
    tokens = [token for token, _ in sampled]
    text, ended = _text(tokenizer, tokens, sampling)
    return Completion(
        prompt_ids=prompt_ids,
        token_ids=tokens,
        logprobs=[logprob for _, logprob in sampled],
        text=text,
        finish_reason="stop" if ended or stopped else "length",
        **fields,
    )


def _text(tokenizer: Any, tokens: list[int], sampling: Sampling) -> tuple[str, bool]:
    """The text of a reply before what ended it, and whether a stop string or the end of the turn did."""
    ended = tokens[-1] in sampling.stop_token_ids
    text = tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True)
    ends = [text.index(stop) for stop in sampling.stop if stop in text]
    return text[: min(ends, default=len(text))], bool(ends) or ended or tokens[-1] == tokenizer.eos_token_id
