"""A prompt that is computed once for all its rows gives what each row alone gives."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import LlamaConfig, LlamaForCausalLM

from groundwire.train.algorithms.speed import ModelCost
from groundwire.train.config.verl_names import COMPUTED, ENGINE_VENDOR, TRAINING_GPUS, UPDATE_FLOPS
from groundwire.train.policy.attention import VARLEN, tree_block_mask
from groundwire.train.verl.rows import add_derived_columns
from groundwire.train.verl.shared_prefixes.tree import micro_batches, prefix_tree

SHAPE = LlamaConfig(
    vocab_size=60,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,  # with FSDP2, verl 0.9.1 shards an untied head alone: fused kernels cannot read it
)


def some_rows(seed, groups=4):
    """Rows of three databases: groups with one prompt, turns that continue a row, equal replies, one without reply."""
    rng = random.Random(seed)

    def ids(least, most):
        return [rng.randrange(60) for _ in range(rng.randint(least, most))]

    schemas = [ids(3, 20) for _ in range(3)]
    rows = []
    for _ in range(groups):
        prompt, reply = rng.choice(schemas) + ids(1, 9), ids(1, 6)
        rows += [(prompt, ids(1, 6)) for _ in range(rng.randint(1, 4))]
        rows += [(prompt, reply), (prompt, reply), (prompt + reply + ids(1, 4), ids(1, 6)), (prompt, [])]
    rng.shuffle(rows)
    return [torch.tensor(prompt) for prompt, _ in rows], [torch.tensor(reply, dtype=torch.long) for _, reply in rows]


@pytest.mark.parametrize("seed", range(4))
def test_a_block_mask_equals_the_one_from_the_dense_mask(seed):
    rng = random.Random(seed)
    length = rng.choice([5, 128, 700, 1024])
    ends = []
    for _ in range(2):
        open_until, end = [length], []
        for column in range(length):  # a random tree: a branch ends before those that it is in
            while open_until[-1] <= column:
                open_until.pop()
            if rng.random() < 0.02:
                open_until.append(rng.randint(column + 1, open_until[-1]))
            end.append(open_until[-1])
        ends.append(end)
    end, at = torch.tensor(ends), torch.arange(length)
    mask = tree_block_mask(end, torch.zeros_like(end))
    expected = create_block_mask(mask.mask_mod, 2, None, length, length, device="cpu")  # from the dense mask
    assert mask.shape == expected.shape
    for name in ("kv_num_blocks", "kv_indices", "q_num_blocks", "q_indices"):
        for kind in (name, f"full_{name}"):
            got, wanted = getattr(mask, kind), getattr(expected, kind)
            assert torch.equal(got, wanted), kind
            assert (got.dtype, got.stride()) == (wanted.dtype, wanted.stride()), kind  # kernels read them as one piece
    dense = (at <= at[:, None]) & (at[:, None] < end[:, None, :])
    assert torch.equal(mask.mask_mod(torch.arange(2)[:, None, None], None, at[:, None], at), dense)


@pytest.mark.parametrize("window", [1, 100, 128, 300])
def test_a_window_leaves_the_positions_before_a_query_not_the_columns(window):
    prompt, replies = 400, (150, 30, 200, 128)
    length = prompt + sum(replies)
    end, positions = torch.full((1, length), length), torch.arange(length)[None].clone()
    start = prompt
    for reply in replies:
        end[0, start : start + reply] = start + reply
        positions[0, start : start + reply] = torch.arange(prompt, prompt + reply)
        start += reply
    whole = tree_block_mask(end, positions)
    mask = whole.of_window(window)
    near = positions[0, :, None] - positions[0] < window
    assert torch.equal(mask.dense()[0, 0], whole.dense()[0, 0] & near)
    blocks = {}
    for kind, number, order in (
        ("partial", mask.kv_num_blocks, mask.kv_indices),
        ("full", mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        blocks[kind] = {(q, int(k)) for q in range(number.shape[2]) for k in order[0, 0, q, : number[0, 0, q]]}
    for q in range(-(-length // 128)):
        for k in range(-(-length // 128)):
            part = mask.dense()[0, 0, q * 128 : q * 128 + 128, k * 128 : k * 128 + 128]
            assert part.all() or (q, k) not in blocks["full"]
            assert not part.any() or (q, k) in blocks["full"] | blocks["partial"]
    assert window > 128 or sum(map(len, blocks.values())) < int(
        whole.kv_num_blocks.sum() + whole.full_kv_num_blocks.sum()
    )


def test_a_long_row_needs_no_dense_mask():
    end = torch.full((1, 1 << 18), 1 << 18)
    mask = tree_block_mask(end, torch.arange(1 << 18)[None])  # 69 GB
    assert int(mask.full_kv_num_blocks.sum()) == 2048 * 2047 / 2


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_has_the_log_probabilities_and_gradients_of_separate_rows(seed):
    torch.manual_seed(seed)
    model = LlamaForCausalLM._from_config(SHAPE, attn_implementation="sdpa")
    prompts, replies = some_rows(seed)
    rows = [torch.cat(pair) for pair in zip(prompts, replies, strict=True)]

    def log_probs(logits, labels):
        return logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]

    trained = torch.cat([torch.arange(1, len(row) + 1) >= len(p) for row, p in zip(rows, prompts, strict=True)])
    trained[torch.tensor([len(row) for row in rows]).cumsum(0) - 1] = False  # nothing follows a row's last token
    weights = torch.randn(len(trained)) * trained

    def gradients(values):
        model.zero_grad()
        (values * weights).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    alone = torch.cat([log_probs(model(input_ids=row[None]).logits[0], row.roll(-1)) for row in rows])
    expected = gradients(alone)

    lengths = [len(row) for row in rows]
    order = [row for batch in micro_batches(prompts, lengths, 10_000) for row in batch]
    assert sorted(order) == list(range(len(rows)))
    tree = prefix_tree([prompts[row] for row in order], [lengths[row] for row in order])
    assert len(tree.keep) < 0.7 * len(tree.expand)
    ids = torch.cat([rows[row] for row in order])
    assert torch.equal(ids[tree.keep][tree.expand], ids)
    labels = torch.cat([rows[row].roll(-1) for row in order])
    positions = torch.cat([torch.arange(lengths[row]) for row in order])
    model.set_attn_implementation(VARLEN)
    logits = model(
        input_ids=ids[None, tree.keep],
        position_ids=positions[None, tree.keep],
        attention_mask=tree_block_mask(tree.end[None], positions[None, tree.keep]),
        use_cache=False,
    ).logits[0]
    shared = log_probs(logits, labels[tree.keep])[tree.expand].split([lengths[row] for row in order])
    ordered = torch.cat([shared[order.index(row)] for row in range(len(rows))])
    torch.testing.assert_close(ordered, alone, atol=2e-6, rtol=1e-5)
    for got, wanted in zip(gradients(ordered), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_micro_batches_hold_each_row_once_and_at_most_the_given_tokens(seed):
    prompts, replies = some_rows(seed, groups=6)
    lengths = [len(prompt) + len(reply) for prompt, reply in zip(prompts, replies, strict=True)]
    for least in (1, 7, len(prompts)):
        batches = micro_batches(prompts, lengths, 60, least)
        assert sorted(row for batch in batches for row in batch) == list(range(len(prompts)))
        assert len(batches) >= least
        assert all(batches)
        for batch in batches:
            kept = len(prefix_tree([prompts[row] for row in batch], [lengths[row] for row in batch]).keep)
            assert kept <= 60 or len(batch) == 1
    assert len(batches) == len(prompts)


def test_a_group_costs_one_prompt_and_its_replies():
    """64 groups of 8 rollouts, prompts of 886 tokens and replies of 42, all of different databases."""
    generator = torch.Generator().manual_seed(0)
    prompts = [prompt for prompt in torch.randint(50_000, (64, 886), generator=generator) for _ in range(8)]
    lengths = [928] * len(prompts)
    batches = micro_batches(prompts, lengths, 32768)
    kept = sum(len(prefix_tree([prompts[i] for i in batch], [928] * len(batch)).keep) for batch in batches)
    assert (sum(lengths), kept) == (475_136, 64 * (885 + 8 * 43))
    assert len(batches) == 3


def test_verl_finds_this_engine_for_the_policy_only(monkeypatch):
    pytest.importorskip("verl")
    from verl.workers.engine import EngineRegistry

    from groundwire.train.verl.shared_prefixes.engine import SharedPrefixesEngine

    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cuda")
    monkeypatch.setenv("VERL_ENGINE_VENDOR", ENGINE_VENDOR)
    found = {(model, EngineRegistry.get_engine_cls(model, "fsdp")) for model in ("language_model", "value_model")}
    assert [model for model, engine in found if engine is SharedPrefixesEngine] == ["language_model"]
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "nvidia")
    assert EngineRegistry.get_engine_cls("language_model", "fsdp") is SharedPrefixesEngine.__base__


@pytest.fixture
def engines(monkeypatch, tmp_path):
    """verl's own engine and this one over the same weights, with real FSDP on the CPU."""
    pytest.importorskip("verl")
    from transformers.integrations import flash_attention
    from verl.plugin.platform import platform_manager
    from verl_on_cpu import PlatformCPU

    monkeypatch.setattr(platform_manager, "_current_platform", PlatformCPU())
    # FSDP 1 copies the weights of rank 0 on GPUs only.
    monkeypatch.setattr(torch.distributed.fsdp._init_utils, "_sync_module_params_and_buffers", lambda *_: None)
    # verl patches both for all models.
    monkeypatch.setattr(LlamaForCausalLM, "forward", LlamaForCausalLM.forward)
    monkeypatch.setattr(flash_attention, "_flash_attention_forward", flash_attention._flash_attention_forward)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield lambda strategy: make_engines(tmp_path, strategy)
    torch.distributed.destroy_process_group()


