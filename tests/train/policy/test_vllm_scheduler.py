"""What vLLM's front end gets of replies, with a scripted scheduler of vLLM: a real one needs a GPU."""

from __future__ import annotations

import enum
import importlib
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest


class Kind(enum.Enum):
    CUMULATIVE = 0
    FINAL_ONLY = 2


class Logprobs(NamedTuple):
    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: Any = None


@dataclass
class Output:
    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    finish_reason: str | None = None
    new_prompt_logprobs_tensors: Any = None
    events: Any = None
    trace_headers: Any = None
    prefill_stats: Any = None
    num_nans_in_logits: int = 0
    routed_experts: Any = None

    @property
    def __struct_fields__(self) -> list[str]:
        return list(self.__dataclass_fields__)


class Scheduler:
    """Each of ``steps`` has the ids of the requests that get a token, and of those that end with it."""

    def __init__(self, steps: list[tuple[str, str]], requests: dict[str, Any]) -> None:
        self.steps, self.requests, self.token = iter(steps), requests, 0
        self.experts: Any = None

    def update_from_output(self) -> dict[int, Any]:
        running, ending = next(self.steps)
        outputs = []
        for name in running:
            self.token += 1
            array = np.array([[self.token]])
            output = Output(name, [self.token], Logprobs(array, -array, array[0]))
            output.events = [f"event {self.token}"] if self.token != 3 else None
            output.prefill_stats = "prefill" if self.token <= len(self.requests) else None
            output.finish_reason = "length" if name in ending else None
            output.routed_experts = self.experts
            outputs.append(output)
            if name in ending:
                del self.requests[name]
        return {0: SimpleNamespace(outputs=outputs)}


@pytest.fixture
def whole_replies(monkeypatch: pytest.MonkeyPatch) -> Any:
    contents = {
        "vllm": {},
        "vllm.sampling_params": {"RequestOutputKind": Kind},
        "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": Scheduler},
        "vllm.v1.outputs": {"LogprobsLists": Logprobs},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        module.__dict__.update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "groundwire.train.policy.vllm.scheduler", raising=False)
    yield importlib.import_module("groundwire.train.policy.vllm.scheduler").WholeReplies
    del sys.modules["groundwire.train.policy.vllm.scheduler"]


def request(kind: Kind = Kind.FINAL_ONLY, stop: list[str] | None = None, *, resumable: bool = False) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(output_kind=kind, stop=stop), resumable=resumable)


def test_a_reply_is_sent_once_with_all_of_its_tokens_and_log_probabilities(whole_replies: Any) -> None:
    scheduler = whole_replies([("ab", ""), ("ab", "b"), ("a", "a")], {"a": request(), "b": request()})
    sent = [scheduler.update_from_output()[0].outputs for _ in range(3)]
    assert [[output.request_id for output in outputs] for outputs in sent] == [[], ["b"], ["a"]]
    for output, tokens in ((sent[1][0], [2, 4]), (sent[2][0], [1, 3, 5])):
        assert output.new_token_ids == tokens
        assert output.new_logprobs.logprobs.tolist() == [[-token] for token in tokens]
        assert output.new_logprobs.sampled_token_ranks.tolist() == tokens
        assert (output.finish_reason, output.prefill_stats) == ("length", "prefill")
        assert output.events == [f"event {token}" for token in tokens if token != 3]
    assert not scheduler._held


@pytest.mark.parametrize(
    "watched", [request(Kind.CUMULATIVE), request(stop=["END"]), request(resumable=True)], ids=["kind", "stop", "input"]
)
def test_tokens_that_somebody_reads_at_once_are_sent_at_once(whole_replies: Any, watched: Any) -> None:
    scheduler = whole_replies([("a", ""), ("a", "a")], {"a": watched})
    sent = [scheduler.update_from_output()[0].outputs for _ in range(2)]
    assert [[output.new_token_ids for output in outputs] for outputs in sent] == [[[1]], [[2]]]


def test_what_belongs_to_a_token_and_is_not_joined_is_sent_with_it(whole_replies: Any) -> None:
    scheduler = whole_replies([("a", ""), ("a", ""), ("a", ""), ("a", "a")], {"a": request()})
    sent = [scheduler.update_from_output()[0].outputs]
    scheduler.experts = np.array([[7]])
    sent.append(scheduler.update_from_output()[0].outputs)
    scheduler.experts = None
    sent += [scheduler.update_from_output()[0].outputs for _ in range(2)]
    assert [[(output.new_token_ids, output.routed_experts) for output in outputs] for outputs in sent] == [
        [], [([1, 2], np.array([[7]]))], [], [([3, 4], None)],
    ]  # fmt: skip


def test_nothing_is_kept_of_a_cancelled_reply(whole_replies: Any) -> None:
    scheduler = whole_replies([("ab", ""), ("b", "")], {"a": request(), "b": request()})
    scheduler.update_from_output()
    del scheduler.requests["a"]
    scheduler.update_from_output()
    assert list(scheduler._held) == ["b"]
