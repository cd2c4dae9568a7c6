"""verl's actor and reference policy compute a prefix once for all rows that begin with it.

This engine divides a mini-batch so that rows with a long common prefix are in one micro-batch, keeps each shared token
once (:mod:`.tree`), and returns log-probabilities and entropies of all tokens, so verl's losses and metrics are
unchanged. Shared are only tokens before a row's first trained one. Logits are computed only for tokens with a loss; the
log-probabilities and entropies of others are 0, and verl masks them. An update leaves out rows that have no gradient.

verl imports this module in its workers (``actor_rollout_ref.model.external_lib``) before it looks up its engine, and
takes this one because ``VERL_ENGINE_VENDOR`` is :data:`~groundwire.train.config.verl_names.ENGINE_VENDOR` there. Where
the settings do not allow it (padded rows, no fused kernels, sequence parallelism, images), it computes as verl's own.

On one GPU with FSDP 1 (verl's default) a mini-batch that runs out of memory is computed again in micro-batches of half
as many tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import fsdp_version
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils import losses

from groundwire.tools.startup import freeze_objects
from groundwire.train.config.verl_names import ENGINE_VENDOR
from groundwire.train.policy.attention import VARLEN, tree_block_mask
from groundwire.train.verl.patches import patched
from groundwire.train.verl.rows import add_derived_columns
from groundwire.train.verl.shared_prefixes.tree import PrefixTree, micro_batches, prefix_tree

_log = logging.getLogger(__name__)
_LIMIT = "max_token_len_per_gpu"
_KEPT = "groundwire_kept"
"""The field of a micro-batch with its :class:`_Kept`."""
_LOSSES = ("vanilla", "gspo")
"""Policy losses in which a row with advantages of 0 adds nothing, and does not change what others add."""
_ALL_ROWS = ("calculate_entropy", "return_model_output")
"""Settings of a mini-batch that need every row: a mean of its tokens, and results in its order."""
_OTHER_OUTPUTS = ("distillation_use_topk", "distillation_only", "calculate_sum_pi_squared")


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor=ENGINE_VENDOR)
class SharedPrefixesEngine(transformer_impl.FSDPEngineWithLMHead):
    """``data`` and ``micro_batch`` are verl's: ``input_ids`` int64 [N, tokens], ``loss_mask`` [N, reply], jagged."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._used = torch.empty(0, dtype=torch.long)
        """The :attr:`_Kept.used` of the micro-batch that is computed."""
        self._most_tokens: dict[bool, int] = {}
        """Tokens of a micro-batch that fit, after others did not: of passes without (True) and with gradients."""

    def initialize(self) -> None:
        """As verl's. Otherwise each garbage collection looks at all imported modules, while rows arrive."""
        super().initialize()
        freeze_objects()

    @contextmanager
    def train_mode(self, **options: Any) -> Iterator[None]:
        """As verl's, in which a mini-batch of all rows is not copied row by row."""
        with (
            super().train_mode(**options),
            patched("tensordict_utils.index_select_tensor_dict", lambda verls: partial(_all_rows_at_once, verls)),
        ):
            yield

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """As verl's, with other micro-batches; results are in the order of ``data``.

        Raises:
            torch.OutOfMemoryError: a micro-batch of one row is too large, other GPUs wait for this one, or FSDP 2 keeps
                gradients of the failed pass, which only its private attributes could clear.
        """
        add_derived_columns(data)
        if not _setting(data, "use_dynamic_bsz", True):
            return super().forward_backward_batch(data, loss_function, forward_only)
        longest, shares = max(map(len, _rows(data["input_ids"]))), self._shares(data)
        trained = _rows_with_gradient(data, loss_function) if shares and not forward_only else None
        prepare = partial(_prepare_micro_batches, trained=trained)
        while True:
            limit = min(data[_LIMIT], self._most_tokens.get(forward_only, data[_LIMIT]))
            tensordict_utils.assign_non_tensor(data, **{_LIMIT: limit})
            try:
                with ExitStack() as stack:
                    if shares:  # verl takes our micro-batches and our output layer
                        stack.enter_context(patched("transformer_impl.prepare_micro_batches", lambda _: prepare))
                        stack.enter_context(patched("torch_functional.FusedLinearForPPO", self._of_used_tokens))
                        stack.enter_context(patched("losses.no_padding_2_padding", lambda _: _padded_replies))
                    return super().forward_backward_batch(data, loss_function, forward_only)
            except torch.OutOfMemoryError:
                cleared = forward_only or self.engine_config.strategy == "fsdp"
                if limit <= longest or torch.distributed.get_world_size() > 1 or not cleared:
                    raise
            # Here and not in the handler, because the error's traceback keeps the tensors.
            if not forward_only:
                self.optimizer_zero_grad()
            torch.cuda.empty_cache()
            self._most_tokens[forward_only] = max(longest, limit // 2)
            _log.warning(
                "a micro-batch of %d tokens ran out of memory: going on with %s_max_token_len_per_gpu=%d",
                limit,
                "log_prob" if forward_only else "ppo",
                self._most_tokens[forward_only],
            )

    def get_per_tensor_param(self, **options: Any) -> tuple[Iterator[tuple[str, Tensor]], Any]:
        """As verl's: all weights for the inference server. On several GPUs with FSDP 1 each layer is gathered once."""
        model: Any = getattr(self.module, "_fsdp_wrapped_module", self.module)
        as_verl = (
            fsdp_version(self.module) != 1
            or torch.distributed.get_world_size() == 1
            or hasattr(model, "peft_config")
            or self._is_offload_param
            or self._qat_enabled
            # A checkpoint has tensors that are no parameters.
            or any(set(part._buffers) - part._non_persistent_buffers_set for part in model.modules())
        )
        if as_verl:
            return super().get_per_tensor_param(**options)
        units = _full_weights(self.module)
        return (pair for unit in units for pair in transformer_impl.convert_weight_keys(unit, model).items()), None

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """As verl's, of the kept tokens: ids, positions and labels int64 [1, U], and a block mask."""
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        if (kept := _setting(micro_batch, _KEPT, None)) is not None:
            device = inputs["input_ids"].device
            tree = PrefixTree(*(tensor.to(device) for tensor in kept.tree))
            for name in ("input_ids", "position_ids", "shift_labels"):
                inputs[name] = inputs[name][:, tree.keep]
            inputs["attention_mask"] = tree_block_mask(tree.end[None], inputs["position_ids"])
            output_args["expand"], self._used = tree.expand, kept.used.to(device)
        return inputs, output_args

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """As verl's, of all tokens: those of the kept ones are repeated."""
        if (expand := output_args.get("expand")) is not None:
            for name in ("log_probs", "entropy"):
                output[name] = output[name].index_select(1, expand)
        return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)

    def _of_used_tokens(self, fused_linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
        """verl's output layer, which returns log-probabilities and entropies, for the tokens that have a loss."""
        engine = self

        class UsedTokens(fused_linear):
            def forward(
                self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
            ) -> tuple[Tensor, Tensor]:
                """``hidden_states`` [1, U, hidden], ``input_ids`` the labels, int64 [1, U]; returns two of [1, U]."""
                used = engine._used
                values = super().forward(hidden_states[0, used], vocab_weights, input_ids[0, used], temperature)
                log_probs, entropy = (
                    value.new_zeros(input_ids.shape).index_copy(1, used, value[None]) for value in values
                )
                return log_probs, entropy

        return UsedTokens

    def _shares(self, data: Any) -> bool:
        model = self.model_config.hf_config
        return (
            model._attn_implementation == VARLEN
            and not hasattr(model, "vision_config")
            and not self.use_ulysses_sp
            and not self.pad_to_length
            and _setting(data, "use_remove_padding", True)
            and _setting(data, "use_fused_kernels")
            and not any(_setting(data, name) for name in _OTHER_OUTPUTS)
            and data["loss_mask"].is_nested
        )


def _setting(data: Any, name: str, default: Any = False) -> Any:
    return tensordict_utils.get_non_tensor_data(data, name, default)


class _Kept(NamedTuple):
    """What a micro-batch computes of its rows' tokens; on the CPU, before the first pass waits for the GPU."""

    tree: PrefixTree
    used: Tensor
    """int64 [K]: the kept tokens whose next one has a loss; the first token if there is none, for a gradient of 0"""


def _prepare_micro_batches(
    data: Any, dp_group: Any, *, trained: Sequence[int] | None = None, **_: Any
) -> tuple[_MicroBatches, list[list[int]]]:
    """verl's function of this name: micro-batches, and the rows in each. All ranks have the same number of both.

    With ``trained``, the rows that have a gradient, others are computed only so that no micro-batch is empty.
    """
    prompts, masks, lengths = _prompts_masks_and_lengths(data)
    rows = list(range(len(lengths))) if trained is None else list(trained) or [0]

    def divided(least: int = 1) -> list[list[int]]:
        batches = micro_batches([prompts[row] for row in rows], [lengths[row] for row in rows], data[_LIMIT], least)
        return [[rows[index] for index in batch] for batch in batches]

    batches = divided()
    number = torch.tensor(len(batches), device=get_device_name())
    torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX, group=dp_group)
    if int(number) > len(batches):
        others = sorted(set(range(len(lengths))).difference(rows))
        rows += others[: max(0, int(number) - len(rows))]
        batches = divided(int(number))
    return _MicroBatches(data, batches, (prompts, masks, lengths)), batches