def make_engines(folder, strategy):
    """verl's own engine and this one over the same weights."""
    from verl.workers.engine import FSDPEngineWithLMHead

    from groundwire.train.verl.shared_prefixes.engine import SharedPrefixesEngine

    made = []
    for engine_class in (FSDPEngineWithLMHead, SharedPrefixesEngine):
        engine = engine_class(**engine_settings(folder, strategy))
        engine.initialize()
        made.append(engine)
    return SimpleNamespace(verl=made[0], ours=made[1])


def engine_settings(folder, strategy):
    """Those of a model with random weights, always the same, in ``folder``."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

    torch.manual_seed(0)
    LlamaForCausalLM._from_config(SHAPE).save_pretrained(folder)
    return {
        "model_config": HFModelConfig(
            path=str(folder),
            load_tokenizer=False,
            use_fused_kernels=True,
            use_remove_padding=True,
            fused_kernel_options={"impl_backend": "torch"},
            override_config={"attn_implementation": VARLEN, "model_config": {}},
            external_lib="groundwire.train.verl.shared_prefixes.engine",
        ),
        "engine_config": FSDPEngineConfig(
            strategy=strategy, mixed_precision={"param_dtype": "fp32"}, use_torch_compile=False
        ),
        "optimizer_config": FSDPOptimizerConfig(total_training_steps=1),
        "checkpoint_config": CheckpointConfig(),
    }


def nested(tensors):
    return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)


def test_what_a_worker_does_not_read_follows_from_what_it_reads():
    lengths = [(5, 3), (1, 1), (7, 2)]
    prompts, responses = ([torch.randint(99, (pair[part],)) for pair in lengths] for part in (0, 1))
    masks = [torch.randint(2, (reply,)) for _, reply in lengths]
    columns = {
        "prompts": prompts,
        "responses": responses,
        "position_ids": [torch.arange(sum(pair)) for pair in lengths],
        "loss_mask": masks,
    }
    data = {"input_ids": nested(map(torch.cat, zip(prompts, responses, strict=True))), "response_mask": nested(masks)}
    add_derived_columns(data)
    for name, rows in columns.items():
        assert [row.tolist() for row in data[name].unbind()] == [row.tolist() for row in rows]
        assert data[name].dtype == torch.int64


def verl_batch(rows, masks):
    """A mini-batch as verl's trainer sends it, with at most 100 tokens a micro-batch."""
    from verl.utils import tensordict_utils

    return tensordict_utils.get_tensordict(
        {
            "input_ids": nested(rows),
            "position_ids": nested(torch.arange(len(row)) for row in rows),
            "loss_mask": nested(masks),
        },
        {
            "use_remove_padding": True,
            "use_fused_kernels": True,
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": 100,
            "temperature": 0.7,
            "calculate_entropy": True,
            "return_model_output": True,
        },
    )


