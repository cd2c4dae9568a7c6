"""The charts of a run: as data, and drawn with matplotlib as SVG for the page, as PNG files, and as ``curve.png``.

The SVG takes its colours and fonts from the page's CSS, so it fits a dark and a light page. Its title and legend are
HTML, which wraps on a phone; its texts are numbers, and in tooltips the escaped names of series.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from groundwire.train.algorithms.health import MAX_SAMPLER_KL, MAX_TRUNCATED, MIN_ENTROPY_SHARE, MIN_GRADIENT_SHARE
from groundwire.train.evaluation.validation import VALIDATIONS
from groundwire.train.step_timer import PHASES

Metrics = Sequence[Mapping[str, Any]]
_HEALTH = (
    (
        *("shares", "Health: shares", "share"),
        ("gradient_share", "clip_fraction", "truncated_share", "unchecked_share"),
        f"Good: groups with a gradient above {MIN_GRADIENT_SHARE}. Bad: more than {MAX_TRUNCATED} of replies are cut.",
    ),
    (
        *("entropy", "Health: entropy", "nats per token", ("entropy",)),
        f"Good: falls slowly. Bad: below {MIN_ENTROPY_SHARE:.0%} of its first values, where all replies are alike.",
    ),
    (
        *("divergence", "Health: KL divergence", "nats per token", ("sampler_kl", "kl")),
        f"Good: near 0. Bad: more than {MAX_SAMPLER_KL} from the sampler, whose replies are then not the policy's.",
    ),
    (
        *("gradient", "Health: gradient norm", "norm", ("grad_norm",)),
        "Good: steady. Bad: 0 for steps on end (nothing to learn from), or ever larger.",
    ),
    (
        *("tokens", "Tokens of a step", "tokens", ("tokens_generated", "tokens_trained")),
        "Good: close together. Bad: few are trained, as groups had equal rewards or rollouts failed.",
    ),
)
"""Key, title and unit of a chart, its figures, which :mod:`groundwire.train.algorithms.health` describes, and what is
good or bad."""
_WORDS = {
    "gradient_share": "groups with a gradient",
    "clip_fraction": "clipped tokens",
    "truncated_share": "replies cut at max_tokens",
    "unchecked_share": "right answers that no variant checked",
    "sampler_kl": "from the sampler, before the update",
    "kl": "from the policy before the update",
    "grad_norm": "gradient norm before clipping",
    "tokens_generated": "sampled tokens",
    "tokens_trained": "trained tokens",
    "sql": "SQL queries",
    "agent": "the agent's own code",
}
"""Of figures, in legends; without one a figure's name is its words."""
_OTHER_KEYS = ("accuracy", "reward_components", "length", "failures", "time", *(key for key, *_ in _HEALTH))

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


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points (step, value); ``bands`` has the interval [low, high] of each, or is empty."""

    name: str
    points: Sequence[tuple[float, float]]
    bands: Sequence[tuple[float, float]] = ()
    faint: bool = False


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Several series over the steps, or another ``x``: lines, or ``stacked`` bars.

    ``top`` is a fixed upper end of the value axis; ``reading`` says what is good or bad.
    """

    key: str
    title: str
    unit: str
    series: Sequence[Series]
    stacked: bool = False
    top: float | None = None
    reading: str = ""
    x: str = "step"


