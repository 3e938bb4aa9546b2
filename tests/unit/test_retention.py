"""The tables of docs/retention.md are made from results, and go where they belong."""

import json
from pathlib import Path
from typing import Any

import pytest

from nexus_vllm.tools.eval_plan import FULL, Method

from .scripts import script

CELLS = [("in-window", "20%"), ("later", "20%")]


@pytest.fixture(scope="module")
def retention() -> Any:
    return script("retention")


def line(policy: str, allocator: str, cell: tuple[str, str], question: int, score: int) -> Any:
    return {
        "policy": policy,
        "allocator": allocator,
        "setting": cell[0],
        "budget": cell[1],
        "sample": 0,
        "question": question,
        "seed": 0,
        "score": score,
        "right": score,
        "tokens": 1,
        "logprob": score - 2.0,
        "whole": True,
    }


def results(retention: Any) -> Any:
    """Three questions: `nexus` knows two inside and one later, `other` always one less."""
    lines = [line("none", "-", ("-", "full"), q, 1) for q in range(3)]
    for cell, known in zip(CELLS, (2, 1), strict=True):
        lines += [line("nexus", "uniform", cell, q, int(q < known)) for q in range(3)]
        lines += [line("other", "uniform", cell, q, int(q < known - 1)) for q in range(3)]
    return retention.Results(lines, CELLS, {"machine": "m", "versions": "v", "seeds": "0"})


def test_methods_are_ranked_by_the_mean_of_all_cells(retention: Any) -> None:
    found = results(retention)
    table = retention.whole_table(found)
    assert table.columns == [
        *("policy, allocator", "inside 20%", "later 20%", "mean", "log-probability")
    ]
    assert [row[0] for row in table.rows] == ["full cache", "nexus, uniform", "other, uniform"]
    assert table.rows[1][1:3] == ["0.67", "0.33"]
    assert table.rows[1][3].startswith("0.50 [")
    assert table.rows[2][4] == "-1.83"


def test_what_was_not_asked_everything_comes_last(retention: Any) -> None:
    found = results(retention)
    lines = [*found.lines, line("inside", "uniform", CELLS[0], 0, 1)]
    rows = retention.whole_table(retention.Results(lines, CELLS, found.told)).rows
    assert rows[-1] == ["inside, uniform", "1.00", "-", "-", "-"]


