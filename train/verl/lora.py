"""Merges the LoRA adapters (Hu et al., 2021) of a verl 0.9.1 checkpoint into its weights.

verl saves its adapted model under peft's parameter names, which transformers does not know: it would load the folder
with random weights and a warning. The merged checkpoint is an ordinary model.
"""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["merge_adapters"]

_PREFIX = "base_model.model."


def merge_adapters(folder: Path, settings: Path) -> bool:
    """Replace every adapted weight W of the checkpoint in ``folder`` by W + (alpha / r) B A; False if none is adapted.

    ``settings`` is verl's ``lora_train_meta.json`` with ``r`` and ``lora_alpha``. The files are replaced atomically.
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
    lora = json.loads(settings.read_text())
    scale = float(lora["lora_alpha"]) / float(lora["r"])
    state: dict[str, torch.Tensor] = {}
    for file in files:
        for name, value in load_file(file).items():
            state[name.removeprefix(_PREFIX).replace(".default.", ".")] = value
    merged: dict[str, torch.Tensor] = {}
    for name, base in state.items():
        if ".lora_" in name:
            continue
        module, weight = name.removesuffix(".base_layer.weight"), base
        if module != name:
            a, b = state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"]
            weight = (base.float() + scale * (b.float() @ a.float())).to(base.dtype)
        merged[name.replace(".base_layer.", ".")] = weight.contiguous()
    part, whole = folder / ".merged.part", folder / "model.safetensors"
    save_file(merged, part, metadata={"format": "pt"})
    part.replace(whole)  # loaders prefer this file to an index, so the folder can be loaded at every moment
    for file in {*files, folder / "model.safetensors.index.json"} - {whole}:
        file.unlink(missing_ok=True)
    return True
