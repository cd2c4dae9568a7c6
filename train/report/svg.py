"""A chart as SVG whose colours are the page's own, so that it is right in the dark and in the light.

Text is small in number: axes only. The legend is HTML beside the drawing, because it must wrap on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from groundwire.train.report.charts import Chart, Series

__all__ = ["draw", "ticks"]

_WIDTH, _HEIGHT = 480, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 12, 10, 32
_COLOURS = 8
_GAP = 0.25  # of a bar's place


def draw(chart: Chart) -> str:
    """The chart with its legend."""
    scale = _Scale(chart)
    marks = [*_axes(scale), *(_bars(chart, scale) if chart.stacked else _lines(chart, scale))]
    title = escape(chart.title)
    return (
        f'<figure id="chart-{escape(chart.key)}"><figcaption>{title} <small>{escape(chart.unit)}</small></figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}">{"".join(marks)}</svg>'
        f'<ul class="legend">{"".join(_legend(chart))}</ul></figure>'
    )


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * n, 10) for n in range(first, math.floor(high / step + 1e-9) + 1)]


class _Scale:
    """From values to places in the drawing."""

    def __init__(self, chart: Chart) -> None:
        xs = [x for series in chart.series for x, _ in series.points]
        self.first, self.last = min(xs), max(xs)
        self.bars = chart.stacked
        highest, lowest = _highest(chart), _lowest(chart)
        self.low = min(0.0, lowest)
        self.high = chart.top if chart.top is not None else (highest or 1.0) * (1.05 if highest > 0 else 1)
        if self.high <= self.low:
            self.high = self.low + 1

    def x(self, value: float) -> float:
        width = _WIDTH - _LEFT - _RIGHT
        if self.bars:  # each step has a place of its own
            return round(_LEFT + width * (value - self.first + 0.5) / (self.last - self.first + 1), 1)
        span = self.last - self.first
        return round(_LEFT + width * ((value - self.first) / span if span else 0.5), 1)

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(_HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(1.0, max(0.0, share)), 1)


def _highest(chart: Chart) -> float:
    if not chart.stacked:
        return max(value for series in chart.series for _, value in series.points)
    totals: dict[float, float] = {}
    for series in chart.series:
        for x, value in series.points:
            totals[x] = totals.get(x, 0.0) + value
    return max(totals.values())


def _lowest(chart: Chart) -> float:
    return min(value for series in chart.series for _, value in series.points)


def _axes(scale: _Scale) -> Iterator[str]:
    for value in ticks(scale.low, scale.high):
        y = scale.y(value)
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>'
    for value in ticks(scale.first, scale.last, 6):
        if value == int(value):
            yield f'<text x="{scale.x(value)}" y="{_HEIGHT - 10}" text-anchor="middle">{value:g}</text>'


def _lines(chart: Chart, scale: _Scale) -> Iterator[str]:
    for place, series in enumerate(chart.series):
        colour = _colour(series, place)
        path = " ".join(f"{scale.x(x)},{scale.y(y)}" for x, y in series.points)
        yield f'<polyline class="line {colour}" points="{path}"/>'
        for index, (x, y) in enumerate(series.points):
            if series.bands:
                low, high = series.bands[index]
                yield (
                    f'<line class="band {colour}" x1="{scale.x(x)}" x2="{scale.x(x)}" '
                    f'y1="{scale.y(low)}" y2="{scale.y(high)}"/>'
                )
            if not series.faint:
                yield _dot(series, colour, scale, x, y)


def _dot(series: Series, colour: str, scale: _Scale, x: float, y: float) -> str:
    radius = 3 if len(series.points) < 40 else 1.5
    return (
        f'<circle class="dot {colour}" cx="{scale.x(x)}" cy="{scale.y(y)}" r="{radius}">'
        f"<title>step {x:g}: {y:.4g}, {escape(series.name)}</title></circle>"
    )


def _bars(chart: Chart, scale: _Scale) -> Iterator[str]:
    width = (_WIDTH - _LEFT - _RIGHT) / (scale.last - scale.first + 1) * (1 - _GAP)
    base: dict[float, float] = {}
    for place, series in enumerate(chart.series):
        for x, value in series.points:
            if value <= 0:
                continue
            low = base.get(x, 0.0)
            base[x] = low + value
            top, bottom = scale.y(base[x]), scale.y(low)
            yield (
                f'<rect class="bar {_colour(series, place)}" x="{scale.x(x) - width / 2:.1f}" y="{top}" '
                f'width="{width:.1f}" height="{max(0.0, bottom - top):.1f}">'
                f"<title>step {x:g}: {value:.4g}, {escape(series.name)}</title></rect>"
            )


def _legend(chart: Chart) -> Iterator[str]:
    for place, series in enumerate(chart.series):
        yield f'<li><i class="key {_colour(series, place)}"></i>{escape(series.name)}</li>'


def _colour(series: Series, place: int) -> str:
    return "faint" if series.faint else f"c{place % _COLOURS}"
