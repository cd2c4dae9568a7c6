"""The bundled checkpoint is small, loadable, and partly trained."""

from __future__ import annotations

import pytest
import torch

from groundwire.domains import get
from groundwire.train.policy import STARTER
from groundwire.train.policy.model import load_policy
from groundwire.train.pretrain.training import accuracy


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    return load_policy(STARTER)


def test_the_checkpoint_is_small_and_has_no_pickles():
    files = [path for path in STARTER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 20_000_000
    assert {path.suffix for path in files} == {".json", ".jinja", ".md", ".safetensors"}


def test_model_and_tokenizer_have_the_same_vocabulary(policy):
    model, tokenizer = policy
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_accuracy_leaves_room_for_reinforcement_learning(policy):
    tasks = get("spider").load().validation[:64]
    greedy, sampled = accuracy(*policy, tasks), accuracy(*policy, tasks, temperature=1.0)
    for half in ("familiar", "new"):
        assert 0.25 < greedy[half] < 0.75
        assert 0.08 < sampled[half] < 0.6
