"""How fast steps are, in the units of others, and what the passes of a model cost.

Tokens per second and GPU are those of NeMo RL (``tokens_per_sec_per_gpu``) and verl (``perf/throughput``): prompt and
reply of each sequence of a step, a shared prompt in each of them, by the time of the step and all GPUs.

MFU is what PaLM's authors defined (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): the operations of the model by
those that the GPUs could have done in that time, dense and in bfloat16. A token's forward pass takes 2 N operations for
N weights in matrix products, and 4 for each head's width, layer and position that it attends to; the backward pass
takes twice as many. Recomputed activations and old log-probabilities are no work of the model. As is computed, a shared
prompt counts once, and the output layer for chosen tokens only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from groundwire.adapters.tracing import LLMCall
from groundwire.train.algorithms.model_size import empty_model

_PEAKS = {
    "H100 PCIe": 756,
    "H(100|200) NVL": 835,
    "(H100|H200|GH200)": 989,
    "A100": 312,
    "A10": 125,
    "B200": 2250,
    "L4": 121,
    "L40S": 362,
    "GeForce RTX 4090": 165.2,
}
"""10^12 operations per second of a card, as in its data sheet: dense (half of what is given for sparse matrices), in
bfloat16 with sums in float32."""
_SIZE = r"([ -](SXM\d?|PCIE|\d+GB|HBM\w+))*"
"""What may follow in a card's name. A part of a card (MIG) and cards for laptops have other names and no peak here."""

Span = tuple[int, int]
"""Tokens at these positions of a sequence, the second exclusive, after those before them."""


def peak_flops(device: str) -> float:
    """Operations per second of the card that torch names so; 0 if it is not in the table."""
    peaks = (peak for name, peak in _PEAKS.items() if re.fullmatch(f"NVIDIA {name}{_SIZE}", device))
    return 1e12 * next(peaks, 0.0)


@dataclass(frozen=True, kw_only=True)
class ModelCost:
    """What decides the operations of a model's passes."""

    weights: int
    """Those that each token is multiplied with, without the output layer's; of experts those of the chosen ones."""
    output: int
    """Those of the output layer."""
    attention: Mapping[int | None, int]
    """The width of all heads of the layers with a window of so many positions, or without one."""
    frozen: bool
    """Whether only adapters are trained: then the backward pass computes no gradients of weights."""

    @classmethod
    def of(cls, model: Any, *, frozen: bool = False) -> ModelCost:
        """Of a model of transformers. Products with adapters are not counted."""
        import torch

        config, head = model.config.get_text_config(), model.get_output_embeddings()
        tables = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
        chosen = (getattr(config, "num_experts_per_tok", None) or experts) / experts
        weights = sum(
            weight.numel() * (chosen if ".experts." in name else 1)
            for name, weight in model.base_model.named_parameters()
            if weight.ndim > 1 and id(weight) not in tables and ".lora_" not in name
        )
        heads = getattr(config, "num_attention_heads", None) or 0
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(1, heads))
        window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        attention = Counter[int | None]({None: width * kinds.count("full_attention")})
        attention[window] += width * kinds.count("sliding_attention")
        output = head.weight.numel() if head is not None else 0
        return cls(weights=round(weights), output=output, attention=attention, frozen=frozen)

    @classmethod
    def without_weights(cls, model: Any, *, frozen: bool) -> ModelCost | None:
        """Of a model that :func:`.empty_model` makes; None if it cannot."""
        with suppress(OSError, ValueError, LookupError, AttributeError):
            return cls.of(empty_model(model), frozen=frozen)
        return None

    def forward(self, spans: Sequence[Span], chosen: int) -> float:
        """The operations of a forward pass over tokens, in which the logits of ``chosen`` ones are computed."""
        pairs = (
            width * (_attended(end, window) - _attended(start, window))
            for window, width in self.attention.items()
            for start, end in spans
        )
        return self._products(spans, chosen) + 4.0 * sum(pairs)

    def update(self, spans: Sequence[Span], chosen: int) -> float:
        """Those of a forward and a backward pass."""
        return 3 * self.forward(spans, chosen) - self.frozen * self._products(spans, chosen)

    def _products(self, spans: Sequence[Span], chosen: int) -> int:
        return 2 * (self.weights * sum(end - start for start, end in spans) + self.output * chosen)

    def sampling(self, calls: Iterable[LLMCall]) -> float:
        """Those of the sampler. It computes what it has not in its cache, and a reply's last token never."""
        total = 0.0
        for call in calls:
            prompt, reply = len(call.prompt_ids), len(call.response_ids)
            if reply:
                total += self.forward([(min(call.cached_tokens or 0, prompt), prompt + reply - 1)], reply)
        return total


def _attended(end: int, window: int | None) -> int:
    """The pairs of a token before position ``end`` and one that it attends to, itself or at most a window before."""
    full = min(end, window or end)
    return full * (full + 1) // 2 + (end - full) * full


def device_name(device: str) -> str:
    """torch's name of a card, or the device in capitals: ``CPU``."""
    import torch

    there = device.startswith("cuda") and torch.cuda.is_available()
    return torch.cuda.get_device_name(device) if there else device.partition(":")[0].upper()


def gpu_idle(seconds: Mapping[str, float]) -> float:
    """The share of a step's seconds by phase in which no model computes."""
    busy, total = seconds.get("sampling", 0.0) + seconds.get("update", 0.0), sum(seconds.values())
    return round(1 - busy / total, 4) if total else 0.0


def step_speed(line: Mapping[str, Any], *, tokens: float, step_s: float, update_s: float) -> dict[str, float]:
    """The speed of a step whose :class:`.MetricsLine` has ``rollouts``, ``seconds``, ``flops`` and ``machine``.

    ``tokens`` are those of all sequences, the others seconds. Without a GPU the machine has the tokens per second.
    """
    machine, flops = line["machine"], line["flops"]
    gpus, peak = machine["gpus"], peak_flops(machine["device"])
    if not step_s:
        return {}
    speed = {
        f"tokens_per_s_per_{'gpu' if gpus else 'machine'}": round(tokens / step_s / max(1, gpus), 1),
        "rollouts_per_s_per_core": round(line["rollouts"] / step_s / machine["cores"], 4),
    }
    if peak and update_s and "update" in flops:
        speed["update_mfu"] = round(flops["update"] / (update_s * machine["training_gpus"] * peak), 5)
        speed["step_mfu"] = round(sum(flops.values()) / (step_s * gpus * peak), 5)
    return {**speed, "gpu_idle_fraction": gpu_idle(line["seconds"])} if gpus else speed


def no_mfu(line: Mapping[str, Any]) -> str:
    """Why a step has no MFU; empty if it has one, or nothing is known of its machine."""
    if "step_mfu" in line.get("speed", {}) or not (machine := line.get("machine")):
        return ""
    if not peak_flops(device := machine.get("device", "")):
        return f"no MFU: train/algorithms/speed.py has no peak of {device}"
    return "no MFU: the model's operations were not counted, as with another engine of verl's than ours"