@pytest.mark.parametrize("name", ["quick", "ablation"])
def test_a_study_has_a_figure(retention: Any, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    text = retention.section(name, results(retention), tmp_path)
    assert f"![{name}](retention/{name}.svg)" in text
    drawn = (tmp_path / f"{name}.svg").read_text()
    assert "other" in drawn
    assert "uniform" in drawn
    retention.section(name, results(retention), tmp_path)
    assert (tmp_path / f"{name}.svg").read_text() == drawn


def test_a_variant_is_told_by_what_it_changes(retention: Any) -> None:
    rows = retention.parts_table(results(retention)).rows
    assert rows[0][:2] == ["nexus", "uniform"]
    assert rows[0][3:] == ["-", "-", "-"]
    assert rows[1][3].startswith("-0.33 [")
    assert rows[1][4].startswith("-0.33 [")


def test_the_brief_table_is_of_settings_and_names_the_best_press(retention: Any) -> None:
    found = results(retention)
    better = [line("kvpress:b", "uniform", ("later", "20%"), q, int(q < 2)) for q in range(3)]
    worse = [line("kvpress:a", "uniform", ("later", "20%"), q, 0) for q in range(3)]
    more = retention.Results([*found.lines, *worse, *better], CELLS, found.told)
    table = retention.brief_table([("m", more), ("n", more)])
    assert table.columns[1:] == ["m, inside", "m, later", "n, inside", "n, later"]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["full cache"] == ["1.00"] * 4
    assert rows["nexus, uniform"] == ["0.67", "0.33"] * 2
    assert rows["knorm, lu"] == ["-"] * 4
    assert table.rows[-1][1:] == ["-", "0.67"] * 2


def test_a_question_without_all_its_cells_is_left_out(retention: Any) -> None:
    found = results(retention)
    own = [one for one in found.lines if one["setting"] != "later" or one["question"] != 0]
    fewer = retention.Results(own, CELLS, found.told)
    method = Method("nexus", "uniform")
    assert list(fewer.values(method, "score", CELLS)) == [(0, 1), (0, 2)]
    assert fewer.mean(method, "score", CELLS).mean == 0.25
    assert len(fewer.values(FULL, "score", CELLS)) == 3


def test_only_what_the_last_report_is_of_is_read(retention: Any, tmp_path: Path) -> None:
    found = results(retention)
    (tmp_path / "results.jsonl").write_text("".join(f"{json.dumps(x)}\n" for x in found.lines))
    cells = [
        {"policy": policy, "allocator": allocator, "setting": setting, "budget": budget}
        for policy, allocator, setting, budget in (
            ("none", "-", "later", "full"),
            ("nexus", "uniform", "later", "20%"),
        )
    ]
    (tmp_path / "eval.json").write_text(json.dumps({"told": found.told, "cells": cells}))
    read = retention.Results.read(tmp_path)
    assert read.methods == [FULL, Method("nexus", "uniform")]
    assert read.cells == [("later", "20%")]
    assert {x["setting"] for x in read.lines} == {"-", "later"}
    asked = [cell | {"policy": "other"} for cell in cells[1:]]
    (tmp_path / "eval.json").write_text(json.dumps({"told": found.told, "cells": cells + asked}))
    for order in (["nexus", "other"], ["other", "nexus"]):
        methods = retention.Results.read(tmp_path, order).methods
        assert [method.policy for method in methods] == ["none", *order]
    (tmp_path / "run.json").write_text(json.dumps({"suite": "s", "model": "m"}))
    for folder, policy in (("peers", "kvpress:x"), ("earlier", "y")):
        more = tmp_path / folder
        more.mkdir()
        added = [found.lines[0] | {"score": 0}, found.lines[-1] | {"policy": policy}]
        told = "".join(f"{json.dumps(x)}\n" for x in added)
        (more / "results.jsonl").write_text(told + '{"cut')
        (more / "run.json").write_text(json.dumps({"suite": "s", "model": "other"}))
        with pytest.raises(ValueError, match=r"is of model other, .* of m"):
            retention.Results.read(tmp_path)
        (more / "run.json").write_text(json.dumps({"suite": "s", "model": "m"}))
    both = retention.Results.read(tmp_path)
    assert {Method("kvpress:x", "uniform"), Method("y", "uniform")} <= set(both.methods)
    assert both.mean(FULL, "score", CELLS).mean == 1.0  # ours


def no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def test_a_cell_without_results_is_null_in_the_json(retention: Any) -> None:
    found = results(retention)
    lines = [*found.lines, line("inside", "uniform", CELLS[0], 0, 1)]
    text = retention.as_json(retention.Results(lines, CELLS, found.told))
    told = json.loads(text, parse_constant=no_number)
    assert (told["cells"][-1]["n"], told["cells"][-1]["score"]) == (0, [None] * 3)


def test_what_is_published_is_json(retention: Any) -> None:
    published = sorted((retention.DOCUMENT.parent / "retention").glob("*.json"))
    assert published
    for path in published:
        json.loads(path.read_text(), parse_constant=no_number)


def test_a_table_says_how_few_questions_a_cell_has(retention: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = results(retention)
    assert "3 questions a cell about 1 haystacks" in retention.section("quick", found, tmp_path)
    lines = [one for one in found.lines if one["setting"] != "later" or one["question"] == 0]
    fewer = retention.Results(lines, CELLS, found.told)
    assert "1 to 3 questions a cell about" in retention.section("quick", fewer, tmp_path)


@pytest.mark.parametrize("stopped", ["before a cell", "within a line", "not"])
def test_a_report_takes_a_run_as_far_as_it_came(
    retention: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stopped: str,
) -> None:
    pytest.importorskip("matplotlib")
    document = tmp_path / "docs" / "retention.md"
    document.parent.mkdir()
    before = "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in retention.OF)
    document.write_text(before)
    monkeypatch.setattr(retention, "DOCUMENT", document)
    found, out = results(retention), tmp_path / "out" / "quick"
    out.mkdir(parents=True)
    text = "".join(f"{json.dumps(x)}\n" for x in found.lines)
    cells = [
        {"policy": policy, "allocator": "uniform", "setting": setting, "budget": budget}
        for policy in ("nexus", "other")
        for setting, budget in CELLS
    ]
    if stopped == "before a cell":
        text, cells = f"{json.dumps(found.lines[0])}\n", []
    if stopped == "within a line":
        text = text[:-9]
    (out / "results.jsonl").write_text(text)
    (out / "eval.json").write_text(json.dumps({"told": found.told, "cells": cells}))
    retention.report(tmp_path / "out", ["quick", "prior"])
    assert ("nexus, uniform" in document.read_text()) == bool(cells)
    told = capsys.readouterr().err
    assert "prior: no report" in told
    assert ("quick: no report" in told) == (not cells)
    assert "ablation" not in told


def test_every_cell_is_in_the_json(retention: Any) -> None:
    told = json.loads(retention.as_json(results(retention)))
    assert len(told["cells"]) == 5
    assert told["cells"][0]["policy"] == "none"
    assert told["cells"][1]["score"][0] == 0.6667
    assert told["told"]["machine"] == "m"


def test_a_table_goes_between_its_marks_and_nowhere_else(retention: Any) -> None:
    document = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n<!-- y -->\n<!-- /y -->\n"
    text = retention.written(document, "x", "new \\1\n")
    assert text == "a\n<!-- x -->\nnew \\1\n<!-- /x -->\nb\n<!-- y -->\n<!-- /y -->\n"
    with pytest.raises(ValueError, match="no marks <!-- z -->"):
        retention.written(document, "z", "")


def test_every_study_has_its_place_and_a_command(retention: Any, tmp_path: Path) -> None:
    document = retention.DOCUMENT.read_text()
    for name, study in retention.OF.items():
        assert retention.written(document, name, "")
        command, *peers = study.commands(tmp_path)
        assert command[:2] == ["nexus-vllm", "eval"]
        assert len(peers) == (study.peers is not None)
        assert (study.config is None) == ("--kv-eviction-config" not in command)
