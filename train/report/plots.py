"""The charts as PNG files, for places that take no HTML."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from groundwire.train.report.charts import Chart

__all__ = ["draw_pngs"]


def draw_pngs(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Write ``folder/<key>.png`` for each chart; the folder is made."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for chart in charts:
        figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
        base: dict[float, float] = {}
        for series in chart.series:
            xs, ys = zip(*series.points, strict=True)
            if chart.stacked:
                bottom = [base.get(x, 0.0) for x in xs]
                axes.bar(xs, ys, bottom=bottom, label=series.name, width=0.75)
                base |= {x: low + y for x, low, y in zip(xs, bottom, ys, strict=True)}
            elif series.bands:
                low = [max(0.0, y - band[0]) for y, band in zip(ys, series.bands, strict=True)]
                high = [max(0.0, band[1] - y) for y, band in zip(ys, series.bands, strict=True)]
                axes.errorbar(xs, ys, yerr=[low, high], marker="o", capsize=3, label=series.name)
            else:
                style = {"color": "0.7", "linewidth": 1} if series.faint else {"marker": "."}
                axes.plot(xs, ys, label=series.name, **style)
        axes.set(title=chart.title, xlabel="step", ylabel=chart.unit)
        axes.set_ylim(top=chart.top)
        if chart.top is not None:
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        files.append(folder / f"{chart.key}.png")
        figure.savefig(files[-1], dpi=130)
        pyplot.close(figure)
    return files
