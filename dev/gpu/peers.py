"""The update of one step beside TRL's and verl's: ``python -m dev.gpu.peers --json FILE``. Same rows, same weights.

A case 64x886+42 is 64 groups of 8 rollouts with prompts of about 886 tokens and replies of 42. With ``--spider``
prompts of 886 tokens are those of its questions, whose groups share beginnings, too; others are random. An update packs
rows, computes the loss and its gradient with recomputed activations and products in bfloat16, clips and steps AdamW:

  local        our local trainer
  verl shared  verl's worker with our engine, and verl's loss
  verl         verl's own: rows without padding (use_remove_padding), fused kernels, and verl's loss
  trl          AsyncGRPOTrainer of TRL: its planner, prefix trees, collator, loss and training loop

None has flash-attn, of which the package index has no wheel: verl and TRL get torch's own kernel (flash-attention 2),
TRL in the place of the flash-attention 3 that it loads from a model hub. Each system is a process of its own. A line of
JSON is printed when it is measured: ``seconds`` of each update after the first, tokens of all rows and trained tokens a
second, the peak of memory in GB. A case with more groups takes the number of tokens a pass that was faster with fewer.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import math
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from dev.gpu.collect import collect
from dev.gpu.random_model import llama_config
from dev.gpu.rank_tokens import spider_prompts
from dev.gpu.update import SHAPES
from groundwire.adapters.tracing import LLMCall
from groundwire.train.algorithms.credit import training_items
from groundwire.train.algorithms.speed import ModelCost, peak_flops
from groundwire.train.config.run_config import RunConfig
from groundwire.train.local.grpo import GRPO, GRPOConfig
from groundwire.train.policy import STARTER
from groundwire.train.policy.model import load_policy
from groundwire.train.store.rollout import Outcome, Rollout

__all__ = ["SYSTEMS", "Case", "measure_system", "save_model", "versions"]

SIZE, VOCABULARY = 8, 49152
SYSTEMS = ("local", "verl shared", "trl", "verl")
_CASE = re.compile(r"(\d+)x(\d+)\+(\d+)")
_OLD = -math.log(VOCABULARY)
"""The mean log-probability of the random weights."""
Group = tuple[list[int], list[list[int]]]
"""A prompt and its replies."""


class Case(NamedTuple):
    """Numbers of groups, and of tokens of a prompt (about) and of a reply."""

    groups: int
    prompt: int
    reply: int

    @classmethod
    def read(cls, text: str) -> Case:
        """Of text like 64x886+42. Raises ``ValueError``."""
        if (found := _CASE.fullmatch(text)) is None or "0" in found.groups():
            raise ValueError(f"{text!r} is not of the form 64x886+42: groups of 8, tokens of prompts and of replies")
        return cls(*map(int, found.groups()))

    def rows(self, prompts: Sequence[list[int]] = ()) -> list[Group]:
        """The groups, always the same, with random prompts where none are given."""
        rng = random.Random(0)

        def ids(count: int) -> list[int]:
            return [rng.randrange(100, VOCABULARY) for _ in range(count)]

        spread = self.prompt // 18
        chosen = [ids(self.prompt + rng.randint(-spread, spread)) for _ in range(self.groups)]
        chosen = list(prompts[: self.groups]) or chosen
        return [(prompt, [ids(self.reply) for _ in range(SIZE)]) for prompt in chosen]


def _timed(update: Callable[[], Any], repeats: int, cuda: bool) -> dict[str, Any]:
    """Figures of updates after a first one, which compiles kernels."""
    seconds = []
    for number in range(repeats + 1):
        if number == 1 and cuda:
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        update()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return _figures(seconds)


def _figures(seconds: Sequence[float]) -> dict[str, Any]:
    figures: dict[str, Any] = {"first_s": round(seconds[0], 3), "seconds": [round(each, 3) for each in seconds[1:]]}
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return figures | {"peak_gb": round(peak / 1e9, 1)}


def _local(folder: Path, device: str) -> Callable[..., dict[str, Any]]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    settings = {"minibatches": 1, "branches_per_row": sys.maxsize, "bf16": device == "cuda"}
    trainer = GRPO(model, GRPOConfig(**settings, gradient_checkpointing=True))  # type: ignore[arg-type]

    def measure(groups: list[Group], tokens: int, repeats: int) -> dict[str, Any]:
        rollouts = [
            Rollout(
                task={"id": str(number)},
                group=str(number),
                outcome=Outcome(reward=float(index % 2)),
                calls=[
                    LLMCall(
                        rollout_id="",
                        attempt_id="",
                        sequence=1,
                        prompt_ids=prompt,
                        response_ids=reply,
                        logprobs=[_OLD] * len(reply),
                    )
                ],
            )
            for number, (prompt, replies) in enumerate(groups)
            for index, reply in enumerate(replies)
        ]
        batch = training_items(rollouts, RunConfig(), least=0.0)
        trainer.config = GRPOConfig(**{**vars(trainer.config), "tokens_per_forward": tokens})
        figures = _timed(lambda: trainer.update(batch), repeats, device == "cuda")
        return figures | {"tokens": trainer.config.tokens_per_forward}

    return measure


def _verl(folder: Path, device: str, *, shared: bool) -> Callable[..., dict[str, Any]]:
    from verl.utils.tensordict_utils import get_tensordict
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    from dev.gpu.verl_update import new_engine

    if not torch.distributed.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        store = torch.distributed.FileStore(f"{folder}/store{shared}", 1)
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    engine = new_engine("shared prefixes" if shared else "verl", str(folder))
    config = FSDPActorConfig(strategy="fsdp", rollout_n=SIZE, ppo_micro_batch_size_per_gpu=1)
    loss = partial(ppo_loss, config=config)

    def nested(parts: Sequence[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)

    def measure(groups: list[Group], tokens: int, repeats: int) -> dict[str, Any]:
        pairs = [(torch.tensor(prompt), torch.tensor(reply)) for prompt, replies in groups for reply in replies]
        masks = [torch.ones_like(reply) for _, reply in pairs]
        advantages = [torch.full(reply.shape, float(number % 2) - 0.5) for number, (_, reply) in enumerate(pairs)]
        settings = {
            "use_remove_padding": True,
            "use_fused_kernels": True,
            "use_dynamic_bsz": True,
            "max_token_len_per_gpu": tokens,
            "temperature": 1.0,
            "calculate_entropy": False,
            "return_model_output": False,
            "global_batch_size": len(pairs),
        }

        def update() -> None:
            fields = {
                "input_ids": nested([torch.cat(pair) for pair in pairs]),
                "prompts": nested([prompt for prompt, _ in pairs]),
                "responses": nested([reply for _, reply in pairs]),
                "position_ids": nested([torch.arange(len(prompt) + len(reply)) for prompt, reply in pairs]),
                "loss_mask": nested(masks),
                "response_mask": nested(masks),
                "old_log_probs": nested([torch.full(reply.shape, _OLD) for _, reply in pairs]),
                "advantages": nested(advantages),
            }
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(get_tensordict(fields, settings), loss)
            engine.optimizer_step()

        with engine.train_mode():
            return _timed(update, repeats, device == "cuda") | {"tokens": tokens}

    return measure


def _trl(folder: Path, device: str) -> Callable[..., dict[str, Any]]:
    """TRL's trainer with its own data loader over the rows of one step, again and again, instead of a vLLM server."""
    import queue

    from torch.utils.data import DataLoader, IterableDataset
    from transformers import TrainerCallback
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
    from trl.experimental.async_grpo.async_grpo_trainer import DataCollatorForRollout, TokenBudgetBatcher

    kernel = varlen_kernel(device, head_dim=AutoModelForCausalLM.from_pretrained(folder).config.head_dim)
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=kernel)

    class Worker:
        """Of no rollouts, and no transfer of weights."""

        rollout_buffer, metrics_queue = queue.Queue[Any](), queue.Queue[Any]()

        def __getattr__(self, name: str) -> Callable[..., None]:
            if name not in _WORKER:
                raise AttributeError(name)
            return lambda *_arguments, **_options: None

    class Steps(IterableDataset):
        def __init__(self, samples: list[dict[str, Any]], tokens: int) -> None:
            self.samples, self.tokens = samples, tokens
            # No row has room for it, so TRL's planner closes the last one.
            self.last = samples[0] | {"input_ids": torch.zeros(tokens, dtype=torch.long), "group_id": -1}

        def step(self) -> Iterator[Any]:
            return iter(TokenBudgetBatcher([*self.samples, self.last], 1, self.tokens, {}))

        def __iter__(self) -> Iterator[Any]:
            while True:
                yield from self.step()

    def measure(groups: list[Group], tokens: int, repeats: int) -> dict[str, Any]:
        samples = [
            {
                "input_ids": torch.tensor([*prompt, *reply]),
                "completion_mask": torch.tensor([0] * len(prompt) + [1] * len(reply)),
                "old_log_probs": torch.tensor([0.0] * len(prompt) + [_OLD] * len(reply)),
                "advantage": float(index % 2) - 0.5,
                "group_id": number,
                "metrics": {},
            }
            for number, (prompt, replies) in enumerate(groups)
            for index, reply in enumerate(replies)
        ]
        steps = Steps(samples, tokens)
        started = time.perf_counter()
        collator = DataCollatorForRollout(0)
        batches = [collator([rows]) for rows in steps.step()]
        packing_s, ends = time.perf_counter() - started, list[float]()

        class Trainer(AsyncGRPOTrainer):
            def get_train_dataloader(self) -> Any:
                self._rollout_dataset = SimpleNamespace(wait_s=0.0)
                return self.accelerator.prepare(DataLoader(steps, batch_size=1, collate_fn=collator))

        class Clock(TrainerCallback):
            def on_train_begin(self, *_arguments: Any, **_options: Any) -> None:
                ends.append(time.perf_counter())

            def on_step_end(self, *_arguments: Any, **_options: Any) -> None:
                if device == "cuda":
                    torch.cuda.synchronize()
                    if len(ends) == 1:
                        torch.cuda.reset_peak_memory_stats()
                ends.append(time.perf_counter())

        arguments = AsyncGRPOConfig(
            str(folder / "trl"),
            gradient_accumulation_steps=len(batches),
            max_steps=repeats + 1,
            token_budget=tokens,
            bf16=device == "cuda",
            use_cpu=device == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            str(folder),
            args=arguments,
            train_dataset=steps,
            rollout_worker=Worker(),
            weight_transfer=Worker(),
            callbacks=[Clock()],
        )
        trainer.train()
        computed = sum(int(batch["global_n_forward_tokens"][0]) for batch in batches)
        figures = _figures([after - before for before, after in itertools.pairwise(ends)])
        return figures | {"tokens": tokens, "computed_tokens": computed, "packing_s": round(packing_s, 3)}

    return measure


