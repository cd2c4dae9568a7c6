"""A teacher's log-probabilities of the policy's own tokens are trained on, beside the reward or in its place."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from programs import wait_for
from small_models import small_causal_lm
from training_groups import Sampled, llm_call, training_groups

from groundwire.adapters.tracing.scripted_server import ScriptedPolicyServer
from groundwire.train import fit, serve
from groundwire.train.algorithms import distillation
from groundwire.train.algorithms.distillation import MAX_DIFFERENCE, Teacher, TeacherError
from groundwire.train.algorithms.prompt_scores import PromptScores
from groundwire.train.api.serving import ServedModel
from groundwire.train.config.errors import ConfigError
from groundwire.train.config.run_config import RunConfig
from groundwire.train.local.lora import adapters, add_adapters, merged_weights
from groundwire.train.policy.model import load_policy
from groundwire.train.policy.pretrained.model_files import save_policy
from groundwire.train.store.rollout import Outcome, Rollout

TEACHER: dict[str, Any] = {"teacher": "http://127.0.0.1:1/v1", "teacher_model": "any"}


def _advantages(*rewards: float, **settings: Any) -> list[list[float]]:
    rollouts = []
    for number, reward in enumerate(rewards):
        first = llm_call(1, [1], [7, 8], teacher_logprobs=[-0.5, -90.0])
        constrained = llm_call(2, [1, 7, 8, 2], [9], grammar="{}")
        rollouts.append(Sampled("a", reward, [first, constrained] if number else [first]))
    [group] = training_groups(rollouts, credit="broadcast", **settings)
    assert group.teaches is bool(settings or len(set(rewards)) > 1)
    return [item.advantages for item in group.items]


def test_the_difference_of_log_probabilities_is_added_to_the_advantage() -> None:
    reward = 0.7071057
    one, two = _advantages(1.0, 0.0)
    assert one == pytest.approx([reward] * 2)
    assert two == pytest.approx([-reward, -reward, 0.0, -reward])
    # The tokens were sampled with -1.0, and the teacher's are -0.5 and -90: the mean of 0.5 and -10 is subtracted.
    half = (0.5 + MAX_DIFFERENCE) / 2
    one, two = _advantages(1.0, 0.0, **TEACHER)
    assert one == pytest.approx([0.5 * (reward + half), 0.5 * (reward - half)])
    assert two[2:] == pytest.approx([0.0, -0.5 * reward])  # the agent's own token, and a reply to a grammar
    one, two = _advantages(1.0, 0.0, **TEACHER, teacher_weight=1)
    assert one == pytest.approx([half, -half])
    assert two == pytest.approx([half, -half, 0.0, 0.0])
    assert _advantages(1.0, 1.0, **TEACHER)[0] == pytest.approx([0.5 * half, -0.5 * half])


def test_the_expected_gradient_is_that_of_the_reverse_kl_divergence() -> None:
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 20, dtype=torch.float64)
    logits = student.requires_grad_()
    logprobs, of_teacher = logits.log_softmax(0), teacher.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - of_teacher)).sum(), logits, retain_graph=True)
    tokens = [token for token, p in enumerate(logprobs.exp().tolist()) for _ in range(round(20_000 * p))]
    calls = [
        llm_call(1, [0], [token], logprobs=[logprobs[token].item()], teacher_logprobs=[float(of_teacher[token])])
        for token in tokens
    ]
    sampled = [Sampled("a", 0.0, [call]) for call in calls]
    [group] = training_groups(sampled, credit="broadcast", **TEACHER, teacher_weight=1)
    advantages = torch.tensor([item.advantages[0] for item in group.items], dtype=torch.float64)
    (estimate,) = torch.autograd.grad(-(advantages * logprobs[tokens]).mean(), logits)
    assert torch.allclose(estimate, exact, atol=2e-3)
    assert exact.abs().max() > 0.1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**TEACHER, "trainer": "gepa"}, "teacher is for trainers that update a model"),
        ({"teacher_model": "x"}, "teacher_model is x: give its server, too: teacher=URL"),
        ({"teacher": "gpt"}, "teacher is 'gpt', and teacher_model None: give a server's base URL"),
    ],
)
def test_settings_without_a_teacher_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig(**settings)


@pytest.fixture(scope="module")
def models(tiny_policy: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, and a teacher of other weights."""
    folder = tmp_path_factory.mktemp("models")
    model, tokenizer = tiny_policy
    save_policy(model, tokenizer, folder / "student")
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        teacher.model.norm.weight.mul_(3)  # it is surer of what the student prefers
    save_policy(teacher, tokenizer, folder / "teacher")
    return folder


@pytest.fixture(scope="module")
def teacher(models: Path) -> Iterator[ServedModel]:
    with serve(models / "teacher", max_model_len=512) as server:
        yield server


