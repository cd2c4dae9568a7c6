"""Log-probabilities and entropies in chunks: the numbers of one pass, in bounded memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from groundwire.train.algorithms.token_logprobs import token_logprobs

TOKENS, WIDTH, VOCABULARY = 50, 8, 600


def _inputs() -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
    targets = torch.randint(0, VOCABULARY, (TOKENS,))
    forbidden = torch.rand(TOKENS, VOCABULARY) < 0.5
    forbidden[torch.arange(TOKENS), targets] = False
    return head, torch.randn(TOKENS, WIDTH, requires_grad=True), targets, forbidden


def _plain(head, hidden, targets, forbidden, temperature) -> tuple[torch.Tensor, torch.Tensor]:
    """One token at a time, over its allowed tokens only."""
    logprobs, entropies = [], []
    for state, target, excluded in zip(hidden, targets, forbidden, strict=True):
        logits = head(state) / temperature
        allowed = logits[~excluded]
        logprobs.append(logits[target] - allowed.logsumexp(0))
        entropies.append(torch.special.entr(allowed.softmax(0)).sum())
    return torch.stack(logprobs), torch.stack(entropies)


class LargestTensor(TorchDispatchMode):
    """Measures the largest tensor that any operation returns, in numbers."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.size = max(self.size, *sizes, 0)
        return result


@pytest.mark.parametrize("chunk", [1, 7 * VOCABULARY, 1 << 26])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients_are_those_of_one_plain_pass(chunk: int, masked: bool) -> None:
    head, hidden, targets, forbidden = _inputs()
    none = torch.zeros_like(forbidden)
    expected = _plain(head, hidden, targets, forbidden if masked else none, 0.7)
    found = token_logprobs(
        head,
        hidden,
        targets,
        temperature=0.7,
        masks=torch.from_numpy(np.packbits(~forbidden.numpy(), axis=1, bitorder="little")) if masked else None,
        logits_per_chunk=chunk,
        entropy_gradient=True,
    )
    torch.testing.assert_close(found, expected)
    weights = torch.randn(2, TOKENS)
    parameters = (hidden, head.weight)
    wanted = torch.autograd.grad((weights[0] * expected[0] + weights[1] * expected[1]).sum(), parameters)
    given = torch.autograd.grad((weights[0] * found[0] + weights[1] * found[1]).sum(), parameters)
    torch.testing.assert_close(given, wanted)


def test_the_entropy_has_a_gradient_only_on_demand() -> None:
    head, hidden, targets, _ = _inputs()
    for chunk in (10 * VOCABULARY, 1 << 26):
        _, entropy = token_logprobs(head, hidden, targets, logits_per_chunk=chunk)
        assert not entropy.requires_grad


def test_no_tensor_is_larger_than_a_chunk_forward_or_backward() -> None:
    head, hidden, targets, _ = _inputs()
    chunk = 10 * VOCABULARY
    for limit, bounded in ((chunk, True), (1 << 26, False)):
        with LargestTensor() as largest:
            logprobs, _ = token_logprobs(head, hidden, targets, logits_per_chunk=limit)
            logprobs.sum().backward()
        assert (largest.size <= chunk) is bounded


def test_the_logits_are_not_kept_for_the_backward_pass() -> None:
    head, hidden, targets, _ = _inputs()
    kept: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(head, hidden, targets, logits_per_chunk=10 * VOCABULARY)
    assert sum(kept) < TOKENS * VOCABULARY
