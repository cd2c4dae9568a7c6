from __future__ import annotations

import asyncio
import random
import time

import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from small_models import small_model  # noqa: E402
from transformers import (  # noqa: E402
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from groundwire.train.policy.batch import sample_tokens  # noqa: E402
from groundwire.train.policy.decoding.decoder import Decoder  # noqa: E402
from groundwire.train.policy.engine import LocalEngine  # noqa: E402
from groundwire.train.policy.errors import ContextLengthError, EngineClosedError, EngineError  # noqa: E402
from groundwire.train.policy.model import fitting_length  # noqa: E402
from groundwire.train.policy.types import Sampling  # noqa: E402

GREEDY = Sampling(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def engine(tiny_policy):
    engine = LocalEngine(*tiny_policy, max_model_len=256)
    yield engine
    engine.close()


def make_prompts(count, *, seed=0, longest=60):
    draw = random.Random(seed)
    return [[draw.randrange(300) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def sample(engine, prompts, sampling):
    futures = [engine.submit(prompt, sampling) for prompt in prompts]
    return [future.result(60) for future in futures]


async def generate(engine, prompt, sampling):
    return await asyncio.wrap_future(engine.submit(prompt, sampling))


async def until(check):
    while not check():  # noqa: ASYNC110 -- the engine is another thread
        await asyncio.sleep(0.001)


def logits_of(model, reply):
    """The model's own logits at each sampled token."""
    with torch.inference_mode():
        ids = torch.tensor([[*reply.prompt_ids, *reply.token_ids]])
        return model(ids).logits[0, len(reply.prompt_ids) - 1 : -1].float()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.6])
def test_logprobs_are_those_of_transformers_at_the_sampling_temperature(engine, tiny_policy, temperature):
    model, _ = tiny_policy
    sampling = Sampling(temperature=temperature, top_p=0.9, max_tokens=12)
    for reply in sample(engine, make_prompts(12), sampling):
        expected = torch.log_softmax(logits_of(model, reply) / (temperature or 1.0), -1)
        expected = expected.gather(1, torch.tensor(reply.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(reply.logprobs), expected, atol=1e-4, rtol=0)


def test_greedy_is_transformers_greedy(engine, tiny_policy):
    model, _ = tiny_policy
    for prompt in make_prompts(6, seed=1):
        (reply,) = sample(engine, [prompt], GREEDY)
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        assert reply.token_ids == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("kind", "config", "more"),
    [
        (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
        (LlamaForCausalLM, LlamaConfig, {"head_dim": 16, "tie_word_embeddings": True}),
        (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
        (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": False}),
        (LlamaForCausalLM, LlamaConfig, {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                                "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
    ],
)  # fmt: skip
def test_each_supported_architecture_is_computed_as_transformers_does(tiny_policy, kind, config, more):
    model = small_model(kind, config, **more)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data.normal_(1, 0.2)
    engine = LocalEngine(model, tiny_policy[1], max_model_len=128)
    try:
        for reply in sample(engine, make_prompts(5), GREEDY):
            logits = logits_of(model, reply)
            expected = torch.log_softmax(logits, -1).max(-1)
            assert reply.token_ids == expected.indices.tolist()
            torch.testing.assert_close(torch.tensor(reply.logprobs), expected.values, atol=1e-4, rtol=0)
    finally:
        engine.close()


def test_a_greedy_reply_is_the_same_alone_and_in_a_batch(engine):
    prompts = make_prompts(30, seed=2)
    alone = [sample(engine, [prompt], GREEDY)[0].token_ids for prompt in prompts[:6]]
    batch = sample(engine, prompts, GREEDY)
    assert [reply.token_ids for reply in batch[:6]] == alone


def test_a_seeded_reply_is_the_same_alone_and_in_a_batch(engine):
    seeded = Sampling(max_tokens=12, seed=11)
    prompts = make_prompts(20, seed=3)
    alone = sample(engine, prompts[:1], seeded)[0]
    others = [engine.submit(prompt, Sampling()) for prompt in prompts[1:]]
    batch = engine.submit(prompts[0], seeded).result(60)
    for future in others:
        future.cancel()
    assert batch.token_ids == alone.token_ids
    assert sample(engine, prompts[:1], Sampling(max_tokens=12, seed=12))[0].token_ids != alone.token_ids


def test_samples_of_a_group_differ_and_their_prompt_is_read_once(engine):
    (prompt,) = make_prompts(1, seed=4, longest=60)
    prompt = prompt * 2
    replies = sample(engine, [prompt] * 8, Sampling(max_tokens=12))
    assert len({tuple(reply.token_ids) for reply in replies}) > 1
    read = sum(len(reply.prompt_ids) - reply.cached_tokens for reply in replies)
    # If the first is admitted before the others, they read their last token for its logits.
    assert read <= len(prompt) + 7


def test_a_later_turn_reuses_the_cached_prefix(engine, tiny_policy):
    model, _ = tiny_policy
    first = [random.Random(5).randrange(300) for _ in range(100)]
    sample(engine, [first], GREEDY)
    for turn in ([*first[:90], *range(30)], [*first, 7], first, first[:50]):
        (reply,) = sample(engine, [turn], GREEDY)
        shared = next((i for i, (a, b) in enumerate(zip(first, turn, strict=False)) if a != b), min(100, len(turn)))
        assert reply.cached_tokens == min(shared, len(turn) - 1)
        assert reply.token_ids == logits_of(model, reply).argmax(-1).tolist()


def test_the_prefix_cache_is_bounded_and_does_not_change_replies(tiny_policy, monkeypatch):
    model, _ = tiny_policy
    monkeypatch.setattr(Decoder, "prefix_cache_tokens", 150)
    engine = LocalEngine(*tiny_policy, max_model_len=256)
    try:
        prompts = make_prompts(12, seed=6)
        for prompt in prompts * 2:
            (reply,) = sample(engine, [[*prompt, 9]], GREEDY)
            assert reply.token_ids == logits_of(model, reply).argmax(-1).tolist()
        assert 0 < sum(map(len, engine._batch.prefixes)) <= 150
    finally:
        engine.close()


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from([0.0, 0.001]), st.booleans()),
        min_size=1,
        max_size=25,
    )
)
def test_replies_do_not_depend_on_the_order_of_arrival(tiny_policy, arrivals):
    model, _ = tiny_policy
    engine = LocalEngine(*tiny_policy, max_model_len=100, max_batch=5)
    prompts = make_prompts(10, seed=7)
    try:
        jobs = []
        for which, length, pause, cancelled in arrivals:
            future = engine.submit(prompts[which], Sampling(temperature=0, max_tokens=length))
            if cancelled:
                future.cancel()
            jobs.append((which, length, future))
            time.sleep(pause)
        for which, length, future in jobs:
            if future.cancelled():
                continue
            reply = future.result(60)
            assert reply.prompt_ids == tuple(prompts[which])
            assert len(reply.token_ids) == len(reply.logprobs)
            assert len(reply.token_ids) == length or reply.finish_reason == "stop"
            # Rounding decides ties, so the token need only be as likely as the likeliest one.
            logits = logits_of(model, reply)
            chosen = logits.gather(1, torch.tensor(reply.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(chosen, logits.max(-1).values, atol=1e-4, rtol=0)
    finally:
        engine.close()


def test_top_p_keeps_the_smallest_set_with_that_mass():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(1000, 1)
    uniform = torch.linspace(0, 0.9999, 1000, dtype=torch.float64)
    for top_p, allowed in ((0.3, {0}), (0.49, {0}), (0.51, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        tokens, _ = sample_tokens(
            logits, torch.ones(1000), torch.full((1000,), top_p, dtype=torch.float64), uniform, any_top_p=top_p < 1
        )
        assert set(tokens.tolist()) == allowed


def test_samples_follow_the_distribution_without_impossible_tokens():
    logits = torch.tensor([[-float("inf"), 2.0, 0.0, -float("inf"), 1.0, -float("inf")]]).repeat(20000, 1)
    uniform = torch.arange(20000, dtype=torch.float64) / 20000
    ones = torch.ones(20000)
    tokens, _ = sample_tokens(logits, ones * 0.5, ones.double(), uniform, any_top_p=False)
    shares = torch.bincount(tokens, minlength=6) / 20000
    torch.testing.assert_close(shares, torch.softmax(logits[0] / 0.5, -1), atol=1e-3, rtol=0)
    assert set(tokens.tolist()) == {1, 2, 4}


def test_a_reply_ends_before_its_stop_string_and_keeps_the_sampled_tokens(engine, tiny_policy):
    _, tokenizer = tiny_policy
    (whole,) = sample(engine, make_prompts(1, seed=8), Sampling(temperature=0, max_tokens=30))
    stop = whole.text[8:10]
    (reply,) = sample(engine, make_prompts(1, seed=8), Sampling(temperature=0, max_tokens=30, stop=(stop,)))
    assert reply.text == whole.text[: whole.text.index(stop)]
    assert reply.finish_reason == "stop"
    assert reply.token_ids == whole.token_ids[: len(reply.token_ids)]
    assert stop in tokenizer.decode(reply.token_ids)


def test_a_reply_ends_with_the_end_token_or_at_a_limit(tiny_policy):
    model, tokenizer = tiny_policy
    engine = LocalEngine(model, tokenizer, max_model_len=40)
    try:
        replies = sample(engine, [[1, 2, 3]] * 80, Sampling(temperature=3.0, max_tokens=100))
        ends = [reply for reply in replies if reply.finish_reason == "stop"]
        assert ends
        for reply in ends:
            assert reply.token_ids[-1] == tokenizer.eos_token_id
            assert tokenizer.eos_token not in reply.text
        for reply in replies:
            if reply.finish_reason == "length":
                assert len(reply.token_ids) == 37
            assert tokenizer.eos_token_id not in reply.token_ids[:-1]
    finally:
        engine.close()


def test_a_too_long_prompt_is_refused_with_both_numbers(engine):
    with pytest.raises(ContextLengthError, match="256 tokens, and the model's context of 256 tokens"):
        engine.submit([1] * 256, Sampling())
    assert len(engine.submit([1] * 255, Sampling()).result(60).token_ids) == 1


def test_new_weights_change_replies_from_their_update_on():
    from dev.pretrain.model import new_policy
    from dev.pretrain.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(["a b c"] * 30, words=["a"], min_count=2)
    model = new_policy(tokenizer, width=32, layers=1, heads=2, intermediate=32, context=64)
    engine = LocalEngine(model, tokenizer, max_model_len=64)
    try:
        prompt = list(range(40))
        (old,) = sample(engine, [prompt], GREEDY)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.5)
        (still,) = sample(engine, [prompt], GREEDY)
        assert (still.logprobs, still.weights_version) == (pytest.approx(old.logprobs, abs=1e-4), 0)
        engine.update_weights(5)
        (new,) = sample(engine, [prompt], GREEDY)
        assert new.weights_version == 5
        assert new.cached_tokens == 0  # the prefix cache is empty after an update
        assert new.token_ids == logits_of(model, new).argmax(-1).tolist()
        assert new.logprobs != pytest.approx(old.logprobs, abs=1e-2)
    finally:
        engine.close()


def test_a_running_reply_finishes_with_its_first_weights(tiny_policy):
    engine = LocalEngine(*tiny_policy, max_model_len=512)
    try:
        running = engine.submit([1, 2, 3], Sampling(max_tokens=100, temperature=0))
        while not engine.generated_tokens:
            time.sleep(0.001)
        engine.update_weights(1)
        assert running.done()
        assert running.result().weights_version == 0
        assert engine.submit([1, 2, 3], GREEDY).result(60).weights_version == 1
    finally:
        engine.close()


def test_closing_fails_pending_requests_and_refuses_new_ones(tiny_policy):
    engine = LocalEngine(*tiny_policy, max_model_len=512, max_batch=2)
    futures = [engine.submit([i], Sampling(max_tokens=500)) for i in range(1, 8)]
    engine.close()
    engine.close()
    failed = [future for future in futures if future.exception(10)]
    assert len(failed) >= 5
    assert all(isinstance(future.exception(), EngineClosedError) for future in failed)
    with pytest.raises(EngineClosedError):
        engine.submit([1], Sampling())
    with pytest.raises(EngineClosedError):
        engine.update_weights(1)


def test_an_invalid_prompt_does_not_affect_running_requests(tiny_policy):
    engine = LocalEngine(*tiny_policy, max_model_len=64)
    try:
        running = engine.submit([1], Sampling(temperature=0, max_tokens=50))
        while not engine.generated_tokens:
            time.sleep(0.001)
        with pytest.raises(EngineError, match="sampling failed: index 10000000 is out of bounds"):
            engine.submit([10_000_000], GREEDY).result(60)
        assert running.result(60).token_ids
        assert engine.submit([1], GREEDY).result(60).token_ids
    finally:
        engine.close()


async def test_a_cancelled_task_leaves_the_batch(tiny_policy):
    engine = LocalEngine(*tiny_policy, max_model_len=512)
    try:
        task = asyncio.ensure_future(generate(engine, [1, 2, 3], Sampling(max_tokens=500)))
        await until(lambda: engine.generated_tokens)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await generate(engine, [4], GREEDY)
        assert engine.generated_tokens < 450
        await until(lambda: not engine._batch.requests)
    finally:
        engine.close()


def test_max_model_len_is_limited_to_the_models_positions(tiny_policy, capsys):
    own = tiny_policy[0].config.max_position_embeddings
    assert fitting_length(tiny_policy[0], own - 1) == own - 1
    assert capsys.readouterr().err == ""
    LocalEngine(*tiny_policy, max_model_len=fitting_length(tiny_policy[0], 2 * own)).close()
    assert f"it has {own} positions, so max_model_len is {own}, not {2 * own}" in capsys.readouterr().err
