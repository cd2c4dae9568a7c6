"""The run's curve as a picture: training reward, and validation accuracy with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw_curve"]


def draw_curve(metrics: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw ``metrics`` (the lines of metrics.jsonl) into the PNG file ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    rewards = [(line["step"], line["reward"]) for line in metrics if line.get("reward") is not None]
    if rewards:
        axes.plot(*zip(*rewards, strict=True), color="0.7", linewidth=1, label="training reward (sampled)")
    graded = False
    for name, label, colour in (
        ("validation", "validation, greedy", "tab:green"),
        ("validation_sampled", "validation, sampled", "tab:blue"),
    ):
        points = [(line["step"], line[name]) for line in metrics if line.get(name, {}).get("accuracy") is not None]
        if points:
            steps = [step for step, _ in points]
            accuracy = [result["accuracy"] for _, result in points]
            graded = graded or any(result.get("metric_name") == "mean reward" for _, result in points)
            low = [result["accuracy"] - result["ci95"][0] for _, result in points]
            high = [result["ci95"][1] - result["accuracy"] for _, result in points]
            axes.errorbar(steps, accuracy, yerr=[low, high], color=colour, marker="o", capsize=3, label=label)
    axes.set(xlabel="step", ylabel="mean reward" if graded else "accuracy", ylim=(0, None if graded else 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
