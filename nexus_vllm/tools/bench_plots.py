"""Plots of `nexus-vllm bench` as SVG files, where matplotlib is installed."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nexus_vllm.tools.bench_report import Part, Plot
from nexus_vllm.tools.bench_servers import say

COLOURS = ("#0969da", "#d1570a", "#1a7f37", "#8250df", "#bf3989", "#7d6200")
GREY = "#6e7781"
# White stays white on a dark page; the same input gives the same bytes; text stays text.
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.edgecolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e1e4e8",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "none",
    "svg.hashsalt": "nexus-vllm bench",
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Line:
    """A series of points. `look`: keywords of matplotlib's `plot`.

    One without a label is left out of the legend, one without points is in the legend only.
    """

    label: str
    points: Sequence[tuple[float, float]]
    look: Mapping[str, Any]


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    `ticks`: x -> its text; `mark`: y of a thin line; `log`: "x", "y", "xy"; `bottom`: least y, None
    for what the points need.
    """

    x: str
    y: str
    lines: list[Line]
    title: str = ""
    ticks: Mapping[float, str] = field(default_factory=dict)
    mark: float | None = None
    log: str = ""
    bottom: float | None = 0.0

    def empty(self) -> bool:
        return not any(line.points for line in self.lines)


def draw(parts: Sequence[Part], folder: Path) -> dict[str, list[Plot]]:
    """Write folder/plot-LETTER.svg for each part with something to show: letter -> its plots."""
    found: dict[str, list[Plot]] = {}
    for part in parts:
        if part.letter not in DRAWN or not installed():
            continue
        caption, panels_of, columns = DRAWN[part.letter]
        panels = [panel for panel in panels_of(part.data) if not panel.empty()]
        if panels:
            plot = Plot(f"plot-{part.letter}.svg", caption)
            write(panels, min(columns, len(panels)), caption, folder / plot.file)
            found[part.letter] = [plot]
    return found


@cache  # says it once
def installed() -> bool:
    try:
        from matplotlib import figure, style  # noqa: F401
    except ImportError:
        say("no plots without matplotlib: pip install matplotlib")
        return False
    return True


def _decode_speed(data: Mapping[str, Any]) -> list[Panel]:
    """Part b: a panel per batch, a colour per context; the ideal counts bytes."""
    ideals: dict[tuple[float, float], float] = {}  # stock's, ms
    rows: list[tuple[float, float, float, float, float]] = []
    for row in _rows(data):
        batch, context, ideal = (_number(row.get(key)) for key in ("batch", "context", "ideal_ms"))
        density = re.fullmatch(r"ours (\d+(?:\.\d+)?)\s*%", str(row.get("who")))
        if math.isnan(batch + context):
            continue
        if row.get("who") == "stock":
            ideals[batch, context] = ideal
        elif density:
            speed = _number(row.get("against_stock"))
            rows.append((batch, context, float(density[1]), speed, ideal))
    rows.sort(key=lambda row: (row[0], row[1], -row[2]))
    places = {d: float(i) for i, d in enumerate(sorted({row[2] for row in rows}, reverse=True))}
    colour = colours(sorted({row[1] for row in rows}))
    panels = []
    for batch in sorted({row[0] for row in rows}):
        lines = []
        for context in colour:
            own = [row for row in rows if row[:2] == (batch, context)]
            stock = ideals.get((batch, context), math.nan)
            speeds = ((places[row[2]], row[3]) for row in own)
            best = ((places[row[2]], stock / row[4] if row[4] > 0 else math.nan) for row in own)
            look: dict[str, Any] = {"color": colour[context]}
            lines.append(_line(f"{context:,.0f} tokens", speeds, **look, marker="o"))
            lines.append(_line("", best, **look, linestyle="--", linewidth=1))
        if any(line.points for line in lines[1::2]):
            look = {"color": GREY, "linestyle": "--", "linewidth": 1}
            lines.append(Line("ideal by bytes read", (), look))
        panels.append(
            Panel(
                "density",
                "decode speed, times stock's",
                lines,
                f"batch of {batch:.0f}",
                {place: f"{density:g} %" for density, place in places.items()},
                1.0,
            )
        )
    return panels


def _small_pool(data: Mapping[str, Any]) -> list[Panel]:
    """Part c: gauges of both servers in the first round, [seconds, running, waiting, usage]."""
    timelines = data.get("timelines") or {}
    looks: dict[str, dict[str, Any]] = {
        "stock": {"color": GREY, "drawstyle": "steps-post"},
        "ours": {"color": COLOURS[0], "drawstyle": "steps-post"},
    }

    def lines(column: int, scale: float) -> list[Line]:
        return [
            _line(who, _columns(timelines.get(who), column, scale), **look)
            for who, look in looks.items()
        ]

    seconds = "seconds"
    return [
        Panel(seconds, "running sequences", lines(1, 1)),
        Panel(seconds, "pool in use, %", lines(3, 100)),
    ]


