"""A whole step of TRL's GRPOTrainer with vLLM on the same GPU, beside verl's loop and ours in the part ``speed``.

The same model, prompts, batch and number of tokens, a reward that costs nothing, TRL's defaults otherwise. Attention is
torch's (sdpa) over padded rows, because there is no flash-attn. Prints a line of JSON for each step.

python -m dev.gpu.trl_step MODEL JSON [--spider FOLDER] [--batch 64] [--reply 42] [--steps 5] [--trl FOLDER]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback

from dev.gpu.agents import sql_messages
from groundwire import domains

_ROWS = 8
_LAST = 3
"""Steps at the end that count; those before compile and fill caches."""


def coin(prompts: list[Any], **_: Any) -> list[float]:
    """As :func:`dev.gpu.agents.coin`."""
    return [float(random.random() < 0.5) for _ in prompts]


class _Clock(TrainerCallback):
    def __init__(self, file: Path, figures: dict[str, Any]) -> None:
        self.file, self.figures, self.ends = file, figures, list[float]()

    def on_train_begin(self, *_arguments: Any, **_options: Any) -> None:
        self.ends.append(time.perf_counter())

    def on_step_end(self, *_arguments: Any, **_options: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.figures["peak_gpu_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
        self.ends.append(time.perf_counter())
        seconds = [round(after - before, 2) for before, after in itertools.pairwise(self.ends)]
        step_s = median(seconds[-_LAST:])
        tokens = self.figures["tokens"] / step_s
        self.figures |= {"seconds": seconds, "step_s": step_s, "tokens_per_s_per_gpu": round(tokens)}
        self.file.write_text(json.dumps(self.figures))
        print(json.dumps(self.figures), flush=True)

    def on_log(self, _arguments: Any, _state: Any, _control: Any, logs: dict[str, Any], **_options: Any) -> None:
        self.figures["log"] = {name: value for name, value in logs.items() if "time" in name or "length" in name}


def main(options: argparse.Namespace) -> None:
    """Train for ``options.steps``."""
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tasks = itertools.islice(itertools.cycle(domains.get("spider").load(options.spider).train), options.batch * 8)
    full = options.spider is not None
    prompts = [sql_messages(str(task["question"]), str(task["db_path"]), full=full) for task in tasks]
    lengths = [len(tokenizer.apply_chat_template(prompt, return_dict=False)) for prompt in prompts[: options.batch]]
    prompt_tokens = sum(lengths) / len(lengths)
    tokens = round(options.batch * _ROWS * (prompt_tokens + options.reply))
    figures = {"prompt_length": round(prompt_tokens), "reply": options.reply, "batch": options.batch, "tokens": tokens}
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            folder,
            use_vllm=cuda,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.3,
            vllm_max_model_length=3072,
            num_generations=_ROWS,
            max_completion_length=options.reply,
            generation_kwargs={"ignore_eos": True} if cuda else {"min_new_tokens": options.reply},
            per_device_train_batch_size=options.rows_per_pass,
            gradient_accumulation_steps=options.batch * _ROWS // options.rows_per_pass,
            max_steps=options.steps,
            bf16=cuda,
            use_cpu=not cuda,
            gradient_checkpointing=True,
            model_init_kwargs={"attn_implementation": "sdpa", "dtype": "float32"},
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            options.model,
            reward_funcs=coin,
            args=config,
            # Without a fingerprint it would be computed, which fails with pyarrow 26.
            train_dataset=Dataset(InMemoryTable.from_pydict({"prompt": prompts}), fingerprint="prompts"),
            callbacks=[_Clock(options.json, figures)],
        )
        trainer.train()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m dev.gpu.trl_step", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("json", type=Path)
    parser.add_argument("--spider", metavar="FOLDER", help="real Spider and the longer prompts")
    parser.add_argument("--batch", type=int, default=64, help="prompts of 8 rollouts; default: %(default)s")
    parser.add_argument("--reply", type=int, default=42, help="tokens; default: %(default)s")
    parser.add_argument("--steps", type=int, default=5, help="default: %(default)s, of which the last three count")
    parser.add_argument("--rows-per-pass", type=int, default=64, help="of the update; default: %(default)s")
    parser.add_argument("--trl", metavar="FOLDER", help="where TRL is, if not installed")
    given = parser.parse_args()
    sys.path[:0] = [given.trl] if given.trl else []
    main(given)
