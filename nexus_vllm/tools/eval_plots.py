"""Plots of `nexus-vllm eval`: score and log-probability against budget, where matplotlib is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nexus_vllm.tools.bench_plots import GREY, Line, Panel, colours, installed, write
from nexus_vllm.tools.bench_report import Plot
from nexus_vllm.tools.eval_plan import FULL
from nexus_vllm.tools.eval_report import MEASURES, PAIRED, Run, by_question, mean

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


def _panel(run: Run, setting: str, measure: str) -> Panel:
    places = {budget: float(place) for place, budget in enumerate(run.budgets)}
    methods = run.methods()
    shade = colours(methods)
    lines = []
    for index, method in enumerate(methods):
        points = _points(run, setting, method, measure, places)
        look: dict[str, Any] = {"color": shade[method], "marker": "o"}
        look["linestyle"] = DASHES[index // len(set(shade.values())) % len(DASHES)]
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
    run: Run, setting: str, method: Any, measure: str, places: dict[str, float]
) -> Sequence[tuple[float, float]]:
    found = {b: mean(by_question(run.pick(setting, method, b), measure)) for b in places}
    return [(places[budget], told.mean) for budget, told in found.items() if told.n]
