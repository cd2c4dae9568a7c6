"""What is replaced in verl 0.9.1, Ray and vLLM, where they have no setting for it, and why.

:data:`PATCHES` is all of it. Both sets of versions (docs/verl.md) have verl 0.9.1 and Ray 2.60; one has vLLM 0.24, the
other 0.31. :func:`patch` replaces for good, :func:`patched` for a time; both refuse what is not in the list. The list
has a digest of each function's source, so :func:`changed_functions` says which of them another version has changed. The
methods that our subclasses of verl's classes override are in :data:`EXTENDED`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, NamedTuple

from groundwire.train.config.verl_names import OWN_ESTIMATOR
from groundwire.train.verl.rows import DERIVED_COLUMNS, GRAMMARS, PADDED_COLUMNS, READ_COLUMNS
from groundwire.train.verl.shared_prefixes.balance import divide_rows


class Patch(NamedTuple):
    """A function or class of verl, Ray or vLLM that is replaced."""

    module: str
    """In which the name is looked up, as the library does it."""
    digest: str
    """Of the source; "" if only its existence matters."""
    source: str = ""
    """Where another module defines it, from ``site-packages`` on: ``FILE:NAME``."""


_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_ENGINE = "verl.workers.engine.fsdp.transformer_impl"
PATCHES: Mapping[str, Patch] = {
    # -- In the process of verl's trainer, from the creation of the manager on (patch_trainer):
    # verl divides rows among GPUs by length alone, whatever trainer.balance_batch is, and so each group among all.
    "trainer_base.PPOTrainer._balance_batch": Patch(_TRAINER, "6036c24b205d"),
    # During _balance_batch: its order is replaced afterwards, and computing it takes time for each row.
    "trainer_base.get_seqlen_balanced_partitions": Patch(
        _TRAINER, "f8f2c027ffb6", "verl/utils/seqlen_balancing.py:get_seqlen_balanced_partitions"
    ),
    # With bypass_mode it reads a column and writes it under another name, which our rows have from the start.
    "trainer_base.PPOTrainer._compute_old_log_prob": Patch(_TRAINER, "47e705af8fb4"),
    # It reads six columns to compute advantages, which our rows have from the start.
    "trainer_base.PPOTrainer._compute_advantage": Patch(_TRAINER, "723b42cbdaf4"),
    # During _compute_advantage, which also measures how far sampler and trainer differ: ours returns the rows' own.
    "trainer_base.compute_advantage_for_multi_trajectories": Patch(
        _TRAINER, "46c7a2240d72", "verl/trainer/ppo/v1/utils.py:compute_advantage_for_multi_trajectories"
    ),
    # A row of padding copies the columns of another, and ours with a value per token then have the wrong length.
    "padding_utils.construct_minimal_padding_template": Patch("verl.trainer.ppo.padding_utils", "8da2149e76c4"),
    # -- In verl's workers, during a mini-batch (shared_prefixes.engine):
    # It copies a mini-batch row by row, also where that is the whole batch in its order.
    "tensordict_utils.index_select_tensor_dict": Patch("verl.utils.tensordict_utils", "64f3112457ed"),
    # It divides rows by length; ours keeps common prefixes together, and leaves out rows without a gradient.
    "transformer_impl.prepare_micro_batches": Patch(
        _ENGINE, "786b212905c6", "verl/workers/engine/utils.py:prepare_micro_batches"
    ),
    # It computes logits for every token; ours for those with a loss, and within the grammar of a reply.
    "torch_functional.FusedLinearForPPO": Patch("verl.utils.experimental.torch_functional", "79a8adf00701"),
    # It slices row by row, and the GPU stops for each row.
    "losses.no_padding_2_padding": Patch(
        "verl.workers.utils.losses", "c37d19e7d9c3", "verl/workers/utils/padding.py:no_padding_2_padding"
    ),
    # -- In the process that starts the run, around Ray's start (ray_job):
    # verl calls it; what follows puts the run's keys where its processes find them, and not into runtime_env.
    "ray.init": Patch("ray", "", "ray/_private/worker.py:init"),
    # The first job of each Ray has number 1, and verl names the socket for the weights in /tmp after it
    # (verl/workers/rollout/vllm_rollout/vllm_rollout.py): two runs on one host would wait for each other.
    "state.next_job_id": Patch("ray._private.state", "9b7e6485a183"),
    # -- In vLLM's workers, in runs with LoRA (lora_workers):
    # verl reads adapters with this method, which vLLM 0.24 does not need and vLLM 0.31 has under another name.
    "utils.WeightsMapper.get_unstacked_mapper": Patch("vllm.model_executor.models.utils", ""),
}
"""What is replaced, and before each entry why."""
EXTENDED: Mapping[str, str] = {
    "verl/trainer/main_ppo.py:TaskRunnerV1.run": "ffed4efa9d54",
    "verl/trainer/ppo/v1/replay_buffer.py:ReplayBuffer.sample": "93761c3e79ef",
    "verl/trainer/ppo/v1/replay_buffer.py:ReplayBuffer._wait_for_next_poll": "2a2b9e7c1cb9",
    "verl/workers/engine/fsdp/transformer_impl.py:FSDPEngine.forward_backward_batch": "5e839f106665",
    "verl/workers/engine/fsdp/transformer_impl.py:FSDPEngine.get_per_tensor_param": "d5eab48fadf1",
    "verl/workers/engine/fsdp/transformer_impl.py:FSDPEngineWithLMHead.forward_step": "d2fa75d4cdf9",
    "verl/workers/engine/fsdp/transformer_impl.py:FSDPEngineWithLMHead.prepare_model_inputs": "2652efd0aee1",
    "verl/workers/engine/fsdp/transformer_impl.py:FSDPEngineWithLMHead.prepare_model_outputs": "384ab09aab7b",
    "verl/workers/rollout/llm_server.py:LLMServerClient._acquire_server": "c349eb1ca92b",
    "verl/workers/rollout/llm_server.py:LLMServerClient._release_server": "48e478734cf6",
    "verl/workers/rollout/router.py:GlobalRequestLoadBalancer.acquire_server": "d5735874a960",
}
"""Methods that subclasses override or call, and the digests of their sources."""


def patch(name: str, wrap: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace ``name``, one of :data:`PATCHES`, by what ``wrap`` makes of it. The result puts it back."""
    classes, _, attribute = name.partition(".")[2].rpartition(".")
    owner = pkgutil.resolve_name(f"{PATCHES[name].module}:{classes}")
    original = getattr(owner, attribute, None)  # another vLLM may not have it
    setattr(owner, attribute, wrap(original))
    return lambda: setattr(owner, attribute, original)


