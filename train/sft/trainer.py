"""The supervised training loop: AdamW, warmup and cosine decay, cross entropy on the replies' tokens."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F

from groundwire.train.algorithms.model_size import sft_learning_rate
from groundwire.train.artifacts.checkpoints import Checkpoints
from groundwire.train.config.sft_settings import SFTSettings
from groundwire.train.local.packing import Row, forward_batches, make_rows, pack, packed_logits
from groundwire.train.policy.attention import set_attention
from groundwire.train.policy.model import bf16_is_faster, keep_freed_memory
from groundwire.train.policy.pretrained.model_files import save_policy

MIN_RATE = 0.05
"""The learning rate at the end, as a share of the highest one."""
WARMUP_STEPS = 40
"""Steps in which the learning rate rises."""
WEIGHT_DECAY, BETAS = 0.01, (0.9, 0.98)
"""AdamW's."""
VAL_EVERY = 100
"""Steps between the held-out losses."""
CHECKPOINT_EVERY = 200
"""Steps between checkpoints."""


Step = tuple[list[Row], int]
"""The rows of one optimizer step, and the groups of turns up to its end, since the start of the training."""


def make_steps(groups: Iterable[list[Row]], tokens_per_step: int, *, first: int) -> Iterator[Step]:
    """Steps of about ``tokens_per_step`` tokens; a group of rows is never divided. The first group has this number."""
    rows: list[Row] = []
    end = first
    for group in groups:
        if rows and sum(row.length for row in (*rows, *group)) > tokens_per_step:
            yield rows, end
            rows = []
        rows = rows + group
        end += 1
    if rows:
        yield rows, end


class SFTTrainer:
    """Trains ``model`` in place and writes ``checkpoints``."""

    def __init__(self, model: Any, tokenizer: Any, settings: SFTSettings, *, checkpoints: Checkpoints) -> None:
        self.model, self.tokenizer, self.settings, self.checkpoints = model, tokenizer, settings, checkpoints
        keep_freed_memory()
        self.device = next(model.parameters()).device
        cuda = self.device.type == "cuda"
        shares = set_attention(model)
        self.one_row = cuda and shares  # FlexAttention over rows without padding
        self._branches = sys.maxsize if shares else 1
        self.bf16 = bf16_is_faster(model)
        self.tokens_per_forward = 16384 if cuda else 2048
        self.learning_rate = settings.learning_rate or sft_learning_rate(model.num_parameters())
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=self.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=cuda
        )
        self.step, self.groups, self.seconds = 0, 0, 0.0
        """Finished steps, the groups of turns in them, and the seconds that they took, also before a resume."""

    def train(
        self, steps: Iterable[Step], total: int, val_rows: Sequence[Row], report: Callable[[dict[str, Any]], None]
    ) -> None:
        """Train until ``steps`` end, or the time is over, or the user stops it; then write a checkpoint.

        ``steps`` begin with the group after :attr:`groups`, of ``total`` in the whole training. ``report`` gets the
        metrics of each step, some with the loss of ``val_rows``.
        """
        self.model.train()
        before, began, limit = self.seconds, time.monotonic(), self.settings.time_limit_s
        try:
            for rows, groups in _ahead(steps):
                progress = max(self.groups / total, self.seconds / limit if limit else 0.0)
                if progress >= 1:
                    break
                metrics = self._update(rows, progress)
                self.step, self.groups = self.step + 1, groups
                self.seconds = before + time.monotonic() - began
                metrics |= {"progress": round(progress, 4), "seconds": round(self.seconds, 2)}
                if self.step % VAL_EVERY == 0 and val_rows:
                    metrics["held_out_loss"] = round(self.loss(val_rows), 4)
                report({"step": self.step, **metrics})
                if self.step % CHECKPOINT_EVERY == 0:
                    self.save()
        except KeyboardInterrupt:
            self.save()
            raise
        if self.step:
            self.save()
        self.model.eval()

    def rows(self, examples: Sequence[Any]) -> list[Row]:
        """The rows of a group of examples."""
        return make_rows(examples, tokens=self.tokens_per_forward, branches=self._branches)

    @torch.no_grad()
    def loss(self, rows: Sequence[Row]) -> float:
        """The mean loss of a token of ``rows``."""
        self.model.eval()
        total = sum(row.targets for row in rows)
        summed = sum(float(self._loss(batch)) for batch in self._batches(rows))
        self.model.train()
        return summed / max(1, total)

    def save(self) -> None:
        """Write a checkpoint of the last finished step."""
        with self.checkpoints.write(self.step) as folder:
            save_policy(self.model, self.tokenizer, folder)
            state = {"optimizer": self.optimizer.state_dict(), "step": self.step}
            state |= {"groups": self.groups, "seconds": self.seconds}
            torch.save(state, folder / "trainer.pt")

    def load(self, state: dict[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.groups, self.seconds = state["step"], state["groups"], state["seconds"]

    def _update(self, rows: list[Row], progress: float) -> dict[str, float]:
        targets = sum(row.targets for row in rows)
        rate = self.learning_rate * min(1.0, (self.step + 1) / WARMUP_STEPS)
        rate *= MIN_RATE + (1 - MIN_RATE) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        summed = 0.0
        for batch in self._batches(rows):
            loss = self._loss(batch)
            (loss / targets).backward()
            summed += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "loss": round(summed / targets, 4),
            "grad_norm": round(float(norm), 4),
            "learning_rate": rate,
            "tokens": sum(row.length for row in rows),
            "targets": targets,
        }

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        return forward_batches(rows, self.tokens_per_forward, padded=not self.one_row)

    def _loss(self, rows: list[Row]) -> torch.Tensor:
        packed = pack(rows, one_row=self.one_row, device=self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            logits = packed_logits(self.model, packed)
        return F.cross_entropy(logits, packed.targets, reduction="sum")


def _ahead(steps: Iterable[Step]) -> Iterator[Step]:
    """The same steps; another thread makes the next one while one is trained."""
    iterator = iter(steps)
    with ThreadPoolExecutor(1, thread_name_prefix="sft-steps") as pool:
        following = pool.submit(next, iterator, None)
        while (step := following.result()) is not None:
            following = pool.submit(next, iterator, None)
            yield step
