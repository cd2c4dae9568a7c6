"""verl's update, with and without shared prefixes: ``python -m dev.gpu.verl_update``.

64 groups of 8 rows with prompts of 836 to 936 tokens and replies of 42, random weights. All engines get the same rows
and the same weights, and recompute activations. Prints a line of JSON for each engine and budget of tokens, and how far
the log-probabilities of each differ from the first engine's. Where liger-kernel is installed, shared prefixes are also
measured with its kernels (verl's ``use_liger``).

With ``--gpus 2`` each GPU has half of the groups. One GPU with half as many ``--groups`` does the same work: what two
take longer is communication and waiting.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from transformers import LlamaForCausalLM

from dev.gpu.random_model import llama_config
from dev.gpu.update import SHAPES
from groundwire.train.policy.attention import VARLEN

_VOCABULARY = 49152
_ROWS, _PROMPT, _SPREAD, _REPLY = 8, 886, 50, 42
_ENGINES = {"verl": (False, False), "shared prefixes": (True, False), "shared prefixes, liger": (True, True)}
"""Whether an engine shares prefixes, and whether it has liger-kernel's norms, rotation and activation."""


def _rows(groups: int, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Random rows, each a prompt and a reply, and a weight for each row's loss."""
    generator = torch.Generator().manual_seed(seed)

    def ids(number: int) -> torch.Tensor:
        return torch.randint(_VOCABULARY, (number,), generator=generator)

    rows = []
    for _ in range(groups):
        prompt = ids(_PROMPT + int(torch.randint(-_SPREAD, _SPREAD + 1, (1,), generator=generator)))
        rows += [torch.cat([prompt, ids(_REPLY)]) for _ in range(_ROWS)]
    return rows, torch.randn(len(rows), generator=generator)


def _batch(rows: list[torch.Tensor], weights: torch.Tensor, tokens: int) -> Any:
    from verl.utils.tensordict_utils import get_tensordict

    def nested(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    fields = {
        "input_ids": nested(rows),
        "position_ids": nested([torch.arange(len(row)) for row in rows]),
        "loss_mask": nested([torch.ones(_REPLY, dtype=torch.long)] * len(rows)),
        "weight": weights,
    }
    settings = {
        "use_remove_padding": True,
        "use_fused_kernels": True,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": tokens,
        "reply_tokens": len(rows) * _REPLY,
        "temperature": 1.0,
        "calculate_entropy": False,
        "return_model_output": True,
    }
    return get_tensordict(fields, settings)


def _replies(log_probs: torch.Tensor) -> list[torch.Tensor]:
    """The log-probabilities of each row's reply: a token's is at the position before it."""
    return [row[-1 - _REPLY : -1] for row in log_probs.unbind()]


def _loss(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    parts = zip(data["weight"], _replies(model_output["log_probs"]), strict=True)
    return torch.stack([weight * reply.sum() for weight, reply in parts]).sum() / data["reply_tokens"], {}


def new_engine(name: str, folder: str) -> Any:
    """One of ``_ENGINES`` with its optimizer, over the model in a folder."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import FSDPEngineWithLMHead

    from groundwire.train.verl.shared_prefixes.engine import SharedPrefixesEngine

    options = {"param_dtype": "bf16", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    shares, liger = _ENGINES[name]
    engine_class = SharedPrefixesEngine if shares else FSDPEngineWithLMHead
    engine = engine_class(
        model_config=HFModelConfig(
            path=folder,
            load_tokenizer=False,
            use_fused_kernels=True,
            use_liger=liger,
            enable_gradient_checkpointing=True,
            fused_kernel_options={"impl_backend": "torch"},
            override_config={"attn_implementation": VARLEN, "model_config": {}},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp",
            mixed_precision=options,
            use_torch_compile=False,
            use_no_sync_for_gradient_accumulation=False,  # as in a run: verl's class has another default than its file
        ),
        optimizer_config=FSDPOptimizerConfig(total_training_steps=1),
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def _timed(work: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """The last of three results, the seconds of each, and the peak memory in GB."""
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        result = work()
        torch.cuda.synchronize()
        seconds.append(round(time.perf_counter() - started, 3))
    return result, {"seconds": seconds, "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1)}


def measure(name: str, folder: str, tokens: int, groups: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Figures of an engine, and its log-probabilities of the replies' tokens, float32 [N], on the CPU.

    ``groups`` are those of this GPU.
    """
    engine, (rows, weights) = new_engine(name, folder), _rows(groups, seed=1 + torch.distributed.get_rank())
    with engine.eval_mode():
        inferred, forward = _timed(
            lambda: engine.forward_backward_batch(_batch(rows, weights, tokens), None, forward_only=True)
        )
    with engine.train_mode():

        def update() -> float:
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(_batch(rows, weights, tokens), _loss)
            gradients = [each.grad for each in engine.module.parameters() if each.grad is not None]
            return float(torch.nn.utils.get_total_norm(gradients))

        norm, backward = _timed(update)
    figures = {"engine": name, "tokens": tokens, "forward": forward, "forward_backward": backward, "grad_norm": norm}
    return figures, torch.cat(_replies(inferred["model_output"]["log_probs"])).float().cpu()


def _measure_all(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Measure the engines with each budget of tokens, as one of ``options.gpus`` processes."""
    torch.cuda.set_device(rank)
    store = torch.distributed.FileStore(f"{folder}/store", options.gpus)
    torch.distributed.init_process_group("nccl", store=store, rank=rank, world_size=options.gpus)
    for tokens in map(int, options.tokens.split(",")):
        first = None
        for name in options.engines:
            figures, found = measure(name, folder, tokens, options.groups // options.gpus)
            first = found if first is None else first
            difference = (found - first).abs()
            figures |= {"difference_mean": float(difference.mean()), "difference_max": float(difference.max())}
            if rank == 0:
                print(json.dumps({"gpus": options.gpus, "groups": options.groups, **figures}), flush=True)
            torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()


def main() -> int:
    """Measure in one process for each GPU."""
    parser = argparse.ArgumentParser(prog="python -m dev.gpu.verl_update", description=__doc__)
    parser.add_argument("--shape", default="0.5b", help=f"one of {', '.join(SHAPES)}; default: %(default)s")
    parser.add_argument("--tokens", default="32768,16384", help="of a micro-batch; default: %(default)s")
    parser.add_argument("--groups", type=int, default=64, help="of 8 rows, on all GPUs; default: %(default)s")
    parser.add_argument("--gpus", type=int, default=1, help="default: %(default)s")
    names = [name for name, (_, liger) in _ENGINES.items() if not liger or find_spec("liger_kernel")]
    parser.add_argument("--engines", nargs="+", choices=names, default=names, help="default: all")
    options = parser.parse_args()
    if options.gpus < 1 or options.groups < 1 or options.groups % options.gpus:
        parser.error(f"--groups {options.groups} cannot be divided among --gpus {options.gpus}")
    if torch.cuda.device_count() < options.gpus or find_spec("verl") is None:
        parser.error(f"this needs verl (docs/verl.md) and {options.gpus} GPU{'s' * (options.gpus > 1)}")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = LlamaForCausalLM._from_config(llama_config(options.shape, vocab_size=_VOCABULARY))
        model.to(torch.bfloat16).save_pretrained(folder)
        del model
        torch.multiprocessing.spawn(_measure_all, args=(options, folder), nprocs=options.gpus)
    return 0


if __name__ == "__main__":
    sys.exit(main())
