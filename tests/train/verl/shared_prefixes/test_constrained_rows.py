"""verl's workers compute the log-probabilities of a constrained reply over the tokens that vLLM had allowed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from constrained import GRAMMARS, SMALL, byte_level_tokenizer, sentencepiece_tokenizer
from dev.pretrain.model import new_policy
from programs import ROOT

from groundwire.train.policy.constraint import Constraints, unpack_masks
from groundwire.train.policy.grammar import to_lark


@pytest.mark.parametrize("kind", ["glue", "byte-level", "sentencepiece"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_the_masks_by_vllm_are_those_of_its_own_calls(kind, name, tiny_policy):
    """``vllm/v1/structured_output/backend_guidance.py``; the vocabulary of the model is larger than the tokenizer's."""
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer
    from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask

    tokenizers = {"byte-level": byte_level_tokenizer, "sentencepiece": sentencepiece_tokenizer}
    tokenizer = tokenizers[kind]() if kind in tokenizers else tiny_policy[1]
    model = new_policy(tokenizer, **SMALL)
    model.resize_token_embeddings(vocabulary := len(tokenizer) + 37)
    model.generation_config.eos_token_id = [5, tokenizer.eos_token_id]
    matcher = LLMatcher(from_tokenizer(tokenizer, vocabulary), to_lark(GRAMMARS[name]))
    chosen, masks = [], []
    generator = torch.Generator().manual_seed(0)
    while not matcher.is_stopped() and len(chosen) < 60:
        words = allocate_token_bitmask(1, vocabulary)
        fill_next_token_bitmask(matcher, words)
        masks.append(unpack_masks(words.view(torch.uint8), vocabulary)[0])
        chosen.append(int(torch.multinomial(masks[-1].float(), 1, generator=generator)))
        assert matcher.consume_token(chosen[-1])
    assert len(chosen) > 5
    replayed = Constraints(model, tokenizer, by_vllm=True).replay(GRAMMARS[name], chosen)
    assert torch.equal(unpack_masks(replayed, vocabulary), torch.stack(masks))


def test_two_processes_of_verl_compute_what_the_local_trainer_computes():
    pytest.importorskip("verl")
    from verl_on_cpu import ENVIRONMENT

    tests = ROOT / "tests"
    paths = [str(ROOT), str(tests / "helpers"), *sys.path]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = [sys.executable, *launcher, str(tests / "helpers" / "constrained_on_two.py")]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(program, check=True, timeout=300, env=environment)