@pytest.fixture(autouse=True)
def key(teacher: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", teacher.api_key)


def test_the_teacher_scores_every_token_of_a_conversation(models: Path, teacher: ServedModel) -> None:
    config = RunConfig(teacher=teacher.base_url, teacher_model="any")
    model, tokenizer = load_policy(models / "teacher")
    calls = [
        llm_call(1, [5, 6, 7], [8, 9]),
        llm_call(2, [5, 6, 7, 8, 9, 10], [11]),
        llm_call(3, [4], [3], grammar="{}"),
    ]
    Teacher(config, tokenizer).judge([Rollout(task={}, calls=calls, outcome=Outcome(reward=0.0))])
    with torch.inference_mode():
        scores = model(input_ids=torch.tensor([[5, 6, 7, 8, 9, 10, 11]])).logits[0].log_softmax(-1)
    assert calls[0].teacher_logprobs == pytest.approx([float(scores[2, 8]), float(scores[3, 9])], abs=1e-4)
    assert calls[1].teacher_logprobs == pytest.approx([float(scores[5, 11])], abs=1e-4)
    assert calls[2].teacher_logprobs == []


def test_rows_that_several_threads_ask_for_have_the_scores_of_single_rows(models: Path) -> None:
    rows = [[5 + (number * place) % 90 for place in range(3 + 7 * number)] for number in range(1, 12)]
    with ThreadPoolExecutor(len(rows)) as pool:
        together = list(pool.map(PromptScores(models / "teacher", "cpu"), rows))
    alone = PromptScores(models / "teacher", "cpu")
    for row, scores in zip(rows, together, strict=True):
        assert scores == pytest.approx(alone(row), abs=1e-4)


def _scorable(kind: str, policy: Any, folder: Path) -> Path:
    """A model that the engine computes by itself or with transformers' forward pass, or the checkpoint of LoRA."""
    model, tokenizer = copy.deepcopy(policy[0]), policy[1]
    if kind == "lora":
        pytest.importorskip("peft")
        add_adapters(model, rank=4, alpha=16)
        for name, value in adapters(model).items():
            torch.nn.init.normal_(value, std=0.2 if ".lora_B." in name else 1)
    elif kind != "llama":
        model = small_causal_lm(kind, vocab_size=len(tokenizer))
    with merged_weights(model) as weights:
        save_policy(model, tokenizer, folder, weights)
    return folder


@pytest.mark.parametrize("kind", ["llama", "lora", "mistral", "qwen3_5_text", "granitemoehybrid"])
def test_prompts_that_are_scored_in_one_pass_have_what_their_tokens_were_sampled_with(
    kind: str, tiny_policy: Any, tmp_path: Path
) -> None:
    rows: list[list[int]] = [[5 + (number * place) % 90 for place in range(1 + 9 * number)] for number in range(5)]
    folder = _scorable(kind, tiny_policy, tmp_path / kind)
    with serve(folder, max_model_len=512) as served, ThreadPoolExecutor(len(rows)) as pool:
        client = openai.OpenAI(base_url=served.base_url, api_key=served.api_key, max_retries=0)

        def ask(row: list[int], **more: Any) -> Any:
            return client.completions.create(model="x", prompt=row, temperature=1.0, **more).choices[0]

        sampled = [ask(row, max_tokens=6, logprobs=1, extra_body={"return_token_ids": True}) for row in rows]
        whole = [row + choice.token_ids for row, choice in zip(rows, sampled, strict=True)]

        def scores(row: list[int]) -> list[float]:
            entries = ask(row, extra_body={"prompt_logprobs": 0}).prompt_logprobs[1:]
            return [entry[str(token)]["logprob"] for token, entry in zip(row[1:], entries, strict=True)]

        alone = list(map(scores, whole))
        scorer, passes = served._server._score, []
        body = scorer._model.base_model
        body.register_forward_hook(lambda _, given, out: passes.append(len(out.last_hidden_state)))
        with scorer._lock:  # until all of them wait
            waiting = [pool.submit(scores, row) for row in whole]
            wait_for(lambda: len(scorer._waiting) == len(rows))
        together = [future.result() for future in waiting]
    assert passes == [len(rows)]
    for row, choice, one, with_others in zip(rows, sampled, alone, together, strict=True):
        assert with_others == pytest.approx(one, abs=1e-4)
        assert with_others[len(row) - 1 :] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-3)


def test_a_row_that_cannot_be_scored_is_an_error_of_its_thread_and_not_of_the_next(models: Path) -> None:
    scores = PromptScores(models / "teacher", "cpu")
    with pytest.raises(IndexError):
        scores([5, 10**6, 7])
    assert len(scores([5, 6, 7])) == 2


class _FewTokens(PromptScores):
    """As on a GPU whose other programs leave memory for 40 tokens."""

    def _compute(self, rows: Any) -> list[list[float]]:
        if len(rows) * max(map(len, rows)) > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super()._compute(rows)


