"""Statistics and report of `nexus-vllm eval`, against values worked out by hand."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from nexus_vllm.tools import bench_plots, eval_plots
from nexus_vllm.tools.eval_plan import FULL, Method
from nexus_vllm.tools.eval_report import (
    FEWEST,
    Interval,
    Run,
    as_json,
    bootstrap,
    by_question,
    by_task,
    difference,
    measured,
    paired,
    render,
    summary,
    table,
)
from nexus_vllm.tools.eval_suite import load

NEXUS, RANDOM = Method("nexus", "uniform"), Method("random", "uniform")


def line(
    question: int,
    score: float,
    method: Method = NEXUS,
    budget: str = "20%",
    setting: str = "in-window",
    seed: int = 0,
    **more: Any,
) -> dict[str, Any]:
    told = {
        "sample": question // 2,
        "question": question % 2,
        "setting": setting,
        "policy": method.policy,
        "allocator": method.allocator,
        "budget": budget,
        "seed": seed,
        "task": "fact" if question % 2 else "passkey",
        "score": score,
        "right": int(2 * score),
        "tokens": 2,
        "logprob": score - 2,
        "whole": True,
        "served": method.allocator,
        "blind": 1.0 if setting == "later" else 0.0,
        "end": 0.5,
    }
    return told | more


def full(question: int) -> dict[str, Any]:
    return line(question, 1.0, FULL, "full", "-")


def test_the_interval_of_one_value_is_that_value() -> None:
    assert bootstrap([0.3]) == Interval(0.3, 0.3, 0.3, 1)


def test_the_interval_of_two_values_holds_both() -> None:
    # Means of two draws are 0, 1/2 and 1 with probabilities 1/4, 1/2, 1/4.
    assert bootstrap([0.0, 1.0]) == Interval(0.5, 0.0, 1.0, 2)


def test_the_interval_of_many_values_is_nearly_normal() -> None:
    found = bootstrap([0.0, 1.0] * 200)
    half = 1.96 * math.sqrt(0.25 / 400)
    assert found.mean == 0.5
    assert found.low == pytest.approx(0.5 - half, abs=0.006)
    assert found.high == pytest.approx(0.5 + half, abs=0.006)


def test_the_interval_depends_on_the_seed_alone() -> None:
    values = [0.1, 0.5, 0.2, 0.9, 0.4]
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap(values) != bootstrap(values, seed=1)


def test_nothing_has_no_mean() -> None:
    found = bootstrap([])
    assert math.isnan(found.mean)
    assert (found.n, str(found), found.signed()) == (0, "-", "-")


def test_seeds_are_averaged_before_questions() -> None:
    lines = [line(0, 1.0), line(0, 0.0, seed=1), line(0, 0.5, seed=2), line(1, 1.0)]
    assert by_question(lines, "score") == {(0, 0): 0.5, (0, 1): 1.0}


def test_log_probability_is_per_token_and_half_an_answer_has_no_accuracy() -> None:
    whole = line(0, 0.0, right=1, tokens=4, logprob=-2.0)
    assert (measured(whole, "logprob"), measured(whole, "accuracy")) == (-0.5, 0.25)
    assert measured(whole | {"whole": False}, "accuracy") is None
    listed = line(0, 0.5, right=0, tokens=0, logprob=None)
    assert [measured(listed, m) for m in ("score", "accuracy", "logprob")] == [0.5, None, None]


def test_a_difference_is_paired_by_question() -> None:
    theirs = {(0, q): value for q, value in enumerate((0.1, 0.9, 0.3, 0.7))}
    ours = {asked: value + 0.05 for asked, value in theirs.items()}
    found = difference(ours, theirs)
    # Unpaired, such a spread would hide it.
    assert (found.mean, found.low, found.high) == pytest.approx((0.05, 0.05, 0.05))
    assert found.signed() == "+0.05 [+0.05, +0.05]"


def test_a_difference_is_bold_where_it_is_sure() -> None:
    assert Interval(0.1, 0.01, 0.2, FEWEST).signed() == "**+0.10 [+0.01, +0.20]**"
    assert Interval(-0.1, -0.2, -0.01, FEWEST).signed() == "**-0.10 [-0.20, -0.01]**"
    assert Interval(0.1, 0.0, 0.2, FEWEST).signed() == "+0.10 [+0.00, +0.20]"
    assert Interval(0.1, 0.01, 0.2, FEWEST - 1).signed() == "+0.10 [+0.01, +0.20]"


def test_a_difference_is_of_the_questions_that_both_have() -> None:
    assert difference({(0, 0): 1.0, (0, 1): 1.0}, {(0, 1): 0.5, (0, 2): 0.0}).mean == 0.5
    assert difference({(0, 0): 1.0}, {}).n == 0


def run(lines: list[dict[str, Any]], **more: Any) -> Run:
    given: dict[str, Any] = {
        "suite": load("quick"),
        "lines": lines,
        "budgets": ("20%", "10%"),
        "baseline": NEXUS,
        "told": {"machine": "a computer", "command": "nexus-vllm eval MODEL"},
    }
    return Run(**given | more)


LINES = [
    *(full(question) for question in range(4)),
    *(line(question, score) for question, score in enumerate((1.0, 1.0, 0.0, 1.0))),
    *(line(question, 0.0, RANDOM) for question in range(4)),
    line(0, 1.0, RANDOM, "10%"),
    *(line(question, 0.5, setting="later") for question in range(4)),
]


def test_rows_are_methods_and_columns_budgets() -> None:
    found = table(run(LINES), "in-window", "score")
    assert found.columns == ["policy, allocator", "20%", "10%"]
    # Of four draws from three ones and a zero, none or at most one in four hundred is all zeros.
    assert found.rows == [
        ["full cache", "1.00 [1.00, 1.00]", "1.00 [1.00, 1.00]"],
        ["nexus, uniform", "0.75 [0.25, 1.00]", "-"],
        ["random, uniform", "0.00 [0.00, 0.00]", "1.00 [1.00, 1.00]"],
    ]


def test_differences_are_at_the_same_budget() -> None:
    assert paired(run(LINES), "in-window", "score", NEXUS).rows == [
        ["random, uniform", "-0.75 [-1.00, -0.25]", "-"]
    ]
    assert paired(run(LINES), "in-window", "score", FULL).rows == [
        ["nexus, uniform", "-0.25 [-0.75, +0.00]", "-"],
        ["random, uniform", "-1.00 [-1.00, -1.00]", "+0.00 [+0.00, +0.00]"],
    ]


def test_tasks_are_told_apart() -> None:
    found = by_task(run(LINES), "in-window")
    assert found.columns == ["policy, allocator", "budget", "passkey", "fact"]
    assert ["nexus, uniform", "20%", "0.50 (2)", "1.00 (2)"] in found.rows
    assert ["random, uniform", "10%", "1.00 (1)", "-"] in found.rows


def test_the_report_has_a_chapter_per_setting_and_says_where_it_comes_from() -> None:
    text = render(run(LINES))
    assert "## Question in the window" in text
    assert "## Question later" in text
    assert "- machine: a computer" in text
    assert "- command: nexus-vllm eval MODEL" in text
    assert "- questions: 4 about 2 haystacks of 2048 tokens" in text
    assert "### Score, minus nexus, uniform" in text
    assert "### Log-probability per answer token, minus full cache" in text
    assert "in 0 of 4 results the answer lay behind it" in text
    assert "failed" not in text


def test_the_report_says_what_is_wrong_with_it() -> None:
    spent = {"requests": 4, "seconds": 1.5, "server": "vllm serve MODEL"}
    passes = [
        {"name": "1 noise", "asked": 9000, "found": 6000, "due": 6000, **spent},
        {"name": "2 noise", "asked": 9000, "found": 100, "due": 6000, **spent},
    ]
    lines = [*LINES, line(0, 0.0, setting="later", seed=1, whole=False, blind=0.4)]
    text = render(run(lines, passes=passes, failures=["nexus, 20%: HTTP 500: bad"]))
    assert text.count("- server: vllm serve MODEL\n") == 1
    assert "8 requests in 3 s" in text
    assert "6100 of 18000 prompt tokens found in it, at least 12000 were to be" in text
    assert "**haystacks computed more than once: 2 noise**" in text
    assert "**1 requests failed**" in text
    assert "- nexus, 20%: HTTP 500: bad" in text
    assert "1 answers were not forced" in text
    assert "at 40% to 100% of the haystack; in 1 of 5 results the answer lay behind it" in text


def test_without_a_baseline_the_full_cache_is_one() -> None:
    text = render(run([item for item in LINES if item["policy"] != "nexus"]))
    assert "minus nexus" not in text
    assert "minus full cache" in text


def test_auto_says_what_it_came_to() -> None:
    auto = Method("nexus", "auto")
    assert run([line(0, 1.0, auto, served="lu")]).shown(auto) == "nexus, auto (lu)"
    both = [line(0, 1.0, auto, served="lu"), line(1, 1.0, auto, served="uniform")]
    assert run(both).shown(auto) == "nexus, auto"


def test_json_has_every_cell_with_its_numbers() -> None:
    told = json.loads(as_json(run(LINES)))
    cells = {(c["setting"], c["policy"], c["budget"]): c for c in told["cells"]}
    nexus = cells["in-window", "nexus", "20%"]
    assert nexus["score"] == {"mean": 0.75, "low": 0.25, "high": 1.0, "n": 4}
    assert nexus["score minus full cache"]["mean"] == -0.25
    assert cells["in-window", "random", "20%"]["logprob minus nexus, uniform"]["mean"] == -0.375
    assert cells["in-window", "nexus", "10%"]["score"]["mean"] is None
    assert told["told"]["machine"] == "a computer"


def test_the_summary_has_a_table_per_setting() -> None:
    text = summary(run(LINES))
    assert "Question in-window: score" in text
    assert "Question later: score" in text
    assert "| full cache |" in text


def test_plots_show_each_method_against_budgets(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = eval_plots.draw(run(LINES), tmp_path)
    assert [plot.file for plot in found] == ["eval-score.svg", "eval-logprob.svg"]
    for plot in found:
        text = (tmp_path / plot.file).read_text()
        for shown in ("nexus, uniform", "random, uniform", "full cache", "in-window", "later"):
            assert f">{shown}<" in text
        assert ">20%<" in text
    assert f"![{found[0].caption}](eval-score.svg)" in render(run(LINES), found)


def test_without_matplotlib_there_is_no_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bench_plots.installed.cache_clear()
    try:
        assert eval_plots.draw(run(LINES), tmp_path) == []
    finally:
        bench_plots.installed.cache_clear()
    assert not list(tmp_path.iterdir())
