"""verl's actor and reference policy compute a prefix once for all rows that begin with it.

This engine divides a mini-batch so that rows with a long common prefix are in one micro-batch, keeps each shared token
once (:mod:`.tree`), and returns log-probabilities and entropies of all tokens, so verl's losses and metrics are
unchanged. Shared are only tokens before a row's first trained one. Logits are computed only for tokens with a loss; the
log-probabilities and entropies of others are 0, and verl masks them. An update leaves out rows that have no gradient.
Those of a reply to a grammar are over the tokens that it allows, as vLLM has sampled them.

verl imports this module in its workers (``actor_rollout_ref.model.external_lib``) before it looks up its engine, and
takes this one because ``VERL_ENGINE_VENDOR`` is :data:`~groundwire.train.config.verl_names.ENGINE_VENDOR` there. Where
the settings do not allow it (padded rows, no fused kernels, sequence parallelism, images), it computes as verl's own,
but for replies to a grammar.

On one GPU with FSDP 1 (verl's default) a mini-batch that runs out of memory is computed again in micro-batches of half
as many tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import AutoTokenizer
from verl.utils import tensordict_utils
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import fsdp_version
from verl.utils.metric import Metric
from verl.utils.ulysses import ulysses_pad_and_slice_inputs
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils import losses

from groundwire.tools.startup import freeze_objects
from groundwire.train.algorithms.speed import ModelCost, Span
from groundwire.train.algorithms.token_logprobs import token_logprobs
from groundwire.train.config.verl_names import COMPUTED, ENGINE_VENDOR, TRAINING_GPUS, UPDATE_FLOPS
from groundwire.train.policy.attention import VARLEN, tree_block_mask
from groundwire.train.policy.constraint import Constraints, unpack_masks
from groundwire.train.verl.patches import patched
from groundwire.train.verl.rows import GRAMMARS, add_derived_columns
from groundwire.train.verl.shared_prefixes.tree import PrefixTree, micro_batches, prefix_tree

_log = logging.getLogger(__name__)
_LIMIT = "max_token_len_per_gpu"
_KEPT = "groundwire_kept"  # the field of a micro-batch with its :class:`_Kept`
_LOSSES = ("vanilla", "gspo")  # to these a row with advantages of 0 adds nothing, nor changes what others add
_ALL_ROWS = ("calculate_entropy", "return_model_output")  # need every row: a mean of its tokens, results in its order
_OTHER_OUTPUTS = ("distillation_use_topk", "distillation_only", "calculate_sum_pi_squared")


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor=ENGINE_VENDOR)
class SharedPrefixesEngine(transformer_impl.FSDPEngineWithLMHead):
    """``data`` and ``micro_batch`` are verl's: ``input_ids`` int64 [N, tokens], ``loss_mask`` [N, reply], jagged."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._used: Tensor | None = None
        """The :attr:`_Kept.used` of the micro-batch that is computed; None if all of its tokens are."""
        self._constrained: _Constrained | None = None  # that of the micro-batch that is computed
        self._passes: list[list[tuple[list[Span], int]]] = []
        """Of each mini-batch of an update: the tokens of its passes, and how many of them have logits."""
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
        if forward_only:
            return self._forward_backward(data, loss_function, forward_only)
        self._passes.append([])
        result = self._forward_backward(data, loss_function, forward_only)
        result["metrics"] |= self._cost_of_update(last=_setting(data, "update_lr_scheduler"))
        return result

    def _forward_backward(self, data: Any, loss_function: Any, forward_only: bool) -> Any:
        if not _setting(data, "use_dynamic_bsz", True):
            return super().forward_backward_batch(data, loss_function, forward_only)
        longest, shares = max(map(len, _rows(data["input_ids"]))), self._shares(data)
        trained = _rows_with_gradient(data, loss_function) if shares and not forward_only else None
        prepare = partial(_prepare_micro_batches, trained=trained, constrain=self._constrain)
        while True:
            limit = min(data[_LIMIT], self._most_tokens.get(forward_only, data[_LIMIT]))
            tensordict_utils.assign_non_tensor(data, **{_LIMIT: limit})
            if not forward_only:
                self._passes[-1].clear()
            try:
                with ExitStack() as stack:
                    if shares:  # verl takes our micro-batches
                        stack.enter_context(patched("transformer_impl.prepare_micro_batches", lambda _: prepare))
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

    def _cost_of_update(self, *, last: bool) -> dict[str, Any]:
        """Metrics of a mini-batch. verl takes the mean of those of an update, so all is in the ``last`` one's."""
        if (cost := self._model_cost) is None:
            return {}
        passes = list(chain.from_iterable(self._passes))
        groups = torch.distributed.get_world_size(self.get_data_parallel_group())  # it takes the mean over them, too
        times = last * len(self._passes) * groups
        if last:
            self._passes.clear()
        return {
            COMPUTED: Metric("sum", times * sum(end - start for spans, _ in passes for start, end in spans)),
            UPDATE_FLOPS: Metric("sum", times * sum(cost.update(*of_pass) for of_pass in passes)),
            TRAINING_GPUS: [torch.distributed.get_world_size()],
        }

    @cached_property
    def _model_cost(self) -> ModelCost | None:
        return ModelCost.without_weights(self.model_config.hf_config, frozen=self.model_config.lora_rank > 0)

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

    def forward_step(self, *arguments: Any, **options: Any) -> Any:
        """As verl's, with our output layer."""
        with patched("torch_functional.FusedLinearForPPO", self._output_layer):
            return super().forward_step(*arguments, **options)

    def prepare_model_inputs(self, micro_batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """As verl's, of the kept tokens: ids, positions and labels int64 [1, U], and a block mask."""
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        device = inputs["input_ids"].device
        if (kept := _setting(micro_batch, _KEPT, None)) is None:
            self._used, constrained = None, self._constrain(*_ids_masks_and_grammars(micro_batch))
            lengths = micro_batch["input_ids"].offsets().diff().tolist()
            computed = [(0, length) for length in lengths], sum(lengths)
            self._constrained = constrained and self._placed(constrained, micro_batch, inputs["input_ids"])
        else:
            tree = PrefixTree(*(tensor.to(device) for tensor in kept.tree))
            for name in ("input_ids", "position_ids", "shift_labels"):
                inputs[name] = inputs[name][:, tree.keep]
            inputs["attention_mask"] = tree_block_mask(tree.end[None], inputs["position_ids"])
            output_args["expand"], self._used = tree.expand, kept.used.to(device)
            self._constrained = kept.constrained
            computed = kept.spans, len(kept.used) + (len(self._constrained.places) if self._constrained else 0)
        if self._constrained:
            self._constrained = _Constrained(self._constrained.places.to(device), self._constrained.masks)
        if torch.is_grad_enabled():
            self._passes[-1].append(computed)
        return inputs, output_args

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """As verl's, of all tokens: those of the kept ones are repeated."""
        if (expand := output_args.get("expand")) is not None:
            for name in ("log_probs", "entropy"):
                output[name] = output[name].index_select(1, expand)
        elif self._constrained and not _setting(micro_batch, "use_fused_kernels"):
            logits = output.logits.view(-1, output.logits.shape[-1])
            chosen = logits[self._constrained.places]
            allowed = unpack_masks(self._constrained.masks.to(logits.device), logits.shape[1])
            # Finite, because verl's entropy multiplies it by a probability of 0.
            logits.index_copy_(0, self._constrained.places, chosen.masked_fill(~allowed, -1e4))
        return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)

    def _output_layer(self, fused_linear: type[torch.nn.Module]) -> type[torch.nn.Module]:
        """verl's output layer, for the tokens that have a loss. Replies to a grammar have the local trainer's."""
        engine = self

        class OutputLayer(fused_linear):
            def forward(
                self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
            ) -> tuple[Tensor, ...]:
                """``hidden_states`` [N, T, hidden], ``input_ids`` the labels, int64 [N, T]; returns two of [N, T]."""
                used, constrained = engine._used, engine._constrained
                hidden, labels = hidden_states.flatten(0, 1), input_ids.flatten()
                values = (hidden.new_zeros(len(hidden), dtype=torch.float32),) * 2
                if used is None:
                    values = super().forward(hidden, vocab_weights, labels, temperature)
                elif len(used):
                    found = super().forward(hidden[used], vocab_weights, labels[used], temperature)
                    values = _replaced(values, used, found)
                if constrained:
                    places = constrained.places
                    head: Any = partial(nn.functional.linear, weight=vocab_weights)
                    head.out_features = len(vocab_weights)
                    found = token_logprobs(
                        head,
                        hidden[places],
                        labels[places],
                        temperature=temperature,
                        masks=constrained.masks,
                        entropy_gradient=True,
                    )
                    values = _replaced(values, places, found)
                return tuple(value.view(input_ids.shape) for value in values)

        return OutputLayer

    @cached_property
    def _constraints(self) -> Constraints:
        model = self.model_config
        path = model.local_tokenizer_path or model.local_path
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
        return Constraints(self.module, tokenizer, by_vllm=True)

    def _constrain(
        self, ids: Sequence[Tensor], masks: Sequence[Tensor], grammars: Sequence[str]
    ) -> _Constrained | None:
        """What the ``grammars`` of these rows allow; None without one that a loss needs."""
        places, allowed, end = list[Tensor](), list[Tensor](), 0
        for row, mask, text in zip(ids, masks, grammars, strict=True):
            end += len(row)
            reply = row[len(row) - len(mask) :]
            for start, stop, grammar in json.loads(text or "[]"):
                if mask[start:stop].any():  # verl may have rejected the row
                    places.append(torch.arange(start, stop) + (end - len(mask) - 1))  # the token before has the label
                    allowed.append(self._constraints.replay(grammar, reply[start:stop].tolist()))
        return _Constrained(torch.cat(places), torch.cat(allowed)) if places else None

    def _placed(self, constrained: _Constrained, micro_batch: Any, inputs: Tensor) -> _Constrained:
        """With places in the ``inputs`` of the model, which may be padded or a part for one of several GPUs."""
        places, masks = constrained
        offsets = micro_batch["input_ids"].offsets().cpu()
        if not _setting(micro_batch, "use_remove_padding", True):
            rows = torch.searchsorted(offsets, places, right=True) - 1
            return _Constrained(places - offsets[rows] + rows * inputs.shape[1], masks)
        if self.use_ulysses_sp:
            numbers = torch.zeros(1, int(offsets[-1]), dtype=torch.long)
            numbers[0, places] = torch.arange(1, len(places) + 1)
            own = ulysses_pad_and_slice_inputs(numbers, sp_size=self.ulysses_sequence_parallel_size)[0][0]
            places = torch.nonzero(own)[:, 0]
            return _Constrained(places, masks[own[places] - 1])
        return constrained

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


