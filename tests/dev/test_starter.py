"""The bundled checkpoint is small, loadable, and partly trained."""

from __future__ import annotations

import pytest
import torch
from dev.pretrain.corpus import prompt, query_result
from dev.pretrain.training import accuracy

from groundwire.adapters.sql_agents import prompts
from groundwire.domains import get
from groundwire.tools.schema import table_info
from groundwire.train.policy import STARTER
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.model import load_policy
from groundwire.train.policy.types import Sampling


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


def test_its_check_keeps_right_queries_and_rejects_those_that_fail(policy):
    model, tokenizer = policy
    engine = LocalEngine(model, tokenizer, max_model_len=2048)
    replies = []
    for task in get("spider").load().validation[:20]:
        schema = table_info(task["db_path"], example_values=0, show_keys=False).text
        for sql in (task["query"], task["query"].replace("SELECT ", "SELECT nothing", 1)):
            message = prompts.write("check", task["question"], sql, query_result(task["db_path"], sql))
            ids = tokenizer("".join(prompt(schema, message)))["input_ids"]
            replies.append(engine.submit(ids, Sampling(temperature=0.0, max_tokens=8, seed=0)))
    verdicts = [prompts.is_correct(reply.result().text) for reply in replies]
    engine.close()
    assert sum(verdicts[::2]) >= 18  # right queries
    assert sum(verdicts[1::2]) <= 2