def test_rows_that_do_not_fit_in_a_gpu_together_are_scored_in_smaller_passes(models: Path) -> None:
    rows = [[5 + (number * place) % 90 for place in range(3 + 4 * number)] for number in range(1, 9)]
    scorer = _FewTokens(models / "teacher", "cpu")
    with ThreadPoolExecutor(len(rows)) as pool:
        with scorer._lock:  # until all of them wait
            waiting = [pool.submit(scorer, row) for row in rows]
            wait_for(lambda: len(scorer._waiting) == len(rows))
        found = [future.result() for future in waiting]
    alone = PromptScores(models / "teacher", "cpu")
    for row, scores in zip(rows, found, strict=True):
        assert scores == pytest.approx(alone(row), abs=1e-4)
    with pytest.raises(torch.OutOfMemoryError):
        scorer([5] * 41)


def test_a_teacher_that_fails_for_a_moment_is_asked_again(
    models: Path, teacher: ServedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, tokenizer = load_policy(models / "teacher")
    scorer: Any = teacher._server._score
    failures = [torch.OutOfMemoryError("CUDA out of memory")] * 2
    monkeypatch.setattr(distillation, "_PAUSES_S", (0.01, 0.01))

    def fail_first(ids: Any) -> Any:
        if failures:
            raise failures.pop()
        return scorer(ids)

    monkeypatch.setattr(teacher._server, "_score", fail_first)
    judge = Teacher(RunConfig(teacher=teacher.base_url, teacher_model="any"), tokenizer)
    assert not failures
    assert capsys.readouterr().err.count("answers 500: it is asked again") == 1
    failures += [torch.OutOfMemoryError("CUDA out of memory")] * 3
    with pytest.raises(TeacherError, match="answers 500"):
        judge.judge([Rollout(task={}, calls=[llm_call(1, [5, 6], [7])], outcome=Outcome(reward=0.0))])


class _Reversed:
    """A tokenizer of the same size with other words."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, **options: Any) -> list[int]:
        return [len(self._tokenizer) - 1 - token for token in self._tokenizer.encode(text, **options)]

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode([len(self._tokenizer) - 1 - token for token in ids]))


async def test_a_server_that_cannot_teach_is_refused_in_a_sentence(models: Path, teacher: ServedModel) -> None:
    _, tokenizer = load_policy(models / "teacher")
    with pytest.raises(TeacherError, match="the teacher any has another tokenizer than the model"):
        Teacher(RunConfig(teacher=teacher.base_url, teacher_model="any"), _Reversed(tokenizer))
    with pytest.raises(
        TeacherError, match=r"the teacher any at http://127\.0\.0\.1:1/v1 gives no answer: ConnectError"
    ):
        Teacher(RunConfig(**TEACHER), tokenizer)


async def test_a_server_without_prompt_logprobs_is_refused(models: Path) -> None:
    _, tokenizer = load_policy(models / "teacher")
    async with ScriptedPolicyServer(["SELECT 1"], model="any") as server:
        config = RunConfig(teacher=server.base_url, teacher_model="any")
        with pytest.raises(
            TeacherError, match=r"\(prompt_logprobs\): serve it with vLLM or groundwire serve|answers 4"
        ):
            await asyncio.to_thread(Teacher, config, tokenizer)


@pytest.mark.parametrize(
    ("body", "message"),
    [({"prompt": "text"}, "token ids"), ({"prompt": [1, 10**6]}, "from 0 to"), ({"prompt": [1] * 600}, "600")],
)
def test_a_prompt_that_cannot_be_scored_is_refused(teacher: ServedModel, body: Any, message: str) -> None:
    client = openai.OpenAI(base_url=teacher.base_url, api_key=teacher.api_key, max_retries=0)
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(model="x", **body, extra_body={"prompt_logprobs": 0})


async def _ask(task: Any) -> str:
    client = openai.AsyncOpenAI()
    reply = await client.chat.completions.create(model="x", messages=[{"role": "user", "content": task.question}])
    return str(reply.choices[0].message.content)


def test_the_policy_comes_closer_to_its_teacher_without_a_reward(
    models: Path, teacher: ServedModel, tmp_path: Path
) -> None:
    result = fit(
        _ask,
        [{"id": str(number), "question": f"list {number}"} for number in range(4)],
        lambda task, answer: 0.0,
        validation=[{"id": "v", "question": "list"}],
        quiet=True,
        model=str(models / "student"),
        output_dir=str(tmp_path),
        teacher=teacher.base_url,
        teacher_model="any",
        teacher_weight=1,
        steps=5,
        tasks_per_step=4,
        group_size=48,
        max_tokens=16,
        max_model_len=256,
        learning_rate=1e-3,
        warmup_steps=0,
        val_every=0,
    )
    lines = result.metrics[1:]
    assert [line["teacher_share"] for line in lines] == [1.0] * 5
    # The first updates of Adam are as large for noise as for the gradient.
    assert lines[-1]["teacher_kl"] < 0.85 * max(line["teacher_kl"] for line in lines)