@dataclass(frozen=True)
class _MicroBatches(Sized):
    """The rows of ``data`` in each batch, without what is no tensor, such as names.

    verl's own function divides all rows of each field again for each batch, and copies the names one by one. A
    micro-batch is made when verl asks for it: on a GPU, while the one before is computed.
    """

    data: Any
    batches: list[list[int]]
    of_rows: tuple[list[Tensor], list[Tensor], list[int]]
    """:func:`_prompts_masks_and_lengths` of the data."""

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        tensors = {name: value for name, value in self.data.items() if isinstance(value, Tensor)}
        rows = {name: _rows(value) for name, value in tensors.items() if value.is_nested}
        settings = {name: value.data for name, value in self.data.items() if isinstance(value, NonTensorData)}
        for batch in self.batches:
            fields: dict[str, Any] = {name: NonTensorData(value) for name, value in settings.items()}
            for name, value in tensors.items():
                fields[name] = _nested([rows[name][row] for row in batch]) if name in rows else value[batch]
            fields[_KEPT] = NonTensorData(_kept(*([values[row] for row in batch] for values in self.of_rows)))
            yield TensorDict(fields, batch_size=len(batch))


def _kept(prompts: list[Tensor], masks: list[Tensor], lengths: list[int]) -> _Kept:
    tree = prefix_tree(prompts, lengths)
    # A reply's mask is at the end of its row, and the token before has the label.
    positions = zip(torch.tensor(lengths).cumsum(0).tolist(), masks, strict=True)
    used = torch.cat([torch.nonzero(mask)[:, 0] + (end - len(mask) - 1) for end, mask in positions])
    return _Kept(tree, tree.expand[used if len(used) else torch.zeros(1, dtype=torch.long)])