def verl_loss(model_output, data, dp_group):
    parts = []
    for name, factor in (("log_probs", 1.0), ("entropy", 0.1)):
        values = zip(model_output[name].unbind(), data["loss_mask"].unbind(), strict=True)
        parts += [factor * (row[-1 - len(m) : -1] * m * torch.arange(1, len(m) + 1)).sum() for row, m in values]
    return sum(parts), {"rows": len(data)}


def test_a_mini_batch_is_copied_only_if_it_is_not_the_whole_batch(engines):
    from verl.utils.tensordict_utils import get_non_tensor_data, make_iterator

    prompts, replies = some_rows(1)
    rows = [torch.cat(pair) for pair in zip(prompts, replies, strict=True)]
    batch = verl_batch(rows, replies)

    def mini_batches(size, **options):
        with engines("fsdp2").ours.train_mode():
            return list(make_iterator(batch, size, epochs=2, seed=1, dataloader_kwargs=options))

    for whole in mini_batches(len(rows)):
        assert whole["input_ids"].values().data_ptr() == batch["input_ids"].values().data_ptr()
        assert whole is not batch  # verl writes settings into it
        assert get_non_tensor_data(whole, "temperature", None) == 0.7
    for size, options in ((1, {}), (len(rows), {"shuffle": True})):
        found = [row.tolist() for part in mini_batches(size, **options) for row in part["input_ids"].unbind()]
        assert (found == [row.tolist() for row in rows] * 2) == (not options)
        assert sorted(found) == sorted([row.tolist() for row in rows] * 2)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_verls_engine_gets_the_same_log_probabilities_metrics_and_gradients(engines, strategy):
    both = engines(strategy)
    prompts, replies = some_rows(1)
    replies = [reply if len(reply) else torch.tensor([7]) for reply in replies]
    rows = [torch.cat(pair) for pair in zip(prompts, replies, strict=True)]
    masks = [torch.ones_like(reply) for reply in replies]
    masks[0][:] = 0  # as in the rows that verl adds

    seen = {"verl": [], "ours": []}
    results = {}
    for name, engine in vars(both).items():
        engine.module.register_forward_pre_hook(
            lambda _module, _args, kwargs, name=name: seen[name].append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        with engine.eval_mode():
            inferred = engine.forward_backward_batch(verl_batch(rows, masks), None, forward_only=True)
        with engine.train_mode():
            trained = engine.forward_backward_batch(verl_batch(rows, masks), verl_loss)
            results[name] = (inferred, trained, engine.optimizer_step())
    assert sum(seen["ours"]) < 0.7 * sum(seen["verl"])
    assert max(seen["ours"]) <= 100
    for ours, verls in zip(results["ours"][:2], results["verl"][:2], strict=True):
        for name in ("log_probs", "entropy"):
            pairs = zip(ours["model_output"][name].unbind(), verls["model_output"][name].unbind(), strict=True)
            for (got, wanted), row, mask in zip(pairs, rows, masks, strict=True):
                assert got.shape == wanted.shape == row.shape
                assert torch.isfinite(got).all()
                reply = slice(-1 - len(mask), -1)
                torch.testing.assert_close(got[reply] * mask, wanted[reply] * mask, atol=1e-5, rtol=1e-5)
                assert torch.count_nonzero(got) == mask.sum()  # others have no logits
    assert sum(results["ours"][1]["metrics"]["rows"]) == len(rows)
    assert results["ours"][2] == pytest.approx(results["verl"][2], rel=1e-5)
    for got, wanted in zip(both.ours.module.parameters(), both.verl.module.parameters(), strict=True):
        torch.testing.assert_close(local(got), local(wanted), atol=1e-5, rtol=1e-4)


def test_an_update_counts_the_tokens_and_the_operations_of_all_its_passes(engines):
    from verl.utils.metric import Metric, reduce_metrics
    from verl.utils.tensordict_utils import assign_non_tensor

    engine = engines("fsdp").ours
    prompts, replies = some_rows(1)
    replies = [reply if len(reply) else torch.tensor([7]) for reply in replies]
    rows = [torch.cat(pair) for pair in zip(prompts, replies, strict=True)]
    batch = verl_batch(rows, [torch.ones_like(reply) for reply in replies])
    positions = []
    engine.module.register_forward_pre_hook(
        lambda _module, _args, given: positions.append(given["position_ids"].flatten()), with_kwargs=True
    )

    def logged(of_mini_batches, name):
        return reduce_metrics({name: [Metric.aggregate_dp([metrics[name]]) for metrics in of_mini_batches]})[name]

    for _ in range(2):
        with engine.eval_mode():
            engine.forward_backward_batch(batch, None, forward_only=True)
        positions.clear()
        found = []
        with engine.train_mode():  # as verl's worker does it: once for the update, and again for each mini-batch
            for is_last in (False, True):
                assign_non_tensor(batch, update_lr_scheduler=is_last)
                with engine.train_mode():
                    found.append(engine.forward_backward_batch(batch, verl_loss)["metrics"])
        seen = torch.cat(positions)  # those of two mini-batches
        assert logged(found, COMPUTED) == len(seen)
        chosen = sum(map(len, replies))
        cost = ModelCost.of(LlamaForCausalLM(SHAPE))
        width = SHAPE.hidden_size * SHAPE.num_hidden_layers
        operations = 2 * (cost.weights * len(seen) + 2 * cost.output * chosen) + 4 * width * int((seen + 1).sum())
        assert logged(found, UPDATE_FLOPS) == pytest.approx(3 * operations, rel=1e-9)
        assert found[0][TRAINING_GPUS] == [1]


def ppo_batch(rows, replies, advantages):
    """A mini-batch for verl's policy loss, with names as those of our rows."""
    from tensordict import NonTensorStack
    from verl.utils import tensordict_utils

    data = verl_batch(rows, [torch.ones_like(reply) for reply in replies])
    data["prompts"] = nested(row[: len(row) - len(reply)] for row, reply in zip(rows, replies, strict=True))
    data["responses"] = nested(replies)
    data["response_mask"] = data["loss_mask"]
    data["old_log_probs"] = nested(torch.full((len(reply),), -4.0) for reply in replies)
    data["advantages"] = nested(
        torch.full((len(reply),), value) for reply, value in zip(replies, advantages, strict=True)
    )
    data["uid"] = NonTensorStack(*map(str, range(len(rows))))
    settings = {"calculate_entropy": False, "return_model_output": False, "global_batch_size": len(rows)}
    tensordict_utils.assign_non_tensor(data, **settings)
    return data


def test_values_of_replies_are_those_of_verls_function_for_them():
    pytest.importorskip("verl")
    from verl.workers.utils.padding import no_padding_2_padding

    from groundwire.train.verl.shared_prefixes.engine import _padded_replies

    rows, replies = [torch.arange(length) for length in (9, 4, 12)], [torch.arange(length) for length in (3, 1, 11)]
    data, results = ppo_batch(rows, replies, [1.0, 1.0, 1.0]), []
    for function in (_padded_replies, no_padding_2_padding):
        values = torch.randn(25, generator=torch.Generator().manual_seed(0)).requires_grad_()
        found = function(torch.nested.nested_tensor_from_jagged(values, data["input_ids"].offsets()), data)
        (found * torch.arange(33.0).view(3, 11)).sum().backward()
        results.append((found.detach(), values.grad))
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("agg", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo"])
@pytest.mark.parametrize("zeros", ["some", "all", "some, with a KL term"])
def test_rows_with_advantages_of_zero_are_left_out_where_they_have_no_gradient(engines, mode, agg, zeros):
    from functools import partial

    from verl.workers.config import FSDPActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    both = engines("fsdp")
    prompts, replies = some_rows(3, groups=6)
    replies = [reply if len(reply) else torch.tensor([7]) for reply in replies]
    rows = [torch.cat(pair) for pair in zip(prompts, replies, strict=True)]
    advantages = [0.0 if zeros == "all" or number % 3 else 0.5 - number % 2 for number in range(len(rows))]
    config = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        loss_agg_mode=agg,
        policy_loss=PolicyLossConfig(loss_mode=mode),
        use_kl_loss="KL" in zeros,
    )
    tokens, gradients = {}, {}
    for name, engine in vars(both).items():
        data = ppo_batch(rows, replies, advantages)
        if config.use_kl_loss:
            data["ref_log_prob"] = data["old_log_probs"]
        seen = tokens.setdefault(name, [])
        engine.module.register_forward_pre_hook(
            lambda _module, _args, kwargs, seen=seen: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(data, partial(ppo_loss, config=config))
            gradients[name] = [local(parameter.grad).clone() for parameter in engine.module.parameters()]
    for got, wanted in zip(gradients["ours"], gradients["verl"], strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)
    assert any(torch.count_nonzero(each) for each in gradients["verl"]) == (zeros != "all")
    everything = len(prefix_tree(*_sorted(prompts, rows)).keep)
    left_out = mode != "cispo" and not config.use_kl_loss
    assert (sum(tokens["ours"]) < 0.6 * everything) == left_out
    if zeros == "all" and left_out:
        assert len(tokens["ours"]) == 1


def test_every_gpu_has_as_many_micro_batches_if_few_rows_have_a_gradient(engines, monkeypatch):
    engines("fsdp")  # the platform of verl's functions
    from groundwire.train.verl.shared_prefixes import engine as shared_prefixes

    prompts, replies = some_rows(2)
    data = verl_batch([torch.cat(pair) for pair in zip(prompts, replies, strict=True)], replies)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda number, **_: number.fill_(3))  # another GPU has three
    parts, rows = shared_prefixes._prepare_micro_batches(data, None, trained=[5], constrain=lambda *_: None)
    assert len(parts) == len(rows) == 3
    assert all(len(part) == len(each) > 0 for part, each in zip(parts, rows, strict=True))
    assert 5 in [row for each in rows for row in each]


def _sorted(prompts, rows):
    order = [row for batch in micro_batches(prompts, [len(row) for row in rows], 10_000) for row in batch]
    return [prompts[row] for row in order], [len(rows[row]) for row in order]


def test_rows_without_a_trained_token_have_a_gradient_of_zero(engines):
    ours = engines("fsdp").ours
    rows = [torch.tensor([5, 6, 7, 8]), torch.tensor([5, 6, 9])]
    masks = [torch.zeros(2, dtype=torch.long), torch.zeros(1, dtype=torch.long)]
    with ours.train_mode():
        ours.optimizer_zero_grad()
        ours.forward_backward_batch(verl_batch(rows, masks), verl_loss)
        gradients = [parameter.grad for parameter in ours.module.parameters()]
    assert gradients
    assert not any(torch.count_nonzero(gradient) for gradient in gradients)


def local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_micro_batch_that_is_out_of_memory_is_computed_again_in_smaller_ones(engines, caplog, place):
    both = engines("fsdp")
    prompts, replies = some_rows(2)
    rows = [torch.cat(pair) for pair in zip(prompts, replies, strict=True)]
    masks = [torch.ones_like(reply) for reply in replies]
    sizes, failing = [], []

    def check(size):
        sizes.append(size)
        if size > 60 and failing and len(sizes) > 1:  # after the gradient of a micro-batch
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    class Check(torch.autograd.Function):
        @staticmethod
        def forward(context, value, size):
            context.size = size
            return value

        @staticmethod
        def backward(context, gradient):
            check(context.size)
            return gradient, None

    def loss(model_output, data, dp_group):
        value, metrics = verl_loss(model_output, data, dp_group)
        return Check.apply(value, current[-1]), metrics

    current = []
    both.ours.module.register_forward_pre_hook(
        lambda _module, _args, kwargs: current.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    if place == "forward":
        both.ours.module.register_forward_pre_hook(lambda *_: check(current[-1]))
    failing.append(True)
    norms = {}
    for name, engine, function in (("ours", both.ours, loss), ("verl", both.verl, verl_loss)):
        for _ in range(2):
            with engine.train_mode():
                engine.optimizer_zero_grad()
                engine.forward_backward_batch(verl_batch(rows, masks), function)
                norms.setdefault(name, []).append(engine.optimizer_step())
    assert norms["ours"] == pytest.approx(norms["verl"], rel=1e-5)
    assert [size > 60 for size in sizes[:3]] == [True, True, False]
    assert not any(size > 60 for size in sizes[2:])  # the second batch begins with the smaller micro-batches
    assert "a micro-batch of 100 tokens ran out of memory: going on with ppo_max_token_len_per_gpu=50" in caplog.text
    for got, wanted in zip(both.ours.module.parameters(), both.verl.module.parameters(), strict=True):
        torch.testing.assert_close(local(got), local(wanted), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
def test_a_row_that_is_out_of_memory_is_an_error(engines, strategy):
    ours = engines(strategy).ours
    prompts, replies = some_rows(2)
    rows, masks = (
        [torch.cat(pair) for pair in zip(prompts, replies, strict=True)],
        [torch.ones_like(r) for r in replies],
    )
    sizes = []

    def fail(module, arguments, given):
        sizes.append(given["input_ids"].shape[1])
        raise torch.OutOfMemoryError("CUDA out of memory")

    ours.module.register_forward_pre_hook(fail, with_kwargs=True)
    with ours.eval_mode(), pytest.raises(torch.OutOfMemoryError):
        ours.forward_backward_batch(verl_batch(rows, masks), None, forward_only=True)
    assert 100 >= sizes[0] > 50 >= sizes[1] > 25 >= sizes[2] > sizes[3]
    with ours.train_mode(), pytest.raises(torch.OutOfMemoryError):
        ours.forward_backward_batch(verl_batch(rows, masks), verl_loss)
    assert len(sizes) == (8 if strategy == "fsdp" else 5)  # FSDP 2 would keep gradients