_WORKER = (
    "start", "stop", "update_model_version", "check_health", "init_weight_transfer", "pause", "send_weights", "resume",
    "destroy",
)  # fmt: skip


def varlen_kernel(device: str, head_dim: int) -> Callable[..., Tensor]:
    """flash-attn's ``flash_attn_varlen_func`` of torch, for segments whose keys begin before their queries.

    On a GPU it is compared with :func:`segments_attention`; raises ``ValueError`` if it computes something else.
    """
    if device == "cpu":
        return segments_attention
    from torch.nn.attention.varlen import varlen_attn

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, most_q: int, most_k: int,
        *, softmax_scale: float | None, grouped: bool, **_options: Any,
    ) -> Any:  # fmt: skip
        if not grouped:
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        return varlen_attn(q, k, v, ends_q, ends_k, most_q, most_k, scale=softmax_scale, window_size=(-1, 0))

    ends = (torch.tensor([0, 200, 243, 286]), torch.tensor([0, 200, 443, 686]))
    ends_q, ends_k = (each.to("cuda", torch.int32) for each in ends)
    inputs = [torch.randn(rows, heads, head_dim, device="cuda") for rows, heads in ((286, 14), (686, 2), (686, 2))]
    inputs = [each.bfloat16().requires_grad_() for each in inputs]

    def gradients(function: Callable[..., Any]) -> list[Tensor]:
        out = function(*inputs, ends_q, ends_k, 200, 243, softmax_scale=head_dim**-0.5, causal=True)
        return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]

    expected = gradients(segments_attention)
    for grouped in (True, False):
        chosen = partial(kernel, grouped=grouped)
        try:
            got = gradients(chosen)
        except RuntimeError:
            continue
        if all(torch.allclose(a.float(), b.float(), atol=0.05, rtol=0.05) for a, b in zip(got, expected, strict=True)):
            return chosen
    raise ValueError("torch's attention for segments does not end at the last key, as flash-attn's does")


