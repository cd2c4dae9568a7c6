"""Packing changes the cost of a forward pass, never its result."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from dev.pretrain.model import new_policy
from dev.pretrain.tokenizer import train_tokenizer
from torch.nn import functional as F
from transformers import Lfm2Config, Lfm2ForCausalLM

from groundwire.train.local.packing import Row, make_rows, pack, packed_hidden, packed_logits
from groundwire.train.policy.attention import set_attention, tree_block_mask
from groundwire.train.sft.data.examples import Example


@pytest.fixture(scope="module")
def model():
    tokenizer = train_tokenizer(["SELECT name FROM singer"])
    model = new_policy(tokenizer, width=32, layers=2, heads=2, intermediate=48, seed=1)
    assert set_attention(model)
    return model


def row_of(prefix, *branches):
    """A row of items that begin with ``prefix``; a branch is what follows it, and which of that is trained."""
    return Row(prefix, [SimpleNamespace(prompt_ids=prefix, response_ids=ids, mask=mask) for ids, mask in branches])


def alone(model, rows):
    """The logits before every target, from one plain causal pass over each item."""
    parts = []
    for item in (item for row in rows for item in row.items):
        logits = model(torch.tensor([[*item.prompt_ids, *item.response_ids]]), use_cache=False).logits[0]
        parts.append(logits[[len(item.prompt_ids) + i - 1 for i, wanted in enumerate(item.mask) if wanted]])
    return torch.cat(parts)


def some_rows(seed):
    rng = random.Random(seed)

    def tokens(n):
        return [rng.randrange(250) for _ in range(n)]

    rows = []
    for _ in range(4):
        branches = []
        for _ in range(rng.randint(1, 5)):
            n = rng.randint(1, 12)
            branches.append((tokens(n), [rng.randint(0, 1) for _ in range(n)]))
        rows.append(row_of(tokens(rng.randint(1, 20)), *branches))
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_a_packed_branch_has_the_logits_of_a_separate_pass(model, seed):
    torch.set_num_threads(1)
    rows = some_rows(seed)
    with torch.inference_mode():
        torch.testing.assert_close(packed_logits(model, pack(rows)), alone(model, rows), atol=1e-5, rtol=1e-5)


def test_targets_come_in_the_order_of_the_branches():
    packed = pack([row_of([1, 2], ([3, 4], [0, 1]), ([5, 6], [1, 1])), row_of([7], ([8, 9, 10], [1, 0, 1]))])
    assert packed.targets.tolist() == [4, 5, 6, 8, 10]
    assert packed.index.tolist() == [[0, 2], [0, 1], [0, 4], [1, 0], [1, 2]]


def test_a_branch_attends_to_the_prefix_and_itself_only():
    packed = pack([row_of([1, 2], ([3], [1]), ([4, 5], [0, 1]))])
    assert tree_block_mask(packed.end, packed.positions).dense()[0, 0, 4].tolist() == [True, True, False, True, True]
    assert packed.positions.tolist() == [[0, 1, 2, 2, 3]]


def test_gradients_of_packed_and_separate_passes_agree(model):
    rows = some_rows(9)
    packed = pack(rows)

    def gradient(logits):
        model.zero_grad()
        torch.nn.functional.cross_entropy(logits, packed.targets).backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    expected = gradient(alone(model, rows))
    torch.testing.assert_close(gradient(packed_logits(model, packed)), expected, atol=1e-5, rtol=1e-4)


def test_all_trees_in_one_row_have_the_same_logits(model):
    rows = [*some_rows(3)[:2], row_of([7] * 150, ([8] * 140, [1] * 140), ([9], [1]))]
    with torch.no_grad():
        expected = packed_logits(model, pack(rows))
        torch.testing.assert_close(packed_logits(model, pack(rows, one_row=True)), expected, atol=1e-5, rtol=1e-5)


def test_branches_in_a_row_are_refused_for_a_model_that_would_mix_them(model):
    model.set_attn_implementation("sdpa")
    try:
        with pytest.raises(ValueError, match="LlamaForCausalLM has no attention for several branches in a row"):
            packed_logits(model, pack(some_rows(3)))
    finally:
        set_attention(model)


def test_a_model_with_a_recurrent_state_gets_one_sequence_in_a_row():
    torch.manual_seed(0)
    kinds = ["conv", "full_attention"]
    shape = {"vocab_size": 250, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    config = Lfm2Config(
        **shape, num_hidden_layers=2, num_key_value_heads=2, layer_types=kinds, block_auto_adjust_ff_dim=False
    )
    model = Lfm2ForCausalLM(config).eval()
    assert not set_attention(model)
    items = [Example([7] * 30 + [n], list(range(1, 9 - n))) for n in range(3)]
    with pytest.raises(ValueError, match="Lfm2ForCausalLM has no attention for several branches in a row"):
        packed_logits(model, pack(make_rows(items, tokens=999)))
    rows = make_rows(items, tokens=999, branches=1)
    with torch.no_grad():
        torch.testing.assert_close(packed_logits(model, pack(rows)), alone(model, rows), atol=1e-5, rtol=1e-5)


def test_under_autocast_attention_by_blocks_gets_one_dtype(model, monkeypatch):
    kinds, attend = set(), F.scaled_dot_product_attention

    def recorded(*tensors, **options):
        kinds.update(tensor.dtype for tensor in tensors[:3])
        return attend(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        packed_hidden(model, pack(some_rows(0)[:2], one_row=True))
    assert kinds == {torch.bfloat16}  # the GPU's kernel multiplies tensors of one dtype