class _Constrained(NamedTuple):
    """The tokens of a micro-batch that a grammar has constrained, and what it allowed; on the CPU."""

    places: Tensor  # int64 [K]: the tokens before, whose logits choose them, in a micro-batch without padding
    masks: Tensor  # uint8 [K, bytes], for :func:`.unpack_masks`


class _Kept(NamedTuple):
    """What a micro-batch computes of its rows' tokens; on the CPU, before the first pass waits for the GPU."""

    tree: PrefixTree
    used: Tensor
    """int64 [K]: the kept tokens whose next one has a loss; the first token if there is none, for a gradient of 0"""
    constrained: _Constrained | None  # others, with places among the kept tokens
    spans: list[Span]  # the positions of the kept tokens of each row


def _prepare_micro_batches(
    data: Any,
    dp_group: Any,
    *,
    trained: Sequence[int] | None = None,
    constrain: Callable[..., _Constrained | None],
    **_: Any,
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
    return _MicroBatches(data, batches, (prompts, masks, lengths), constrain), batches


@dataclass(frozen=True)
class _MicroBatches(Sized):
    """The rows of ``data`` in each batch, without what is no tensor, such as names.

    verl's own function divides all rows of each field again for each batch, and copies the names one by one. A
    micro-batch is made when verl asks for it: on a GPU, while the one before is computed.
    """

    data: Any
    batches: list[list[int]]
    of_rows: tuple[list[Tensor], list[Tensor], list[int]]  # :func:`_prompts_masks_and_lengths` of the data
    constrain: Callable[..., _Constrained | None]  # of the engine; its thread is ahead of the passes

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        tensors = {name: value for name, value in self.data.items() if isinstance(value, Tensor)}
        rows = {name: _rows(value) for name, value in tensors.items() if value.is_nested}
        settings = {name: value.data for name, value in self.data.items() if isinstance(value, NonTensorData)}
        to_constrain = _ids_masks_and_grammars(self.data)

        def constrained(batch: list[int]) -> _Constrained | None:
            return self.constrain(*([values[row] for row in batch] for values in to_constrain))

        with ThreadPoolExecutor(1, thread_name_prefix="grammars") as thread:
            for batch, found in zip(self.batches, thread.map(constrained, self.batches), strict=True):
                fields: dict[str, Any] = {name: NonTensorData(value) for name, value in settings.items()}
                for name, value in tensors.items():
                    fields[name] = _nested([rows[name][row] for row in batch]) if name in rows else value[batch]
                prompts, masks, lengths = ([values[row] for row in batch] for values in self.of_rows)
                fields[_KEPT] = NonTensorData(_kept(prompts, masks, lengths, found))
                yield TensorDict(fields, batch_size=len(batch))


def _kept(prompts: list[Tensor], masks: list[Tensor], lengths: list[int], constrained: _Constrained | None) -> _Kept:
    tree = prefix_tree(prompts, lengths)
    # A reply's mask is at the end of its row, and the token before has the label.
    positions = zip(torch.tensor(lengths).cumsum(0).tolist(), masks, strict=True)
    used = torch.cat([torch.nonzero(mask)[:, 0] + (end - len(mask) - 1) for end, mask in positions])
    if constrained:
        used = used[~torch.isin(used, constrained.places)]
        constrained = _Constrained(tree.expand[constrained.places], constrained.masks)
    elif not len(used):
        used = torch.zeros(1, dtype=torch.long)
    kept = torch.searchsorted(tree.keep, torch.tensor([0, *lengths]).cumsum(0)).diff().tolist()
    spans = [(length - new, length) for length, new in zip(lengths, kept, strict=True)]
    return _Kept(tree, tree.expand[used], constrained, spans)


def _replaced(values: tuple[Tensor, ...], places: Tensor, others: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    pairs = zip(values, others, strict=True)
    return tuple(value.index_copy(0, places, other.to(value.dtype)) for value, other in pairs)


def _ids_masks_and_grammars(data: Any) -> tuple[Sequence[Tensor], Sequence[Tensor], list[str]]:
    """Of each row, on the CPU: its ids, the mask of its reply, and :attr:`.TrainingRow.grammars`."""
    grammars = tensordict_utils.get(data, GRAMMARS, "")
    # A TensorDict may have one value for all rows.
    of_rows = [grammars] * len(data) if isinstance(grammars, str) else list(grammars)
    return _rows(data["input_ids"].cpu()), _rows(data["loss_mask"].cpu()), of_rows


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