def segments_attention(
    q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, *_most: int,
    softmax_scale: float | None, **_options: Any,
) -> Tensor:  # fmt: skip
    """As flash-attn's ``flash_attn_varlen_func``, one segment after the other. ``q`` is [T, heads, width]."""
    parts = []
    for number in range(len(ends_q) - 1):
        here = slice(int(ends_q[number]), int(ends_q[number + 1]))
        seen = slice(int(ends_k[number]), int(ends_k[number + 1]))
        query, key, value = (each.transpose(0, 1)[None] for each in (q[here], k[seen], v[seen]))
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=q.device)
        mask = mask.tril(key.shape[2] - query.shape[2])
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=softmax_scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def measure_system(
    system: str, folder: Path, cases: Sequence[Case], *, budgets: Sequence[int], device: str, prompts: Any, repeats: int
) -> Iterator[dict[str, Any]]:
    """Figures of one of :data:`SYSTEMS` for each case; ``prompts`` are of the cases of 886 tokens, or empty."""
    cost = ModelCost.of(AutoModelForCausalLM.from_pretrained(folder))
    make: dict[str, Any] = {"local": _local, "trl": _trl, "verl": partial(_verl, shared=False)}
    measure = make.get(system, partial(_verl, shared=True))(folder, device)
    best: dict[tuple[int, int], tuple[float, int]] = {}
    for case in sorted(cases):
        groups = case.rows(prompts if case.prompt == 886 else ())
        tokens = sum(len(prompt) + len(reply) for prompt, replies in groups for reply in replies)
        trained, known = case.groups * SIZE * case.reply, best.get(case[1:])
        for budget in [known[1]] if known else budgets:
            figures: dict[str, Any] = {"part": system, "case": f"{case.groups}x{case.prompt}+{case.reply}"}
            try:
                figures |= measure(groups, budget, repeats if not known else max(1, repeats - 1))
            except torch.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                yield figures | {"tokens": budget, "error": str(error).splitlines()[0]}
                continue
            update_s = median(figures["seconds"])
            best[case[1:]] = min(best.get(case[1:], (math.inf, budget)), (update_s, budget))
            # The operations of the model, with a group's prompt once, by those of the card.
            spans = [(0, len(prompt)) for prompt, _ in groups]
            spans += [(len(prompt), len(prompt) + len(reply)) for prompt, replies in groups for reply in replies]
            peak = peak_flops(torch.cuda.get_device_name()) if device == "cuda" else 0.0
            figures |= {"mfu": round(cost.update(spans, trained) / update_s / peak, 4)} if peak else {}
            rates = {"tokens_per_s": round(tokens / update_s), "trained_tokens_per_s": round(trained / update_s)}
            yield figures | {"update_s": round(update_s, 3), "row_tokens": tokens, **rates}


