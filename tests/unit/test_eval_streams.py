"""What `nexus-vllm eval` tells of streams, against values worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from nexus_vllm.tools import eval_plots
from nexus_vllm.tools.eval_plan import FULL, Method
from nexus_vllm.tools.eval_report import Run
from nexus_vllm.tools.eval_streams import (
    AGAIN,
    FIRST,
    TEXT,
    against_steps,
    as_json,
    askings,
    buckets,
    kinds,
    passages,
    render,
    since_told,
    step_table,
    summary,
)
from nexus_vllm.tools.eval_suite import Decode, load

NEXUS, RANDOM = Method("nexus", "uniform"), Method("random", "uniform")


def asked(step: int, score: float, uses: int = 0, since: int = 100) -> dict[str, Any]:
    judged = {"score": score, "right": int(score), "tokens": 1, "logprob": score - 1, "whole": True}
    return {"question": 7, "step": step, "since": since, "uses": uses, "task": "fact", **judged}


def line(
    sample: int,
    method: Method,
    *askings: dict[str, Any],
    likeliest: tuple[int, ...] = (1, 2, 3, 4),
) -> dict[str, Any]:
    """A stream of 2,560 steps with two passages of two tokens."""
    whole = method == FULL
    return {
        "sample": sample,
        "question": 0,
        "setting": "-" if whole else "decode",
        "policy": method.policy,
        "allocator": method.allocator,
        "budget": "full" if whole else "512",
        "seed": 0,
        "served": method.allocator,
        "asked": list(askings),
        "passages": [
            {"step": 0, "logprob": -2.0, "likeliest": list(likeliest[:2])},
            {"step": 2500, "logprob": -4.0, "likeliest": list(likeliest[2:])},
        ],
    }


LINES = [
    *(line(s, FULL, asked(290, 1.0), asked(2550, 1.0, 1, 700)) for s in range(2)),
    line(0, NEXUS, asked(290, 1.0), asked(600, 0.0), asked(2550, 1.0, 1, 700)),
    line(1, NEXUS, asked(290, 0.0), asked(600, 0.0), asked(2550, 0.0, 2, 500)),
    line(0, RANDOM, asked(290, 0.0), asked(2550, 0.0, 1), likeliest=(1, 0, 0, 0)),
]


def run(lines: list[dict[str, Any]]) -> Run:
    return Run(
        suite=load("long-decode"),
        lines=askings(lines),
        texts=passages(lines),
        budgets=("512",),
        baseline=NEXUS,
        told={"machine": "a computer"},
    )


@pytest.mark.parametrize(
    ("stretches", "steps"),
    [
        (1, [(0, 10)]),
        (5, [(0, 10), (10, 20), (20, 30), (30, 40), (40, 50)]),
        (8, [(0, 20), (20, 40), (40, 60), (60, 80)]),
        (11, [(0, 30), (30, 60), (60, 90), (90, 110)]),
    ],
)
def test_buckets_are_of_whole_stretches(stretches: int, steps: list[tuple[int, int]]) -> None:
    assert buckets(Decode(tokens=10 * stretches, every=10)) == steps


def test_a_bucket_is_the_mean_over_haystacks_of_what_was_asked_in_it() -> None:
    first = against_steps(run(LINES), FIRST, NEXUS, "512", "score")
    assert [(cell.start, cell.end) for cell in first] == buckets(load("long-decode").decode)  # type: ignore[arg-type]
    # The haystacks' own means are 1/2 and 0.
    assert vars(first[0].found) == {"mean": 0.25, "low": 0.0, "high": 0.5, "n": 2}
    assert [cell.found.n for cell in first[1:]] == [0, 0, 0]
    again = against_steps(run(LINES), AGAIN, NEXUS, "512", "score")
    assert (again[0].found.n, again[3].found.mean, again[3].since) == (0, 0.5, 600)


def test_the_text_is_compared_with_the_full_cache_of_the_same_haystack() -> None:
    found = against_steps(run(LINES), TEXT, RANDOM, "512", "accuracy")
    assert (found[0].found.mean, found[3].found.mean) == (0.5, 0.0)
    assert against_steps(run(LINES), TEXT, RANDOM, "512", "logprob")[3].found.mean == -2
    without = [item for item in LINES if item["policy"] != "none"]
    assert passages(without) == []


def test_a_suite_without_questions_tells_of_its_text() -> None:
    bare = [{**item, "asked": []} for item in LINES]
    assert kinds(run(bare)) == [TEXT]
    text = render(run(bare))
    assert "## The text itself" in text
    assert "sked" not in text.partition("## ")[2]
    assert run(bare).methods() == [NEXUS, RANDOM]


def test_rows_are_methods_at_each_budget_and_columns_steps() -> None:
    found = step_table(run(LINES), FIRST, "score")
    steps = [f"steps {a}" for a in ("1-640", "641-1280", "1281-1920", "1921-2560")]
    assert found.columns == ["policy, allocator", "budget", *steps]
    assert [row[:2] for row in found.rows] == [
        ["full cache", "full"],
        ["nexus, uniform", "512"],
        ["random, uniform", "512"],
    ]
    assert found.rows[1][2:] == ["0.25 [0.00, 0.50]", "-", "-", "-"]


def test_the_report_has_a_chapter_for_each_kind() -> None:
    text = render(run(LINES))
    assert "- streams: 2, each a haystack of 512 tokens and 2560 that are decoded after it" in text
    assert "Cells: mean over haystacks, seeds and askings averaged first" in text
    for title in ("Asked for the first time", "Asked again", "The text itself"):
        assert f"## {title}" in text
    assert "### Share answered, all steps, minus nexus, uniform" in text
    assert since_told(run(LINES), AGAIN).endswith("mean: -, -, -, 700.")
    assert "Asked again: share answered" in summary(run(LINES))


def test_json_has_every_cell_by_step() -> None:
    cells = {(c["kind"], c["policy"]): c for c in json.loads(as_json(run(LINES)))["cells"]}
    nexus = cells["first", "nexus"]
    assert nexus["score"]["mean"] == 0.25
    assert nexus["score minus full cache"]["mean"] == -0.75
    assert nexus["score by step"][0] == {
        **{"start": 0, "end": 640, "since": 100},
        **{"mean": 0.25, "low": 0.0, "high": 0.5, "n": 2},
    }
    assert cells["text", "random"]["accuracy minus nexus, uniform"]["mean"] == -0.75
    assert cells["text", "none"]["accuracy"]["mean"] == 1


def test_the_plot_shows_each_kind_against_decode_steps(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (plot,) = eval_plots.draw_streams(run(LINES), tmp_path)
    text = (tmp_path / plot.file).read_text()
    for shown in ("nexus, uniform", "full cache", "decode steps", "asked again, 512"):
        assert f">{shown}<" in text
