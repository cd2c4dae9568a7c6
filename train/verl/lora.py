"""LoRA adapters (Hu et al., 2021) with verl 0.9.1: what it needs, and what it leaves behind.

verl writes the state of its adapted model as it is, under peft's names: transformers loads such a folder with a warning
and with random weights. Merged into the weights that they adapt, the adapters are a model like any other.
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["merge_adapters"]

_PREFIX = "base_model.model."


def merge_adapters(folder: Path, settings: Path) -> bool:
    """Make W + (alpha / r) B A of every adapted weight of the checkpoint in ``folder``; False where none is adapted.

    ``settings`` is verl's ``lora_train_meta.json``, with ``r`` and ``lora_alpha``. The files are replaced in one piece.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    files = sorted(folder.glob("*.safetensors"))
    names = set[str]()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    if not any(".lora_A." in name for name in names):
        return False
    chosen = json.loads(settings.read_text())
    scale = float(chosen["lora_alpha"]) / float(chosen["r"])
    state: dict[str, torch.Tensor] = {}
    for file in files:
        state |= {
            name.removeprefix(_PREFIX).replace(".default.", "."): value for name, value in load_file(file).items()
        }
    merged: dict[str, torch.Tensor] = {}
    for name, base in state.items():
        if ".lora_" in name:
            continue
        adapted, weight = name.removesuffix(".base_layer.weight"), base
        if adapted != name:
            a, b = state[f"{adapted}.lora_A.weight"], state[f"{adapted}.lora_B.weight"]
            weight = (base.float() + scale * (b.float() @ a.float())).to(base.dtype)
        merged[name.replace(".base_layer.", ".")] = weight.contiguous()
    part = folder / ".merged.part"
    save_file(merged, part, metadata={"format": "pt"})
    whole = folder / "model.safetensors"
    part.replace(whole)  # loaders look for it before an index, so the folder is whole at every moment
    for file in {*files, folder / "model.safetensors.index.json"} - {whole}:
        file.unlink(missing_ok=True)
    return True