def save_model(shape: str, folder: str) -> None:
    """Save a model with random weights, :data:`VOCABULARY`, and the starter's tokenizer."""
    torch.manual_seed(0)
    _, tokenizer = load_policy(STARTER)
    special = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    model: Any = LlamaForCausalLM(llama_config(shape, vocab_size=VOCABULARY, **special))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def versions() -> dict[str, str]:
    """Those of the packages that are compared."""
    found = {}
    for name in ("torch", "transformers", "trl", "verl", "vllm"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dev.gpu.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--json", type=Path, default=Path("peers.json"), help="file for the figures; default: %(default)s")
    add("--shape", default="0.5b", help=f"one of {', '.join(SHAPES)}; default: %(default)s")
    add("--cases", default="64x886+42,256x886+42,64x127+256,256x127+256", help="default: %(default)s")
    add("--systems", default=",".join(SYSTEMS), help="default: %(default)s")
    add("--tokens", default="32768,16384", help="of a pass; default: %(default)s")
    add("--repeats", type=int, default=3, help="updates after the first; default: %(default)s")
    add("--spider", metavar="FOLDER", help="real Spider")
    add("--limit", type=float, default=420.0, help="seconds for all systems; default: %(default)g")
    add("--trl", metavar="FOLDER", help="where TRL is, if not installed: verl 0.9.1 cannot start beside TRL 1.16")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu for a trial; default: %(default)s")
    add("--only", nargs=2, metavar=("SYSTEM", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        options.cases = [Case.read(text) for text in options.cases.split(",")]
    except ValueError as error:
        parser.error(str(error))
    options.systems = options.systems.split(",")
    if unknown := sorted(set(options.systems) - set(SYSTEMS)):
        parser.error(f"{', '.join(unknown)}: no system; known: {', '.join(SYSTEMS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this measures a GPU, and torch finds none")
    return options


def main() -> int:
    """Measure each system in a process of its own; the exit status is the number of those that failed."""
    options = _options()
    budgets = [int(tokens) for tokens in options.tokens.split(",")]
    if options.only:
        system, folder = options.only
        prompts = json.loads((Path(folder) / "prompts.json").read_text())
        settings = {"budgets": budgets, "device": options.device, "prompts": prompts, "repeats": options.repeats}
        for figures in measure_system(system, Path(folder), options.cases, **settings):
            print(json.dumps(figures), flush=True)
        return 0
    machine = {"gpu": torch.cuda.get_device_name() if options.device == "cuda" else "none", **versions()}
    result: dict[str, Any] = {**machine, "shape": options.shape}
    with tempfile.TemporaryDirectory() as folder:
        save_model(options.shape, folder)
        most = max(case.groups for case in options.cases) if options.spider else 0
        texts = [prompt.tolist() for prompt in spider_prompts(options.spider, "smollm2", most, 0)] if most else []
        (Path(folder) / "prompts.json").write_text(json.dumps(texts))
        return collect(
            "dev.gpu.peers", options.systems, folder, result, options.json, options.limit, trl=options.trl or ""
        )


if __name__ == "__main__":
    sys.exit(main())
