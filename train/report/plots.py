"""Draws the charts with matplotlib: as SVG for the report's page, as PNG files, and the run's ``curve.png``.

The SVG takes its colours and fonts from the page's CSS, so it fits a dark and a light page. Its title and legend are
HTML, which wraps on a phone; its texts are numbers, and in tooltips the escaped names of series.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from groundwire.train.report.charts import Chart, accuracy_chart

__all__ = ["css_class", "draw_curve", "draw_pngs", "svg"]

_COLORS = ("#2f6fde", "#d9730d", "#16915a", "#c23a7a", "#7a52cc", "#0f8f9c", "#9a7b12", "#7c8088")
_TEXT, _GRID = "#63676e", "#dcdee2"
_CSS_COLORS = {_TEXT: "var(--soft)", _GRID: "var(--line)"} | {
    color: f"var(--c{number})" for number, color in enumerate(_COLORS)
}
_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "groundwire", "text.parse_math": False, "path.simplify": True}
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_SVG = "http://www.w3.org/2000/svg"
_LARGE_MARKERS = 40  # a line with as many points or more has small ones

ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")


def draw_curve(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw training reward and validation accuracy, from the lines of ``metrics.jsonl``, into the PNG file ``path``."""
    _save_png(accuracy_chart(metrics), path)


def draw_pngs(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Write ``folder/<key>.png`` for each chart; creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{chart.key}.png" for chart in charts]
    for chart, file in zip(charts, files, strict=True):
        _save_png(chart, file)
    return files


def svg(chart: Chart) -> str:
    """The chart as an ``<svg>`` element, without title and legend. Each point has a tooltip."""
    from io import StringIO

    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        figure, axes = _draw(chart, size=(6.4, 3.4))
        figure.subplots_adjust(left=0.12, right=0.98, bottom=0.1, top=0.97)
        for artist in axes.get_children():
            artist.set_clip_on(False)  # else each refers to a clip path by url(), and the page has no addresses
        for line in (*axes.get_xgridlines(), *axes.get_ygridlines()):
            line.set_clip_on(False)
        file = StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=_NO_METADATA)
    root = ElementTree.fromstring(file.getvalue())  # noqa: S314 (matplotlib has just written it)
    _add_tooltips(root, chart)
    _use_page_fonts(root)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": chart.title}
    text = ElementTree.tostring(root, encoding="unicode")
    return re.sub("|".join(_CSS_COLORS), lambda match: _CSS_COLORS[match[0]], text)


def css_class(chart: Chart, number: int) -> str:
    """The CSS class for the colour of a series."""
    return "faint" if chart.series[number].faint else f"c{number % len(_COLORS)}"


def _save_png(chart: Chart, path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        figure, axes = _draw(chart, size=(7, 4))
        figure.subplots_adjust(left=0.12, right=0.98, bottom=0.12, top=0.92)
        axes.set_title(chart.title)
        axes.set(xlabel="step", ylabel=chart.unit)
        if chart.series:
            axes.legend(fontsize="small")
        figure.savefig(path, dpi=130)


def _draw(chart: Chart, *, size: tuple[float, float]) -> Any:
    """The figure and its axes. The caller places the axes: a constrained layout takes twice the time."""
    from matplotlib.figure import Figure  # not pyplot, whose state the threads of a server would share
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=size)
    axes = figure.subplots()
    (_draw_bars if chart.stacked else _draw_lines)(chart, axes)
    axes.grid(color=_GRID, linewidth=0.8, axis="y")
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, labelcolor=_TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=None if axes.dataLim.y0 < 0 else 0, top=chart.top)
    return figure, axes


def _draw_lines(chart: Chart, axes: Any) -> None:
    for number, series in enumerate(chart.series):
        xs, ys = zip(*series.points, strict=True)
        color = _TEXT if series.faint else _COLORS[number % len(_COLORS)]
        if series.bands:
            axes.vlines(xs, *zip(*series.bands, strict=True), color=color, alpha=0.55, linewidth=1.5)
        style = {"linewidth": 1, "alpha": 0.6} if series.faint else {"linewidth": 2, "marker": "o"}
        size = 5 if len(xs) < _LARGE_MARKERS else 2.5
        axes.plot(xs, ys, color=color, markersize=size, label=series.name, gid=f"series-{number}", **style)


def _draw_bars(chart: Chart, axes: Any) -> None:
    base: dict[float, float] = {}
    for number, series in enumerate(chart.series):
        xs, ys = zip(*series.points, strict=True)
        bottom = [base.get(x, 0.0) for x in xs]
        bars = axes.bar(xs, ys, bottom=bottom, color=_COLORS[number % len(_COLORS)], width=0.75, label=series.name)
        for place, bar in enumerate(bars):
            bar.set_gid(f"series-{number}-{place}")
        base |= {x: low + y for x, low, y in zip(xs, bottom, ys, strict=True)}


def _add_tooltips(root: ElementTree.Element, chart: Chart) -> None:
    elements = {element.get("id"): element for element in root.iter() if element.get("id")}
    for number, series in enumerate(chart.series):
        if chart.stacked:
            marks = [elements.get(f"series-{number}-{place}") for place in range(len(series.points))]
        else:
            marks = list(elements[f"series-{number}"].iter(f"{{{_SVG}}}use"))
        for mark, (x, y) in zip(marks, series.points, strict=False):
            if mark is not None:
                ElementTree.SubElement(mark, f"{{{_SVG}}}title").text = f"step {x:g}: {y:.4g}, {series.name}"


def _use_page_fonts(root: ElementTree.Element) -> None:
    for text in root.iter(f"{{{_SVG}}}text"):
        anchor = re.search(r"text-anchor: \w+", text.get("style", ""))
        text.set("style", anchor[0] if anchor else "")
