"""Attention without padding equals that of each sequence alone."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from groundwire.train.policy.attention import VARLEN

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize(("model_class", "config"), [(LlamaForCausalLM, LlamaConfig), (Qwen3ForCausalLM, Qwen3Config)])
def test_sequences_in_one_row_have_the_logits_and_gradients_that_each_has_alone(model_class, config):
    torch.manual_seed(0)
    model = model_class._from_config(config(**SHAPE), attn_implementation="sdpa")
    sequences = [torch.randint(50, (length,)) for length in (5, 1, 9)]
    alone = torch.cat([model(input_ids=ids[None]).logits[0] for ids in sequences])
    alone.square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}

    model.zero_grad()
    model.set_attn_implementation(VARLEN)
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences])
    packed = model(input_ids=torch.cat(sequences)[None], position_ids=positions[None], use_cache=False).logits[0]
    packed.square().sum().backward()

    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-4, rtol=1e-4, msg=name)


def test_several_rows_are_refused_because_padding_would_be_attended_to():
    model = LlamaForCausalLM._from_config(LlamaConfig(**SHAPE), attn_implementation=VARLEN)
    with pytest.raises(ValueError, match="one row without padding, and got 2 rows"):
        model(input_ids=torch.zeros(2, 3, dtype=torch.long), use_cache=False)
