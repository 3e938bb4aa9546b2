"""Plots of `nexus-vllm eval`: score and log-probability against budget, or where the suite decodes
against decode steps; where matplotlib is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nexus_vllm.tools.bench_plots import GREY, Line, Panel, colours, installed, write
from nexus_vllm.tools.bench_report import Plot
from nexus_vllm.tools.eval_plan import FULL, Method
from nexus_vllm.tools.eval_report import MEASURES, PAIRED, Run, by_question, mean
from nexus_vllm.tools.eval_streams import Kind, against_steps, kinds

DASHES = ("-", "--", ":", "-.")  # there are more methods than colours


def draw(run: Run, folder: Path) -> list[Plot]:
    """Write folder/eval-MEASURE.svg, a panel per setting and a line per method."""
    made = []
    for measure in PAIRED:
        panels = [_panel(run, setting, measure) for setting in run.settings()]
        panels = [panel for panel in panels if not panel.empty()]
        if panels and installed():
            plot = Plot(f"eval-{measure}.svg", f"{MEASURES[measure]} against budget".capitalize())
            write(panels, len(panels), plot.caption, folder / plot.file, legend_columns=3)
            made.append(plot)
    return made


def draw_streams(run: Run, folder: Path) -> list[Plot]:
    """Write folder/eval-survival.svg: a row of panels per budget, a column per kind of line."""
    told = kinds(run)
    panels = [_against_steps(run, kind, budget) for budget in run.budgets for kind in told]
    if not panels or not installed():
        return []
    plot = Plot("eval-survival.svg", "Survival against decode steps")
    write(panels, len(told), plot.caption, folder / plot.file, legend_columns=3)
    return [plot]


def _against_steps(run: Run, kind: Kind, budget: str) -> Panel:
    def points(method: Method) -> Sequence[tuple[float, float]]:
        cells = against_steps(run, kind, method, budget, kind.shown)
        return [((c.start + c.end) / 2, c.found.mean) for c in cells if c.found.n]

    methods = run.methods()
    lines = [
        Line(run.shown(method), points(method), look) for method, look in _looks(methods).items()
    ]
    lines.append(Line("full cache", points(FULL), {"color": GREY, "linewidth": 0.8}))
    return Panel("decode steps", "share", lines, f"{kind.title}, {budget}")


def _looks(methods: Sequence[Method]) -> dict[Method, dict[str, Any]]:
    """How each method's line looks: dashes where colours come again."""
    shade = colours(methods)
    count = len(set(shade.values()))
    return {
        method: {
            "color": shade[method],
            "marker": "o",
            "linestyle": DASHES[index // count % len(DASHES)],
        }
        for index, method in enumerate(methods)
    }


def _panel(run: Run, setting: str, measure: str) -> Panel:
    places = {budget: float(place) for place, budget in enumerate(run.budgets)}
    lines = []
    for method, look in _looks(run.methods()).items():
        points = _points(run, setting, method, measure, places)
        lines.append(Line(run.shown(method) if points else "", points, look))
    full = _points(run, setting, FULL, measure, places)
    lines.append(Line("full cache" if full else "", full, {"color": GREY, "linewidth": 0.8}))
    return Panel(
        "budget",
        MEASURES[measure].partition(" (")[0],
        lines,
        setting,
        {place: budget for budget, place in places.items()},
        bottom=0.0 if measure == "score" else None,
    )


def _points(
    run: Run, setting: str, method: Method, measure: str, places: dict[str, float]
) -> Sequence[tuple[float, float]]:
    found = {b: mean(by_question(run.pick(setting, method, b), measure)) for b in places}
    return [(places[budget], told.mean) for budget, told in found.items() if told.n]
