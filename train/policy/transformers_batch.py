"""Requests that transformers' own forward pass computes: a model that our own decoder does not know.

All rows of the cache end at the same place. A shorter row begins with padding in the layers of attention, which the
mask hides; recurrent states and convolutions have no length, and would take padding in. So prompts are read without
it, those of one length together, and then join the batch. Equal prompts are read once.

transformers has continuous batching of its own (5.24), which is not used: it computes no recurrent layers, and has
neither a seed nor a grammar for each request.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from groundwire.train.policy.attention import set_attention
from groundwire.train.policy.batch import Batch, OpenReply
from groundwire.train.policy.constraint import Constraints
from groundwire.train.policy.decoding.decoder import computes
from groundwire.train.policy.errors import UnsupportedModelError

_PREFILL_TOKENS = 4096  # most tokens of a call that reads prompts: it bounds the memory when many requests arrive
_LAYERS = {
    "DummyLayer", "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionLayer",
}  # fmt: skip
"""Kinds of a cache's layers whose rows can be joined."""
_CHECKED = (5, 3, 4)  # tokens of two prompts and of their replies with which a model is checked
_TOLERANCE = 1e-2  # nats, of the check's log-probabilities: rounding stays far below, a wrong position far above


class TransformersBatch(Batch):
    """Requests with their ``DynamicCache``.

    The model is copied, so that an optimizer may change it meanwhile; the copy has no adapters. ``bf16``: under
    autocast, as in the trainer's update, with linear layers that are stored in bfloat16.

    Raises :class:`UnsupportedModelError` as :func:`check_sampling`.
    """

    def __init__(self, model: Any, tokenizer: Any, constraints: Constraints, *, bf16: bool) -> None:
        super().__init__(tokenizer, constraints)
        self._source, self._copy = model, copy.deepcopy(model).eval()
        set_attention(self._copy)
        for module in self._copy.modules():
            if hasattr(module, "get_delta_weight"):  # its adapters are merged into the weights that are copied
                module.enable_adapters(False)
        check_sampling(self._copy)
        for module in self._copy.modules() if bf16 else ():
            if isinstance(module, torch.nn.Linear):
                weight = module.weight.detach().to(torch.bfloat16)
                module.weight = torch.nn.Parameter(weight, requires_grad=False)
        self._forward = _Forward(self._copy, bf16=bf16)
        self._cache: DynamicCache | None = None

    def refresh_weights(self) -> None:
        self._copy.load_state_dict(self._source.state_dict())

    def add(self, arrived: list[OpenReply]) -> None:
        by_prompt = self._by_prompt(arrived)
        requests, outputs = list[OpenReply](), list[Tensor]()
        caches = [self._cache] if self.requests and self._cache else []
        prompts = sorted(by_prompt, key=len)
        while prompts:
            length = len(prompts[0])
            together = [prompt for prompt in prompts if len(prompt) == length][: max(1, _PREFILL_TOKENS // length)]
            prompts = prompts[len(together) :]
            cache, logits = self._forward.read(torch.tensor(together))
            rows = [row for row, prompt in enumerate(together) for _ in by_prompt[prompt]]
            cache.reorder_cache(torch.tensor(rows, device=logits.device))
            caches.append(cache)
            outputs.append(logits[rows])
            for prompt in together:
                for number, request in enumerate(by_prompt[prompt]):
                    request.cached_tokens = length if number else 0
                    requests.append(request)
        self._sample(requests, torch.cat(outputs))
        self._cache = _joined(caches, max(map(len, [*self.requests, *requests])) - 1)
        self.requests += requests

    def decode(self) -> None:
        ids = torch.tensor([[request.token_ids[-1]] for request in self.requests])
        lengths = torch.tensor([len(request) - 1 for request in self.requests])
        self._sample(self.requests, self._forward.next(ids, lengths, self._cache))

    def _keep(self, stay: list[int]) -> None:
        self.requests = [self.requests[i] for i in stay]
        if self.requests and self._cache:
            self._cache.reorder_cache(torch.tensor(stay, device=self._copy.device))
            _set_length(self._cache, max(map(len, self.requests)) - 1)


class _Forward:
    """A model's forward pass over a cache; the logits, [rows, vocabulary], are those after each row's last token."""

    def __init__(self, model: Any, *, bf16: bool) -> None:
        self._model, self._bf16 = model, bf16
        parameters = inspect.signature(model.forward).parameters
        self._known = parameters.keys() & {"position_ids", "logits_to_keep"}
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"

    def read(self, ids: Tensor) -> tuple[DynamicCache, Tensor]:
        """Read prompts of one length, int64 [rows, tokens]; their cache, and the logits."""
        cache = DynamicCache(config=self._model.config)
        positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
        return cache, self._logits(ids, positions, None, cache)

    def next(self, ids: Tensor, lengths: Tensor, cache: Any) -> Tensor:
        """Read one more token, int64 [rows, 1], of rows that have ``lengths`` tokens in the cache."""
        longest = int(lengths.max())
        seen = (torch.arange(longest + 1) >= (longest - lengths)[:, None]).long()
        has_attention = any(isinstance(layer, DynamicLayer) for layer in cache.layers)
        return self._logits(ids, lengths[:, None], seen if has_attention else None, cache)

    def _logits(self, ids: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        device = self._model.device
        options = {"position_ids": positions.to(device), "logits_to_keep": 1}
        options = {name: value for name, value in options.items() if name in self._known}
        mask = None if seen is None else seen.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._bf16):
            output = self._model(
                input_ids=ids.to(device), attention_mask=mask, use_cache=True, **{self._cache_name: cache}, **options
            )
        return output.logits[:, -1].float()


@torch.inference_mode()
def check_sampling(model: Any) -> None:
    """Raise :class:`UnsupportedModelError` unless decoding gives the logits of a whole pass; two rows show it.

    Our own decoder computes the models of its families, and is tested with each.
    """
    if computes(model.config):
        return
    forward, (*starts, count) = _Forward(model, bf16=False), _CHECKED
    vocabulary = len(model.get_output_embeddings().weight)
    rows = torch.randint(vocabulary, (2, max(starts) + count), generator=torch.Generator().manual_seed(0))
    try:
        pairs = list(zip(rows, starts, strict=True))
        whole = [
            model(input_ids=row[None, : start + count].to(model.device), use_cache=False).logits[0, start - 1 : -1]
            for row, start in pairs
        ]
        read = [forward.read(row[None, :start]) for row, start in pairs]
        found, lengths = [torch.cat([logits for _, logits in read])], torch.tensor(starts)
        cache = _joined([cache for cache, _ in read], max(starts))
        for _ in range(count - 1):
            found.append(forward.next(rows.gather(1, lengths[:, None]), lengths, cache))
            lengths = lengths + 1
        expected = torch.stack(whole).float().log_softmax(-1)
        difference = float((torch.stack(found, 1).log_softmax(-1) - expected).abs().max())
    except Exception as error:  # what a model's own code raises has no common type
        problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
    else:
        if difference <= _TOLERANCE:
            return
        problem = f"its log-probabilities differ by {difference:.2g} from those of a whole pass"
    raise UnsupportedModelError(
        f"{type(model).__name__} cannot be sampled token by token: {problem}; use another model, or train this one "
        "with --trainer verl and serve it with vLLM"
    )


def _set_length(cache: DynamicCache, length: int) -> None:
    """Add padding at the beginning of all rows of layers of attention, or remove it."""
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            columns = length
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length, columns = length, min(length, layer.sliding_window - 1)
            more = columns - layer.keys.shape[-2]
            layer.keys, layer.values = (F.pad(states, (0, 0, more, 0)) for states in (layer.keys, layer.values))


def _joined(caches: list[DynamicCache], length: int) -> DynamicCache:
    """One cache with the rows of all, which have ``length`` tokens, padding included."""
    for cache in caches:
        if unknown := {type(layer).__name__ for layer in cache.layers} - _LAYERS:
            raise ValueError(f"its cache has a {min(unknown)}")
        _set_length(cache, length)
    first, *others = caches
    for layers in zip(*(cache.layers for cache in caches), strict=True) if others else ():
        for places in zip(*map(_places, layers), strict=True):
            into, name = places[0]
            into[name] = torch.cat([values[name] for values, name in places])
    return first


def _places(layer: Any) -> Iterator[tuple[dict[Any, Any], Any]]:
    """Where a layer has tensors, whose first dimension is that of the rows."""
    values = vars(layer)
    for name in ("keys", "values", "conv_states", "recurrent_states"):
        states = values.get(name)
        if isinstance(states, dict):  # newer than transformers 5.10: a layer may have several states
            yield from ((states, number) for number, state in states.items() if state is not None)
        elif states is not None:
            yield values, name
