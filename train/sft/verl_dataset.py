"""The data set that verl's SFT trainer reads: token ids and masks, made by :mod:`groundwire.train.sft.several_gpus`."""

from __future__ import annotations

from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor

__all__ = ["TokenDataset"]


class TokenDataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Examples without padding: ``input_ids``, ``position_ids`` and ``loss_mask``, int64 [tokens]."""

    def __init__(self, parquet_files: Any, **_: Any) -> None:
        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        self._table = pq.read_table(files)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        prompt, reply = (self._table[name][index].as_py() for name in ("prompt_ids", "reply_ids"))
        ids = torch.tensor(prompt + reply)
        mask = torch.tensor([0] * len(prompt) + [1] * len(reply))
        return {"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": mask}