def charts(metrics: Metrics, lengths: Mapping[int, Any]) -> list[Chart]:
    """The charts that have data. ``lengths`` are the mean tokens of each step: ``{"reply": …, "prompt": …}``."""
    steps = [line for line in metrics if line["step"] > 0]
    by_step = {line["step"]: line for line in steps}
    components = {step: line.get("reward_components", {}) for step, line in by_step.items()}
    made = [
        accuracy_chart(metrics),
        *_breakdown_charts(metrics),
        Chart(
            key="reward_components",
            title="Reward components",
            unit="mean",
            series=_lines(components),
            reading="Good: the part that the task is about rises. Bad: only an easy part does, such as a format.",
        ),
        Chart(
            key="length",
            title="Length of replies and prompts",
            unit="tokens per call",
            series=_lines(lengths),
            reading="Bad: replies grow to max_tokens, or shrink to nothing, while accuracy does not rise.",
        ),
        *(
            Chart(key=key, title=title, unit=unit, series=_in_words(_lines(by_step, names)), reading=reading)
            for key, title, unit, names, reading in _HEALTH
        ),
        Chart(
            key="failures",
            title="Failures by type",
            unit="rollouts",
            stacked=True,
            series=_in_words(_bars(steps, "failures")),
            reading="Good: none, or fewer and fewer.",
        ),
        Chart(
            key="time",
            title="Time of a step",
            unit="seconds",
            stacked=True,
            series=_in_words(_bars(steps, "seconds", PHASES)),
            reading="Good: sampling and update take most of it. Bad: waiting does, for slow tools or servers.",
        ),
    ]
    return [chart for chart in made if chart.series]


def accuracy_chart(metrics: Metrics) -> Chart:
    """Training reward, and validation accuracy with its confidence interval; without series if there is no data."""
    rewards = [(line["step"], line["reward"]) for line in metrics if line.get("reward") is not None]
    series = [Series(name="training reward (sampled)", points=rewards, faint=True)]
    for key, way in VALIDATIONS.items():
        results = {line["step"]: line[key] for line in metrics if line.get(key, {}).get("accuracy") is not None}
        points = [(step, result["accuracy"]) for step, result in results.items()]
        bands = [(low, high) for low, high in (result["ci95"] for result in results.values())]
        series.append(Series(name=f"validation, {way}", points=points, bands=bands))
    values = [value for one in series for _, value in one.points]
    graded = any(line.get(key, {}).get("metric_name") == "mean reward" for line in metrics for key in VALIDATIONS)
    return Chart(
        key="accuracy",
        title="Reward and accuracy",
        unit="mean reward" if graded else "share of questions",
        top=None if graded or any(not 0 <= value <= 1 for value in values) else 1.0,
        reading="Good: validation rises, its last interval above the first. Training has other tasks at each step.",
        series=[one for one in series if one.points],
    )


def _breakdown_charts(metrics: Metrics) -> list[Chart]:
    """A chart for each ``by_<column>`` of the greedy validation. Its key, a file name, differs from all others."""
    columns: defaultdict[str, dict[int, dict[str, float]]] = defaultdict(dict)
    for line in metrics:
        for key, by_value in line.get("validation", {}).items():
            if key.startswith("by_"):
                columns[key][line["step"]] = {value: metrics["accuracy"] for value, metrics in by_value.items()}
    return [
        Chart(
            key=key if (column := key.removeprefix("by_")) in _OTHER_KEYS else re.sub(r"[^\w-]", "_", column),
            title=f"Accuracy {key.replace('_', ' ')}",
            unit="share of questions (greedy)",
            top=None if any((value or 0) > 1 for of_step in by_step.values() for value in of_step.values()) else 1.0,
            series=_lines(by_step),
            reading="Good: rises. A line of few questions moves by chance.",
        )
        for key, by_step in columns.items()
    ]


def _lines(values: Mapping[int, Mapping[str, Any]], names: Iterable[str] = ()) -> list[Series]:
    """A series for each of the ``names``, by default of all, that has a value in some step."""
    series = [
        Series(
            name=name,
            points=[(step, line[name]) for step, line in sorted(values.items()) if line.get(name) is not None],
        )
        for name in names or dict.fromkeys(name for line in values.values() for name in line)
    ]
    return [one for one in series if one.points]


def _in_words(series: Iterable[Series]) -> list[Series]:
    return [replace(one, name=_WORDS.get(one.name, one.name.replace("_", " "))) for one in series]


def _bars(steps: Metrics, key: str, order: Sequence[str] = ()) -> list[Series]:
    """A series for each name that is not always 0, with a value for each step."""
    zeros = dict.fromkeys([*order, *(name for line in steps for name in line.get(key, {}))], 0)
    series = _lines({line["step"]: zeros | line.get(key, {}) for line in steps})
    return [one for one in series if any(value for _, value in one.points)]


