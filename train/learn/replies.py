"""Replies of a model before and after fine-tuning, beside those recorded: what can be compared without an agent."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

from groundwire.tools.terminal import progress
from groundwire.train.artifacts.checkpoints import Checkpoints
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.evaluation.validation import choose_tasks
from groundwire.train.policy.engine import LocalEngine
from groundwire.train.policy.model import load_policy
from groundwire.train.policy.types import Sampling
from groundwire.train.sft.data.examples import encode
from groundwire.train.sft.data.load import turns_of
from groundwire.train.sft.trainer import SFTTrainer

_MOST = 200
"""Conversations whose replies are compared."""


def score_replies(model_folder: Path, chats: Iterable[dict[str, Any]], settings: SFTSettings) -> dict[str, Any]:
    """Of held-out ``chats``: ``equal``, by chat the share of replies that the model's greedy ones are equal to, and
    ``logprob``, the mean log-probability (natural, per token) of the recorded replies.
    """
    held_out = choose_tasks([chat for chat in chats if chat["split"] == "validation"], _MOST)
    model, tokenizer = load_policy(model_folder)
    model = model.to(settings.device)
    encoded = {number: encode(tokenizer, turns_of(chat)) for number, chat in enumerate(held_out)}
    examples = {
        number: [example for example in turns if len(example) <= settings.max_model_len]
        for number, turns in encoded.items()
    }
    trainer = SFTTrainer(model, tokenizer, settings, checkpoints=Checkpoints(model_folder))
    rows = trainer.rows([example for turns in examples.values() for example in turns])
    logprob, equal = -trainer.loss(rows), dict[str, list[float]]()
    model.eval()
    count = sum(map(len, examples.values()))
    with closing(LocalEngine(model, tokenizer, max_model_len=settings.max_model_len)) as engine:
        futures = [  # a longer reply than the recorded one is another one already
            (number, turn, engine.submit(turn.prompt_ids, Sampling(temperature=0.0, max_tokens=len(turn.response_ids))))
            for number, turns in examples.items()
            for turn in turns
        ]
        with progress("Replying to held-out prompts", count) as on_end:
            for number, example, future in futures:
                same = list(future.result().token_ids) == example.response_ids
                equal.setdefault(str(number), []).append(float(same))
                on_end()
    shares = {number: [sum(values) / len(values)] for number, values in equal.items()}
    return {"equal": shares, "replies": count, "logprob": round(logprob, 4)}