@contextmanager
def patched(name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """:func:`patch` inside of the block."""
    undo = patch(name, wrap)
    try:
        yield
    finally:
        undo()


def changed_functions() -> list[str]:
    """The functions of both lists whose source is not that of the versions that this project was made for."""
    sources = {source_of(name): entry.digest for name, entry in PATCHES.items() if entry.digest} | dict(EXTENDED)
    return [source for source, digest in sources.items() if source_digest(source) != digest]


def source_of(name: str) -> str:
    """Where the source of one of :data:`PATCHES` is, as ``FILE:NAME``."""
    entry = PATCHES[name]
    return entry.source or f"{entry.module.replace('.', '/')}.py:{name.partition('.')[2]}"


def source_digest(source: str) -> str:
    """The digest of a source, given as ``FILE:NAME``; "" if there is none. Nothing is imported."""
    file, _, name = source.partition(":")
    package, _, rest = file.partition("/")
    spec = importlib.util.find_spec(package)
    path = Path(next(iter((spec and spec.submodule_search_locations) or [""]))) / rest
    text = path.read_text() if path.is_file() else ""
    node: Any = ast.parse(text)
    for part in name.split("."):
        node = next((inner for inner in getattr(node, "body", ()) if getattr(inner, "name", "") == part), None)
    if node is None:
        return ""
    first = min(line.lineno for line in [node, *node.decorator_list])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    return hashlib.sha256("\n".join(line.rstrip() for line in lines).encode()).hexdigest()[:12]


# -- What vLLM's workers do.


def patch_vllm() -> None:
    """vLLM in this process reads verl's LoRA adapters from now on."""
    from vllm.model_executor.models.utils import WeightsMapper

    if renames := getattr(WeightsMapper, "get_rename_mapper", None):
        patch("utils.WeightsMapper.get_unstacked_mapper", lambda _: renames)


# -- What verl's trainer does in its own process. ``verls`` is the function of verl's that is replaced.


def patch_trainer(*, own_engine: bool, shared_prefixes: bool) -> None:
    """verl's trainer in this process takes old log-probabilities and advantages from the rows from now on.

    Its workers read only the columns that they use (:data:`.READ_COLUMNS`). With ``own_engine`` their engine is
    :mod:`.shared_prefixes.engine`; if it has ``shared_prefixes``, rows are divided among GPUs by :func:`.divide_rows`.
    """

    def method(function: Callable[..., Any], *arguments: Any) -> Callable[[Any], Any]:
        return lambda verls: partialmethod(function, verls, *arguments)

    patch("trainer_base.PPOTrainer._compute_old_log_prob", method(_old_log_prob_of_rows, own_engine))
    patch("trainer_base.PPOTrainer._compute_advantage", method(_advantage_of_rows, own_engine))
    patch("padding_utils.construct_minimal_padding_template", lambda verls: partial(_short_padding, verls))
    if shared_prefixes:
        patch("trainer_base.PPOTrainer._balance_batch", method(_groups_together))


def _limit_columns(batch: Any, config: Any, derived: bool) -> None:
    from verl.trainer.ppo.utils import need_critic

    if not need_critic(config):  # a critic reads all columns
        batch.fields = [*READ_COLUMNS, *(() if derived else DERIVED_COLUMNS)]


def _bypasses(config: Any) -> bool:
    """Whether the sampler's log-probabilities are the old ones in this step."""
    correction = config.algorithm.get("rollout_correction")
    return bool(correction and correction.get("bypass_mode"))


def _old_log_prob_of_rows(
    trainer: Any, verls: Callable[..., Any], derived: bool, batch: Any, metrics: dict[str, Any]
) -> Any:
    _limit_columns(batch, trainer.config, derived)
    return batch if _bypasses(trainer.config) else verls(trainer, batch, metrics)


def _advantage_of_rows(
    trainer: Any, verls: Callable[..., Any], derived: bool, batch: Any, metrics: dict[str, Any]
) -> Any:
    """verl's also measures how far sampler and trainer differ, so it runs after a pass for log-probabilities."""
    if trainer.config.algorithm.adv_estimator != OWN_ESTIMATOR:
        return verls(trainer, batch, metrics)
    if _bypasses(trainer.config):
        return batch
    import transfer_queue

    rows = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages"])
    advantages = rows["advantages"].to_padded_tensor(0.0)

    def of_rows(data: Any, **_: Any) -> Any:
        """Those of the rows, float32 [rows, tokens], without the tokens that verl has rejected."""
        data.batch["advantages"] = data.batch["returns"] = advantages * data.batch["response_mask"]
        return data

    with patched("trainer_base.compute_advantage_for_multi_trajectories", lambda _: of_rows):
        batch = verls(trainer, batch, metrics)
    _limit_columns(batch, trainer.config, derived)
    return batch


def _short_padding(verls: Callable[..., Any], *arguments: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row of one token without a loss."""
    import torch

    row, tag = verls(*arguments)
    row.update({name: torch.zeros(1) for name in PADDED_COLUMNS if name in row})
    row[GRAMMARS] = ""
    return row, tag


def _groups_together(
    trainer: Any,
    verls: Callable[..., Any],
    batch: Any,
    metrics: dict[str, Any],
    logging_prefix: str = "global_seqlen",
    **options: Any,
) -> Any:
    """verl's, which first adds the rows of padding, with another order of the rows."""
    from verl.utils.seqlen_balancing import log_seqlen_unbalance

    with patched("trainer_base.get_seqlen_balanced_partitions", lambda _: _in_order):
        batch = verls(trainer, batch, metrics, logging_prefix, **options)
    ranks = max(trainer.actor_rollout_wg._dispatch_info["actor"]) + 1
    if ranks > 1:
        rows_of_ranks = divide_rows(batch.keys, batch.tags, ranks)
        lengths = [tag["seq_len"] for tag in batch.tags]
        metrics.update(log_seqlen_unbalance(lengths, rows_of_ranks, logging_prefix))
        batch.reorder([row for rows in rows_of_ranks for row in rows])
    return batch


def _in_order(costs: Sequence[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Parts of equal size, with the rows in their order."""
    size = len(costs) // k_partitions
    return [list(range(start, start + size)) for start in range(0, k_partitions * size, size)]
