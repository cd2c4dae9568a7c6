"""The tokens that each of several GPUs computes of a step: ``python -m dev.gpu.rank_tokens --spider ~/spider``.

It needs no GPU. Groups of 8 replies of 42 tokens to questions of Spider's training part, in the agent's full prompts.
Prints a line of JSON: the tokens of one GPU, which computes each common beginning once, and those of the fullest of
several, where groups are divided alone and where groups that begin alike stay together. With verl it also prints the
tokens of prompts that the fullest of several inference servers computes, with verl's load balancer and with ours.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
from typing import Any

import torch
from transformers import AutoTokenizer

from dev.gpu.agents import sql_messages
from groundwire import domains
from groundwire.domains import DataError
from groundwire.train.config.errors import ConfigError
from groundwire.train.policy.pretrained.locate import find_model
from groundwire.train.verl.shared_prefixes.balance import divide_rows
from groundwire.train.verl.shared_prefixes.prefixes import prefix_hashes
from groundwire.train.verl.shared_prefixes.tree import micro_batches, prefix_tree

_ROWS, _REPLY, _MICRO_BATCH = 8, 42, 32768


def _kept(prompts: list[torch.Tensor]) -> int:
    """The tokens that one GPU computes of these prompts' groups."""
    rows = [prompt for prompt in prompts for _ in range(_ROWS)]
    lengths = [len(prompt) + _REPLY for prompt in rows]
    batches = micro_batches(rows, lengths, _MICRO_BATCH)
    trees = (prefix_tree([rows[row] for row in batch], [lengths[row] for row in batch]) for batch in batches)
    return sum(len(tree.keep) for tree in trees)


def _fullest(prompts: list[torch.Tensor], gpus: int, *, together: bool) -> int:
    keys = [f"{number}_{row}_0" for number in range(len(prompts)) for row in range(_ROWS)]
    tags = [
        {"prompt_len": len(prompt), "seq_len": len(prompt) + _REPLY, "prefix_hashes": hashes}
        for prompt in prompts
        for hashes in [prefix_hashes(prompt.tolist()) if together else ""] * _ROWS
    ]
    parts = divide_rows(keys, tags, gpus)
    groups = [sorted({int(keys[row].partition("_")[0]) for row in part}) for part in parts]
    return max(_kept([prompts[number] for number in part]) for part in groups)


def _fullest_servers(prompts: list[torch.Tensor], servers: int) -> dict[str, int]:
    """While all groups of the step are open."""
    from verl.workers.rollout.router import GlobalRequestLoadBalancer

    from groundwire.train.verl.shared_prefixes.routing import PrefixRouter

    handles: dict[str, Any] = dict.fromkeys(map(str, range(servers)))
    verl = GlobalRequestLoadBalancer(handles)
    verls = [verl.acquire_server(str(group))[0] for group in range(len(prompts))]
    router = PrefixRouter(handles, {})
    ours = [router.acquire_server(str(group), prompt.tolist())[0] for group, prompt in enumerate(prompts)]

    def fullest(chosen: list[str]) -> int:
        parts = ([prompt for prompt, each in zip(prompts, chosen, strict=True) if each == name] for name in handles)
        ordered = (sorted(part, key=torch.Tensor.tolist) for part in parts)
        return max(len(prefix_tree(part, list(map(len, part))).keep) for part in ordered)

    return {"verl's": fullest(verls), "ours": fullest(ours)}


def spider_prompts(spider: str, model: str, count: int, seed: int) -> list[torch.Tensor]:
    """The full prompts of ``count`` random questions of Spider's training part, int64 [tokens] each.

    Raises ``ValueError`` for more than it has, besides the errors of the data and of the model.
    """
    tokenizer = AutoTokenizer.from_pretrained(find_model(model))
    tasks = domains.get("spider").load(spider).train
    if count > len(tasks):
        raise ValueError(f"--groups {count}: there are {len(tasks)} questions")
    random.seed(seed)  # verl's load balancer draws from it, too
    prompts = []
    for task in random.sample(list(tasks), count):
        messages: Any = sql_messages(str(task["question"]), str(task["db_path"]), full=True)
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompts.append(torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return prompts


def main() -> int:
    """Print the tokens."""
    parser = argparse.ArgumentParser(prog="python -m dev.gpu.rank_tokens", description=__doc__)
    parser.add_argument("--spider", required=True, help="folder of Spider's data")
    parser.add_argument("--model", default="smollm2", help="whose tokenizer; default: %(default)s")
    parser.add_argument("--groups", type=int, default=256, help="default: %(default)s")
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 4, 8], help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of questions; default: %(default)s")
    options = parser.parse_args()
    try:
        prompts = spider_prompts(options.spider, options.model, options.groups, options.seed)
    except (ConfigError, DataError, ValueError) as error:
        parser.error(str(error))
    if options.groups < 1 or any(gpus < 1 or options.groups % gpus for gpus in options.gpus):
        parser.error(f"--groups {options.groups}: a multiple of each of --gpus, at least 1")
    figures: dict[str, Any] = {"groups": options.groups, "mean_prompt": round(sum(map(len, prompts)) / len(prompts))}
    figures["one_gpu"] = _kept(prompts)
    for gpus in options.gpus:
        apart, together = (_fullest(prompts, gpus, together=each) for each in (False, True))
        figures[f"fullest_of_{gpus}"] = {"groups alone": apart, "together": together}
        if importlib.util.find_spec("verl"):
            figures[f"fullest_of_{gpus}_servers"] = _fullest_servers(prompts, gpus)
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
