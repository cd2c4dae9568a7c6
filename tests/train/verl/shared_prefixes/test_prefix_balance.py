"""Each GPU gets whole groups, as many rows as the others, and about as much work."""

from __future__ import annotations

import pkgutil
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from groundwire.train.verl.patches import patch_trainer
from groundwire.train.verl.shared_prefixes.balance import divide_rows
from groundwire.train.verl.shared_prefixes.prefixes import prefix_hashes
from groundwire.train.verl.shared_prefixes.tree import prefix_tree

Tag = dict[str, Any]


def some_groups(seed: int, groups: int, rows: int = 8, gradient: float = 1.0) -> tuple[list[str], list[Tag]]:
    """Single calls with long prompts and short replies."""
    rng = random.Random(seed)
    keys, tags = [], []
    for group in range(groups):
        prompt, has_gradient = rng.randint(300, 2265), rng.random() < gradient
        for session in range(rows):
            reply = rng.randint(10, 80)
            keys.append(f"g{group}_{session}_0")
            tags.append({"prompt_len": prompt, "seq_len": prompt + reply, "has_gradient": has_gradient})
    return keys, tags


def computed_tokens(rows: list[int], keys: list[str], tags: list[Tag]) -> int:
    """The tokens that one GPU keeps of its rows."""
    numbers = {name: number for number, name in enumerate(sorted({key.partition("_")[0] for key in keys}))}
    prompts = [torch.full((tags[row]["prompt_len"],), numbers[keys[row].partition("_")[0]]) for row in rows]
    return len(prefix_tree(prompts, [tags[row]["seq_len"] for row in rows]).keep) if rows else 0


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_prompt_is_on_one_gpu_and_the_work_is_divided_equally(ranks: int) -> None:
    keys, tags = some_groups(ranks, 64)
    parts = divide_rows(keys, tags, ranks)
    assert sorted(row for part in parts for row in part) == list(range(512))
    assert {len(part) for part in parts} == {512 // ranks}
    tokens = [computed_tokens(part, keys, tags) for part in parts]
    assert abs(sum(tokens) - computed_tokens(list(range(512)), keys, tags)) < 64 * ranks  # a prompt's last token
    assert max(tokens) < 1.05 * sum(tokens) / ranks
    for part in parts:  # as verl's sampler ordered them
        assert part == sorted(part)


def test_the_rows_with_a_gradient_are_divided_equally_and_so_are_the_others() -> None:
    keys, tags = some_groups(0, 64, gradient=0.3)
    for has_gradient in (True, False):
        tokens = [
            computed_tokens([row for row in part if tags[row]["has_gradient"] == has_gradient], keys, tags)
            for part in divide_rows(keys, tags, 2)
        ]
        assert max(tokens) < 1.06 * min(tokens)


def test_a_group_is_divided_only_where_no_gpu_has_room_for_it() -> None:
    sizes = {"a": 5, "b": 3, "c": 3, "d": 1}
    keys = [f"{name}_{number}_0" for name, size in sizes.items() for number in range(size)]
    tags = [{"prompt_len": 100, "seq_len": 110} for _ in keys]
    parts = [{keys[row][0] for row in part} for part in divide_rows(keys, tags, 2)]
    assert sorted(map(sorted, parts)) == [["a", "d"], ["b", "c"]]
    keys = [f"{name}_{number}_0" for name in "abc" for number in range(4)]
    parts = [[keys[row] for row in part] for part in divide_rows(keys, tags, 2)]
    assert [len(part) for part in parts] == [6, 6]
    assert sum(len({key[0] for key in part}) for part in parts) == 4  # one of three groups is on both


def about_databases(
    databases: int, groups: int, instructions: int = 40
) -> tuple[list[str], list[Tag], list[list[int]]]:
    """Groups of two rows, whose prompts have common instructions, a database's schema, and a question."""
    rng = random.Random(databases)

    def ids(number: int) -> list[int]:
        return [rng.randrange(1000) for _ in range(number)]

    common, schemas = ids(instructions), [ids(rng.randint(300, 1500)) for _ in range(databases)]
    prompts = [[*common, *rng.choice(schemas), *ids(rng.randint(20, 40))] for _ in range(groups)]
    keys = [f"g{group}_{session}_0" for group in range(groups) for session in range(2)]
    rows = [prompt for prompt in prompts for _ in range(2)]
    tags = [{"prompt_len": len(row), "seq_len": len(row) + 42, "prefix_hashes": prefix_hashes(row)} for row in rows]
    return keys, tags, rows


def kept_tokens(part: list[int], tags: list[Tag], prompts: list[list[int]]) -> int:
    part = sorted(part, key=prompts.__getitem__)
    return len(prefix_tree([torch.tensor(prompts[row]) for row in part], [tags[row]["seq_len"] for row in part]).keep)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("instructions", [40, 3000])
def test_groups_that_begin_alike_are_on_one_gpu(ranks: int, instructions: int) -> None:
    keys, tags, prompts = about_databases(40, 128, instructions)
    parts = divide_rows(keys, tags, ranks)
    assert sorted(row for part in parts for row in part) == list(range(256))
    assert {len(part) for part in parts} == {256 // ranks}
    alone = kept_tokens(list(range(256)), tags, prompts) - instructions  # every GPU has those
    tokens = [kept_tokens(part, tags, prompts) - instructions for part in parts]
    assert max(tokens) < 1.15 * alone / ranks
    apart = divide_rows(keys, [{**tag, "prefix_hashes": ""} for tag in tags], ranks)
    assert min(kept_tokens(part, tags, prompts) - instructions for part in apart) > 1.3 * alone / ranks


def test_one_database_is_divided_among_all_gpus() -> None:
    keys, tags, prompts = about_databases(1, 64)
    parts = divide_rows(keys, tags, 4)
    assert {len(part) for part in parts} == {32}
    tokens = [kept_tokens(part, tags, prompts) for part in parts]
    assert max(tokens) < 1.1 * min(tokens)
    for part in parts:  # both rows of a group
        assert len({keys[row].partition("_")[0] for row in part}) == 16


def test_hashes_are_those_of_the_common_beginning() -> None:
    one, other = [*range(128)], [*range(100), *range(28)]
    assert prefix_hashes(one[:63]) == ""
    hashes = prefix_hashes(one), prefix_hashes(other)
    assert [len(each) for each in hashes] == [36, 36]  # of the first 64, 70, 76, 83, 91, 99, 108, 117 and 128 tokens
    assert hashes[0][:24] == hashes[1][:24] == prefix_hashes(one[:100])
    assert hashes[0][24:28] != hashes[1][24:28]


def test_rows_of_several_turns_count_what_follows_the_first_prompt() -> None:
    prompts = {"long": (100, 2000), "b": (600, 700), "c": (650, 750)}
    turns = [(f"{name}_0_{turn}", length) for name, lengths in prompts.items() for turn, length in enumerate(lengths)]
    keys = [key for key, _ in turns]
    tags = [{"prompt_len": length, "seq_len": length + 9} for _, length in turns]
    keys, tags = [*keys, "pad_0_0", "pad_1_0"], [*tags, *[{"prompt_len": 1, "seq_len": 2}] * 2]
    parts = [{keys[row].partition("_")[0] for row in part} for part in divide_rows(keys, tags, 2)]
    assert sorted(map(sorted, parts)) == [["b", "c"], ["long", "pad"]]


@pytest.mark.parametrize(
    ("ranks", "expected", "without"), [(1, 106_228, 106_228), (2, 53_128, 94_829), (8, 13_348, 70_367)]
)
def test_verls_trainer_orders_its_rows_so(
    ranks: int, expected: int, without: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer_base = pytest.importorskip("verl.trainer.ppo.v1.trainer_base", exc_type=ImportError)
    from transfer_queue import KVBatchMeta

    padding = "verl.trainer.ppo.padding_utils.construct_minimal_padding_template"
    monkeypatch.setattr(padding, pkgutil.resolve_name(padding))  # which puts it back, and these:
    for method in ("_balance_batch", "_compute_old_log_prob", "_compute_advantage"):
        monkeypatch.setattr(trainer_base.PPOTrainer, method, getattr(trainer_base.PPOTrainer, method))
    trainer = SimpleNamespace(
        actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": list(range(ranks))}),
        tokenizer=SimpleNamespace(eos_token_id=0),
        _get_required_batch_multiple=lambda ranks: ranks,
    )

    def most_tokens() -> tuple[int, dict[str, Any]]:
        """Of the GPU with more of them."""
        keys, tags = some_groups(0, 64)
        batch, metrics = KVBatchMeta(partition_id="train", keys=keys, tags=tags), dict[str, Any]()
        batch = trainer_base.PPOTrainer._balance_batch(trainer, batch, metrics=metrics)
        parts = torch.arange(512).chunk(ranks)
        return max(computed_tokens(part.tolist(), batch.keys, batch.tags) for part in parts), metrics

    verls, _ = most_tokens()
    patch_trainer(own_engine=True, shared_prefixes=True)
    ours, metrics = most_tokens()
    assert (ours, verls) == (expected, without)
    assert metrics["global_seqlen/balanced_min"] > 0.9 * metrics["global_seqlen/balanced_max"]