def _padded_replies(values: Tensor, data: Any) -> Tensor:
    """verl's function: ``values`` of each row's reply, [rows, longest reply], of jagged ``values`` [rows, tokens].

    A reply's values are at the positions before it.
    """
    lengths = data["responses"].offsets().diff()
    ends = (data["prompts"].offsets() + data["responses"].offsets())[1:]
    position = torch.arange(int(lengths.max()), device=lengths.device)
    index = ((ends - lengths - 1)[:, None] + position).clamp(max=values.values().shape[0] - 1)
    replies = values.values().index_select(0, index.flatten()).view(index.shape)
    return replies.where(position < lengths[:, None], 0.0)


def _all_rows_at_once(verls: Callable[..., Any], batch: Any, rows: Sequence[Any]) -> Any:
    """verl's selection of rows, which shares the tensors if all rows are selected in their order."""
    if list(map(int, rows)) != list(range(len(batch))):
        return verls(batch, rows)
    return TensorDict(dict(batch.items()), batch_size=len(batch))  # copy() would also copy the names one by one


def _rows_with_gradient(data: Any, loss_function: Any) -> list[int] | None:
    """The rows with a nonzero advantage, if the loss of the others has no gradient; None if it may have one.

    A group of equal rewards has advantages of 0. The loss is divided by the tokens or rows of the whole mini-batch,
    which verl counts before, so it is the same without these rows.
    """
    config = getattr(loss_function, "keywords", {}).get("config")
    if getattr(loss_function, "func", None) is not losses.ppo_loss or config is None or config.use_kl_loss:
        return None
    every_row = "advantages" not in data or any(_setting(data, name) for name in _ALL_ROWS)
    if every_row or config.policy_loss.get("loss_mode", "vanilla") not in _LOSSES:
        return None
    weighted = data["advantages"].values() * data["loss_mask"].values()
    row_of_token = torch.arange(len(data)).repeat_interleave(data["loss_mask"].offsets().diff().cpu())
    return row_of_token[torch.nonzero(weighted)[:, 0].cpu()].unique().tolist()


def _prompts_masks_and_lengths(data: Any) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """The ids before each row's first trained token, the mask of its reply (int64, on the CPU), and its tokens."""
    rows, masks = _rows(data["input_ids"].cpu()), list(_rows(data["loss_mask"].cpu()))
    prompts = []
    for ids, mask in zip(rows, masks, strict=True):
        trained = torch.nonzero(mask)  # verl's mask is of the reply, at the end of the row
        prompts.append(ids[: len(ids) - len(mask) + int(trained[0]) if len(trained) else len(ids)])
    return prompts, masks, list(map(len, rows))


def _full_weights(module: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The parameters of each unit of an FSDP 1 model by their names in the model; all ranks must iterate.

    verl gathers each layer, divides it again, and then gathers each of its tensors alone. A unit's tensors are freed
    when the next one is asked for. Their dtype is that of the optimizer's weights.
    """
    # The outermost unit is first: FSDP makes the first unit that it gathers the root of the others.
    modules = ((_unwrapped(name), unit) for name, unit in module.named_modules())
    units = {name: unit for name, unit in modules if isinstance(unit, FullyShardedDataParallel)}
    for prefix, unit in units.items():
        inner = tuple(f"{other}." for other in units if len(other) > len(prefix))
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            parameters = unit.named_parameters(prefix=prefix, remove_duplicate=False)
            own = ((_unwrapped(name), parameter) for name, parameter in parameters)
            yield {name: parameter.detach() for name, parameter in own if not name.startswith(inner)}


def _unwrapped(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def _nested(rows: list[Tensor]) -> Tensor:
    """A jagged tensor of ``rows``. torch's function for lists checks each of them in Python."""
    lengths = [len(row) for row in rows]
    offsets = torch.tensor([0, *lengths], device=rows[0].device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(rows), offsets, min_seqlen=min(lengths), max_seqlen=max(lengths)
    )


def _rows(nested: Tensor) -> tuple[Tensor, ...]:
    """A jagged tensor's rows. Its own ``unbind`` checks each row in Python."""
    return nested.values().split(nested.offsets().diff().tolist())