def draw_curve(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw training reward and validation accuracy, from the lines of ``metrics.jsonl``, into the PNG file ``path``."""
    _save_png(accuracy_chart(metrics), path)


def curve_html(metrics: Sequence[Mapping[str, Any]]) -> str:
    """The same picture as an element of a page, or an empty text if nothing is there to be drawn."""
    if not (chart := accuracy_chart(metrics)).series:
        return ""
    _save_png(chart, file := BytesIO())
    return f'<img width="560" alt="{chart.title}" src="data:image/png;base64,{b64encode(file.getvalue()).decode()}">'


def draw_pngs(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Write ``folder/<key>.png`` for each chart; creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{chart.key}.png" for chart in charts]
    for file, chart in zip(files, charts, strict=True):
        _save_png(chart, file)
    return files


def svg(chart: Chart) -> str:
    """The chart as an ``<svg>`` element, without title and legend. Each point has a tooltip."""
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        figure, axes = _draw(chart, size=(6.4, 3.4))
        figure.subplots_adjust(left=0.15, right=0.96, bottom=0.13, top=0.95)
        for artist in axes.get_children():
            artist.set_clip_on(False)  # else each refers to a clip path by url(), and the page has no addresses
        for line in (*axes.get_xgridlines(), *axes.get_ygridlines()):
            line.set_clip_on(False)
        file = StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=_NO_METADATA)
    root = ElementTree.fromstring(file.getvalue())  # noqa: S314 (matplotlib has just written it)
    _add_tooltips(root, chart)
    for text in root.iter(f"{{{_SVG}}}text"):  # its font is the page's
        anchor = re.search(r"text-anchor: \w+", text.get("style", ""))
        text.set("style", anchor[0] if anchor else "")
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": chart.title}
    drawing = ElementTree.tostring(root, encoding="unicode")
    return re.sub("|".join(_CSS_COLORS), lambda match: _CSS_COLORS[match[0]], drawing)


def css_class(chart: Chart, number: int) -> str:
    """The CSS class for the colour of a series."""
    return "faint" if chart.series[number].faint else f"c{number % len(_COLORS)}"


def _save_png(chart: Chart, path: Path | BytesIO) -> None:
    import matplotlib

    with matplotlib.rc_context(_SETTINGS):
        figure, axes = _draw(chart, size=(7, 4))
        figure.subplots_adjust(left=0.14, right=0.97, bottom=0.12, top=0.92)
        axes.set_title(chart.title)
        axes.set(xlabel=chart.x, ylabel=chart.unit)
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
    axes.tick_params(length=0, pad=7, labelcolor=_TEXT)  # below a line of zeros
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(_tick)
    axes.yaxis.set_major_formatter(_tick)
    if len(steps := {x for series in chart.series for x, _ in series.points}) == 1:
        axes.set(xlim=(min(steps) - 1, min(steps) + 1), xticks=list(steps))
    axes.set_ylim(bottom=None if axes.dataLim.y0 < 0 else 0, top=chart.top)
    return figure, axes


def _tick(value: float, _place: object = None) -> str:
    """A number in few characters, which fit beside the axis."""
    for least, size, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= least:
            return f"{value / size:,.4g}{unit}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _draw_lines(chart: Chart, axes: Any) -> None:
    for number, series in enumerate(chart.series):
        xs, ys = zip(*series.points, strict=True)
        color = _TEXT if series.faint else _COLORS[number % len(_COLORS)]
        if series.bands:
            axes.vlines(xs, *zip(*series.bands, strict=True), color=color, alpha=0.55, linewidth=1.5)
        style = {"linewidth": 1, "alpha": 0.6} if series.faint and len(xs) > 1 else {"linewidth": 2, "marker": "o"}
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
                ElementTree.SubElement(mark, f"{{{_SVG}}}title").text = f"{chart.x} {x:g}: {y:.4g}, {series.name}"
