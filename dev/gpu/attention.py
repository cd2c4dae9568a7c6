"""Six kinds of attention: our rows against transformers' eager attention, and vLLM's log-probabilities against ours.

python -m dev.gpu.attention OUT.json               # random weights, a prompt of 700 tokens with three replies of 200
python -m dev.gpu.attention OUT.json --prompt 30 --reply 10 --device cpu

Differences of log-probabilities are in nats. vLLM takes part where it is installed, in a process for each model.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from groundwire.train.policy import STARTER
from groundwire.train.policy.attention import TREE, VARLEN, packs, padded_attention, tree_block_mask
from groundwire.train.policy.model import load_policy
from groundwire.train.policy.pretrained.model_files import save_policy

__all__ = ["eager", "packed", "padded", "save_tiny_model", "tree"]

_WINDOW: dict[str, Any] = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2}
TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 128},
    "gemma3_text": {**_WINDOW, "query_pre_attn_scalar": 64, "hidden_activation": "gelu_pytorch_tanh"},
    "gpt_oss": {**_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "conv_dim": 512},
}
_SIZES = {
    "vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def eager(model: Any, prompt: Tensor, replies: Sequence[Tensor]) -> Tensor:
    """transformers' eager attention, one sequence at a time. All four return logits [tokens of all, vocabulary]."""
    model.set_attn_implementation("eager")
    return torch.cat([_logits(model, torch.cat([prompt, reply])) for reply in replies])


def packed(model: Any, prompt: Tensor, replies: Sequence[Tensor]) -> Tensor:
    """All sequences in one row, as verl's without padding."""
    model.set_attn_implementation(VARLEN)
    rows = [torch.cat([prompt, reply]) for reply in replies]
    positions = torch.cat([torch.arange(len(row), device=row.device) for row in rows])
    return _logits(model, torch.cat(rows), position_ids=positions[None])


def tree(model: Any, prompt: Tensor, replies: Sequence[Tensor]) -> Tensor:
    """The prompt once, and after it each reply."""
    model.set_attn_implementation(TREE)
    ids = torch.cat([prompt, *replies])
    columns = torch.arange(len(ids), device=ids.device)
    parts = [columns[: len(prompt)], *(columns[len(prompt) : len(prompt) + len(reply)] for reply in replies)]
    stops = [len(ids), *torch.tensor([len(part) for part in parts]).cumsum(0)[1:].tolist()]
    end = torch.cat([torch.full_like(part, stop) for part, stop in zip(parts, stops, strict=True)])[None]
    positions = torch.cat(parts)[None]
    mask = tree_block_mask(end, positions)
    row = _logits(model, ids, position_ids=positions, attention_mask=mask)
    first, *others = row.split([len(part) for part in parts])
    return torch.cat([part for reply in others for part in (first, reply)])


def padded(model: Any, prompt: Tensor, replies: Sequence[Tensor]) -> Tensor:
    """One sequence in a row, with padding at its end."""
    model.set_attn_implementation(padded_attention(model.config))
    rows = [torch.cat([prompt, reply]) for reply in replies]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    column = torch.arange(ids.shape[1], device=ids.device)
    mask = (column < torch.tensor([len(row) for row in rows], device=ids.device)[:, None]).long()
    found = model(input_ids=ids, attention_mask=mask, position_ids=column * mask, use_cache=False).logits
    return torch.cat([values[: len(row)] for values, row in zip(found, rows, strict=True)])


def _logits(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
    return model(input_ids=ids[None], use_cache=False, **inputs).logits[0]


def save_tiny_model(kind: str, folder: Path) -> None:
    """Save a model of a type of :data:`TYPES` with random weights and the starter's tokenizer."""
    _, tokenizer = load_policy(STARTER)
    ids = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(kind, **{**_SIZES, **TYPES[kind], "vocab_size": len(tokenizer), **ids})
    torch.manual_seed(0)
    save_policy(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), tokenizer, folder)


@torch.no_grad()
def compare(kind: str, prompt_tokens: int, reply_tokens: int, device: str) -> dict[str, Any]:
    """The largest and the mean difference of each way from eager attention, and of vLLM from each way."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **_SIZES, **TYPES[kind])
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model = model.to(torch.bfloat16)
    prompt = torch.randint(3, config.vocab_size, (prompt_tokens,))
    replies = list(torch.randint(3, config.vocab_size, (3, reply_tokens)))
    sampled = None
    if importlib.util.find_spec("vllm"):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            task = json.dumps([folder, prompt.tolist(), reply_tokens, str(Path(folder) / "replies.json")])
            subprocess.run([sys.executable, "-m", "dev.gpu.attention", "--sample", task], check=True)
            found = json.loads((Path(folder) / "replies.json").read_text())
        replies, sampled = (
            [torch.tensor(ids) for ids, _ in found],
            torch.tensor([value for _, values in found for value in values]),
        )
    prompt, replies, model = prompt.to(device), [reply.to(device) for reply in replies], model.to(device)

    def logprobs(rows: Callable[..., Tensor]) -> Tensor:
        values = (
            rows(model, prompt, replies).float().log_softmax(-1).split([len(prompt) + len(each) for each in replies])
        )
        return torch.cat(
            [v[len(prompt) - 1 : -1].gather(1, ids[:, None])[:, 0] for v, ids in zip(values, replies, strict=True)]
        ).cpu()

    ways = (packed, tree, padded) if packs(config) else (padded,)
    half = {rows.__name__: logprobs(rows) for rows in (eager, *ways)}
    model = model.float()
    whole = {rows.__name__: logprobs(rows) for rows in (eager, *ways)}
    result = {f"float32 {name}": _distance(values, whole["eager"]) for name, values in whole.items() if name != "eager"}
    result |= {f"bfloat16 {name}": _distance(values, half["eager"]) for name, values in half.items() if name != "eager"}
    result["bfloat16 eager against float32"] = _distance(half["eager"], whole["eager"])
    if sampled is not None:
        result |= {f"vLLM against bfloat16 {name}": _distance(values, sampled) for name, values in half.items()}
    return result


def _distance(found: Tensor, expected: Tensor) -> dict[str, float]:
    difference = (found - expected).abs()
    return {"max": float(difference.max()), "mean": float(difference.mean())}


def _sample(folder: str, prompt: list[int], tokens: int, out: str) -> None:
    """Three replies of vLLM, and the log-probabilities of their tokens."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        folder, skip_tokenizer_init=True, dtype="bfloat16", gpu_memory_utilization=0.3, max_model_len=2048,
        enable_prefix_caching=False, logprobs_mode="processed_logprobs",
    )  # fmt: skip
    params = SamplingParams(n=3, seed=0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False)
    outputs = llm.generate(TokensPrompt(prompt_token_ids=prompt), params)[0].outputs
    replies = []
    for each in outputs:
        values = zip(each.token_ids, each.logprobs or (), strict=True)
        replies.append((list(each.token_ids), [step[token].logprob for token, step in values]))
    Path(out).write_text(json.dumps(replies))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="a file for the results")
    parser.add_argument("--prompt", type=int, default=700, help="tokens")
    parser.add_argument("--reply", type=int, default=200, help="tokens")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.sample:
        _sample(*json.loads(given.sample))
    else:
        results = {}
        for name in TYPES:
            results[name] = compare(name, given.prompt, given.reply, given.device)
            print(name, json.dumps(results[name]), flush=True)
            if given.out:
                given.out.write_text(json.dumps(results, indent=2))