def _long_stream(data: Mapping[str, Any]) -> list[Panel]:
    """Part e: a colour per allocator, a marker per phase."""
    streams = data.get("streams") or {}
    series = {name: (told or {}).get("series") or [] for name, told in streams.items()}
    pages, times, phases = [], [], set()
    for name, colour in colours(series).items():
        pages.append(_line(name, _columns(series[name], 1), color=colour))
        times.append(Line(name, (), {"color": colour}))
        for phase, look in PHASES.items():
            own = [row for row in series[name] if row and row[-1] == phase]
            line = _line("", _columns(own, 2), above=0, color=colour, **look)
            times.append(line)
            if line.points:
                phases.add(phase)
    times += [Line(p, (), {"color": GREY} | look) for p, look in PHASES.items() if p in phases]
    tokens = "tokens of the stream"
    return [Panel(tokens, "pages held", pages), Panel(tokens, "step time, ms", times, log="y")]


def _eviction_cost(data: Mapping[str, Any]) -> list[Panel]:
    """Part f: a colour per allocator; the decode step is the mean over allocators."""
    evictions: dict[str, list[tuple[float, float]]] = {}
    steps: dict[float, list[float]] = {}
    for row in _rows(data):
        blocks = _number(row.get("live_blocks"))
        if math.isnan(blocks):
            continue
        point = (blocks, _number(row.get("eviction_ms")))
        evictions.setdefault(str(row.get("allocator")), []).append(point)
        step = _number(row.get("decode_step_ms"))
        if not math.isnan(step):
            steps.setdefault(blocks, []).append(step)
    colour = colours(evictions)
    lines = [
        _line(f"eviction, {name}", sorted(points), above=0, color=colour[name], marker="o")
        for name, points in evictions.items()
    ]
    means = sorted((blocks, sum(own) / len(own)) for blocks, own in steps.items())
    lines.append(_line("decode step", means, above=0, color=GREY, linestyle="--", marker="o"))
    ticks = {x: f"{x:,.0f}" for line in lines for x, _ in line.points}
    return [Panel("live blocks", "ms", lines, ticks=ticks, log="xy")]


PHASES: dict[str, dict[str, Any]] = {
    "fed": {"linestyle": "", "marker": "o", "markersize": 3},
    "generated": {"linestyle": "", "marker": "x", "markersize": 5},
}
# Letter -> caption, the panels of a part's data, and how many stand side by side.
DRAWN: dict[str, tuple[str, Callable[[Mapping[str, Any]], list[Panel]], int]] = {
    "b": ("Decode speed by density, as a multiple of stock's", _decode_speed, 3),
    "c": ("Running sequences and use of the pool over the first round", _small_pool, 1),
    "e": ("Pages held and step time over a long stream", _long_stream, 1),
    "f": ("Time of an eviction and of a decode step by live blocks", _eviction_cost, 1),
}


def _number(value: object) -> float:
    """NaN for what is none, or is infinite."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return math.nan


def _rows(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in data.get("rows") or [] if isinstance(row, Mapping)]


def _columns(
    rows: Iterable[Sequence[Any]] | None, column: int, scale: float = 1
) -> list[tuple[float, float]]:
    """The first column and another one, times `scale`."""
    whole = (row for row in rows or [] if row and len(row) > column)
    return [(_number(row[0]), scale * _number(row[column])) for row in whole]


def _line(
    label: str, points: Iterable[tuple[float, float]], above: float = -math.inf, **look: Any
) -> Line:
    """Without the points that have a number missing or too small; no label if none is left."""
    kept = [point for point in points if min(point) > above and not math.isnan(sum(point))]
    return Line(label if kept else "", kept, look)


def colours(names: Iterable[Any]) -> dict[Any, str]:
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


def write(
    panels: Sequence[Panel], columns: int, caption: str, path: Path, legend_columns: int = 5
) -> None:
    """An SVG file of the panels, row by row, under a legend of all their lines."""
    from matplotlib import style
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / columns)
    stacked = columns == 1
    labels = {line.label for panel in panels for line in panel.lines if line.label}
    height = 0.3 + 0.2 * math.ceil(len(labels) / legend_columns) + 2.5 * rows
    with style.context(["default", STYLE]):
        figure = Figure(figsize=(max(6.5, 3 * columns), height), layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=stacked, sharey=not stacked)
        for axes in grid.flat[len(panels) :]:
            axes.remove()
        placed = list(zip(grid.flat, panels, strict=False))
        legend: dict[str, Any] = {}
        for axes, panel in placed:
            for line in panel.lines:
                xs, ys = [x for x, _ in line.points], [y for _, y in line.points]
                (drawn,) = axes.plot(xs, ys, **line.look)
                if line.label:
                    legend.setdefault(line.label, drawn)
        for index, (axes, panel) in enumerate(placed):  # a set limit is one for shared axes too
            _set_axes(axes, panel)
            if not stacked or index == len(panels) - 1:
                axes.set_xlabel(panel.x)
            if index % columns == 0:
                axes.set_ylabel(panel.y)
        figure.legend(
            legend.values(),
            legend.keys(),
            loc="outside upper center",
            ncols=min(legend_columns, len(legend)),
        )
        metadata = {"Title": caption, "Date": None, "Creator": None}
        figure.savefig(path, format="svg", metadata=metadata)


def _set_axes(axes: Any, panel: Panel) -> None:
    """Scales, limits and ticks, once everything is drawn."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        if name in panel.log:
            axes.set(**{f"{name}scale": "log"})
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(plain)
    if "y" not in panel.log and panel.bottom is not None:
        axes.set_ylim(bottom=panel.bottom)
    if panel.ticks:
        axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
    if panel.mark is not None:
        axes.axhline(panel.mark, color=GREY, linewidth=0.8)
    if panel.title:
        axes.set_title(panel.title)
