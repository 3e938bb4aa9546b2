"""scripts/gpu_check.sh: what can be known of it without a GPU.

It runs in Triton's interpreter, covers every kernel, finds a kernel that is wrong, measures nothing
that it cannot, and says what is missing.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nexus_vllm.kernels
from nexus_vllm import pairing
from nexus_vllm.engine import units as engine_units
from nexus_vllm.kernels import (
    fill,
    pairs,
    ranked,
    score,
    select,
    shift,
    statistics,
    units,
    walk,
    window,
)

from .scripts import SCRIPTS, script

cases = script("gpu_cases")
check = script("gpu_check")
engine = script("gpu_engine")
times = script("gpu_times")
budget = script("gpu_budget")

PLACE = cases.Place(torch.device("cpu"), small=True)
REFERENCES = {
    "score.block_lse": (score, score.block_lse_reference),
    "score.token_attention": (score, score.token_attention_reference),
    "statistics.anchor": (statistics, statistics.anchor_reference),
    "statistics.statistics": (statistics, statistics.reference),
    "select.select": (select, select.reference),
    "fill.fill": (fill, fill.reference),
    "shift.shift": (shift, shift.reference),
    "pairs.pairs": (pairs, pairing.pair),
    "walk.walk": (walk, walk.reference),
    "walk.pooled": (walk, walk.pooled_reference),
    "ranked.ranked": (ranked, ranked.reference),
    "units.tables": (units, engine_units.unit_tables),
    "window.window": (window, window.reference),
}


def gpu_check(*options: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [str(SCRIPTS / "gpu_check.sh"), "--python", sys.executable, *options]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        command, capture_output=True, text=True, env={**environment, **variables}, check=False
    )


def test_it_runs_in_the_interpreter_and_measures_nothing(tmp_path: Path) -> None:
    before, file = check.DOCUMENT.read_text(), tmp_path / "told.json"
    done = gpu_check("--interpret", "--json", str(file))
    assert done.returncode == check.PASSED, done.stdout + done.stderr
    told = json.loads(file.read_text())
    assert {result["kernel"] for result in told["kernels"]} == cases.kernels()
    assert all(result["passed"] and result["compared"] for result in told["kernels"])
    assert [told["times"], told["engine"], told["copy_bandwidth"]] == [[], [], None]
    assert told["machine"]["device"].startswith("none")
    assert "nothing was measured" in done.stdout
    assert check.DOCUMENT.read_text() == before


def test_what_is_interpreted_is_not_written_into_the_docs() -> None:
    done = gpu_check("--interpret", "--write")
    assert done.returncode == check.CANNOT
    assert "nothing is measured with --interpret" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = gpu_check("--json", str(tmp_path / "told.json"))
    assert done.returncode == check.CANNOT
    assert "NVIDIA GPU" in done.stderr
    assert not (tmp_path / "told.json").exists()


def test_a_gpu_is_not_checked_in_the_interpreter() -> None:
    done = gpu_check(TRITON_INTERPRET="1")
    assert done.returncode == check.CANNOT
    assert "TRITON_INTERPRET is set" in done.stderr


def test_kernels_and_their_check_need_no_vllm() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None; sys.path.insert(0, sys.argv[1]);"
        "import gpu_check; gpu_check.reach_kernels();"
        "import gpu_cases, gpu_times, gpu_engine; print(len(gpu_cases.kernels()))"
    )
    command = [sys.executable, "-c", code, str(SCRIPTS)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(told.stdout) == len(cases.kernels())


# Coverage ----------------------------------------------------------------------------------------


def test_every_kernel_is_covered() -> None:
    assert not cases.uncovered(), "write a check of it in scripts/gpu_cases.py"
    folder = Path(nexus_vllm.kernels.__path__[0])
    with_kernels = {path.stem for path in folder.glob("*.py") if "@triton.jit" in path.read_text()}
    assert with_kernels == {kernel.partition(".")[0] for kernel in cases.kernels()}
    assert with_kernels == {checked.kernel.partition(".")[0] for checked in cases.CHECKS}


def test_a_new_module_has_to_be_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import triton\n\ndef added(x): ...\n\n@triton.jit\ndef _added(x): ...\n"
    (tmp_path / "added_kernel.py").write_text(source)
    monkeypatch.setattr(
        nexus_vllm.kernels, "__path__", [*nexus_vllm.kernels.__path__, str(tmp_path)]
    )
    assert cases.uncovered() == {"added_kernel.added"}


def test_any_two_properties_of_shapes_meet_in_every_combination() -> None:
    shapes = list(cases.shapes(replace(PLACE, small=False)))[1:36]
    for lists in (
        (cases.SIZES, cases.GROUPS), (cases.SIZES, cases.LAYOUTS), (cases.GROUPS, cases.LAYOUTS),
    ):  # fmt: skip
        names = {cases.SIZES: "dim", cases.GROUPS: "group", cases.LAYOUTS: "layout"}
        met = {tuple(getattr(shape, names[each]) for each in lists) for shape in shapes}
        assert len(met) == len(lists[0]) * len(lists[1])
    for name, values in (("dim", cases.SIZES), ("group", cases.GROUPS), ("layout", cases.LAYOUTS)):
        met = {(getattr(shape, name), shape.dtype) for shape in shapes}
        assert len(met) == len(values) * 3, "bfloat16 stands for fp8, which a CPU has not"
    assert {shape.window for shape in shapes} == set(cases.WINDOWS)
    assert {shape.pools for shape in shapes} == set(cases.POOLS)


# Judgement: references stand for kernels, which needs no interpreter -----------------------------


def run(name: str, monkeypatch: pytest.MonkeyPatch, kernel: Any) -> Any:
    module, _ = REFERENCES[name]
    monkeypatch.setattr(module, name.partition(".")[2], kernel)
    (found,) = (checked for checked in cases.CHECKS if checked.kernel == name)
    return cases.run(found, PLACE)


def spoilt(result: Any, arguments: tuple[Any, ...]) -> Any:
    """One number of what a kernel returns, or of what it writes into, is another one."""
    if result is not None:
        output = result[0] if isinstance(result, tuple) else result
    elif isinstance(arguments[-1], tuple):  # shift: tables and lengths
        output = arguments[-1][0]
    else:  # fill writes into its first argument, window into its last
        output = arguments[0] if arguments[0].dtype == torch.int32 else arguments[-1]
    flat = output.view(-1)
    place = int(flat.isfinite().nonzero()[0]) if flat.is_floating_point() else 0
    value = flat[place]
    flat[place] = ~value if flat.dtype == torch.bool else value + 1 + value.abs()
    return result


def test_each_reference_stands_for_a_kernel() -> None:
    assert REFERENCES.keys() == cases.kernels()


@pytest.mark.parametrize("name", REFERENCES)
def test_a_right_kernel_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(name, monkeypatch, REFERENCES[name][1])
    assert result.passed, result.failures


@pytest.mark.parametrize("name", REFERENCES)
def test_a_wrong_kernel_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, **kwargs: Any) -> Any:
        return spoilt(REFERENCES[name][1](*args, **kwargs), args)

    result = run(name, monkeypatch, wrong)
    assert not result.passed
    assert len(result.failures) == result.compared, "each case has to notice"
    assert all("off by" in failure for failure in result.failures)


def test_a_kernel_that_raises_fails_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of resources: shared memory")

    result = run("score.block_lse", monkeypatch, broken)
    assert len(result.failures) == result.compared > 1
    assert "out of resources: shared memory" in result.failures[0]


@pytest.mark.parametrize("error", [float("nan"), float("inf"), 0.5])
def test_an_error_that_is_no_number_fails(error: float) -> None:
    checked = cases.Check("a.b", 0.1, lambda _: [1], lambda *_: error)
    assert not cases.run(checked, PLACE).passed


def test_a_check_without_cases_shows_nothing() -> None:
    checked = cases.Check("a.b", 0.1, lambda _: [], lambda *_: 0.0)
    assert not cases.run(checked, PLACE).passed


def test_results_that_change_from_run_to_run_are_refused() -> None:
    results = iter((torch.zeros(2), torch.tensor([0.0, 1.0])))
    with pytest.raises(ValueError, match="two runs on the same inputs differ"):
        cases.twice(lambda: next(results))


# Times -------------------------------------------------------------------------------------------


def test_what_is_timed_is_what_the_budget_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "anchor", statistics.anchor_reference)
    monkeypatch.setattr(score, "block_lse", score.block_lse_reference)
    model = replace(budget.Model(), layers=1, heads=2, kv_heads=1, size=64)
    shape = (model, 2048, times.WINDOW, times.BLOCK)
    cost = {**budget.costs(*shape), **budget.others(*shape)}
    timed = times.launches(torch.device("cpu"), model, 2048, cost)
    assert set(times.WANTED) <= timed.keys()
    assert cost.keys() - timed.keys() == {name for name in cost if name.endswith(", in torch")}


def test_units_are_copied_to_others() -> None:
    model = replace(budget.Model(), layers=2, heads=4, kv_heads=2, size=64)
    rows = times.pool(torch.device("cpu"), model, 64, 2)
    source, target = times.ends(rows, 2, model, torch.device("cpu"))
    assert len({*source.tolist(), *target.tolist()}) == 2 * 2 * 4
    assert int(rows.units.max()) + 32 * 2 * 64 <= rows.cache.numel()
    assert rows.units.flatten().unique().numel() == rows.units.numel()


def test_shares_are_of_the_bytes_that_the_budget_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that always shows a millisecond; a device with room for the shorter lengths."""
    model = replace(budget.Model(), layers=1, heads=2, kv_heads=1, size=64)
    room = times.needed(model, 4096)
    monkeypatch.setattr(times, "Model", lambda: model)
    monkeypatch.setattr(times, "LIVE", (2048, 4096, 8192))
    monkeypatch.setattr(statistics, "anchor", statistics.anchor_reference)
    monkeypatch.setattr(score, "block_lse", score.block_lse_reference)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (room, room))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    clock: Any = SimpleNamespace(seconds=lambda launch: [1e-3] * 30)
    found = list(times.times(torch.device("cpu"), 1e12, clock))
    assert found[-1].startswith("8,192 live tokens: needs ")
    for live in (2048, 4096):
        cost = budget.costs(model, live, times.WINDOW, times.BLOCK)
        here = {time.name: time for time in found[:-1] if time.live == live}
        assert here["score"].share == pytest.approx(cost["score"].moved / 1e-3 / 1e12)
        assert here["score"].wanted == 0.7
        assert here["fill, at most"].moved == cost["fill, at most"].moved
        assert here["fill, at most"].wanted == 0.8


@pytest.mark.parametrize(("share", "passed"), [(0.7, True), (0.69, False), (float("nan"), False)])
def test_a_share_must_reach_what_is_wanted(share: float, passed: bool) -> None:
    assert timed("score", share, 0.7).passed is passed


def timed(name: str, share: float, wanted: float | None) -> Any:
    return times.Time(name, 8192, 1e-4, (9e-5, 2e-4), 1e8, share, wanted)


# Engines -----------------------------------------------------------------------------------------


def told(*tokens: int, kept: Any = ((0, 1),)) -> dict[str, Any]:
    event = {"num_computed": 300, "full_blocks": 9, "kept": [list(row) for row in kept]}
    return {"requests": {"a": {"tokens": list(tokens), "trace": [event]}}}


@pytest.mark.parametrize(
    ("other", "apart"),
    [
        (told(1, 2), ""),
        (told(1, 3), "a: token 1"),
        (told(1, 2, kept=((0, 2),)), "a: what eviction 0 keeps"),
        (told(1, 2, 3), "a: how many tokens or evictions"),
        ({"requests": {}}, "not the same requests"),
    ],
)
def test_the_first_difference_is_named(other: Mapping[str, Any], apart: str) -> None:
    assert engine.difference(told(1, 2), other) == apart


UNEVEN = (([0, 1], [0, -1]),)


def run_of(backend: str, replays: int, events: int = 2, kept: Any = UNEVEN) -> Any:
    trace = [{"num_computed": 1, "full_blocks": 2, "kept": kept}] * events
    batches = {}
    for batch in ("equal heads", "uneven heads"):
        requests = {name: {"tokens": [1], "trace": trace} for name in ("global", "ada")}
        batches[batch] = {"requests": requests, "replays": replays}
    return {"backend": backend, "batches": batches}


@pytest.mark.parametrize(
    ("run", "told", "failing"),
    [
        ("CUDA graphs", run_of("A", 3), []),
        ("eager", run_of("A", 0), []),
        ("CUDA graphs", run_of("A", 0), ["graphs replayed"]),
        ("eager", run_of("A", 3), ["graphs replayed"]),
        ("eager", run_of("A without eviction", 0), ["attention is A"]),
        ("eager", run_of("A", 0, events=1), ["shrunk twice"]),
        ("eager", run_of("A", 0, kept=[[[0, 1], [0, 1]]]), ["budgets of their own"]),
    ],
)
def test_a_run_must_be_what_it_is_called(run: str, told: Any, failing: list[str]) -> None:
    found = [outcome for outcome in engine.sound("A, dtype", run, "A", told) if not outcome.passed]
    assert len(found) == len(failing)
    for outcome, words in zip(found, failing, strict=True):
        assert words in outcome.what


@pytest.mark.parametrize(
    ("stock_differs", "expected"), [(False, False), (True, None)], ids=["eviction", "rounding"]
)
def test_graphs_that_differ_from_eager(
    monkeypatch: pytest.MonkeyPatch, stock_differs: bool, expected: bool | None
) -> None:
    """A failure, unless vLLM without eviction differs, too: then it cannot be told."""

    def started(
        model: Path, options: dict[str, Any], nexus: Any, variables: dict[str, str], *_: Any
    ) -> Any:
        graphs = "enforce_eager" not in options
        found = run_of(options["attention_backend"], 3 if graphs else 0)
        if graphs and (nexus is not None or stock_differs):
            found["batches"]["equal heads"]["requests"]["ada"]["tokens"] = [2]
        return found

    monkeypatch.setattr(engine, "started", started)
    outcomes = list(engine.outcomes(Path("model"), 0.0))
    for backend, dtype in engine.ENGINES:
        here = [o for o in outcomes if o.what.startswith(f"{backend}, {dtype}")]
        same = [o.passed for o in here if "give the same text" in o.what]
        assert same == [expected, True, True, True]


def test_kept_sets_that_differ_from_the_references_are_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(
        model: Path, options: dict[str, Any], nexus: Any, variables: dict[str, str], *_: Any
    ) -> Any:
        kept = [[[0, 2], [0, -1]]] if variables else [[[0, 1], [0, -1]]]
        replays = 0 if "enforce_eager" in options else 3
        return run_of(options["attention_backend"], replays, kept=kept)

    monkeypatch.setattr(engine, "started", started)
    outcomes = list(engine.outcomes(Path("model"), 0.0))
    wrong = [o for o in outcomes if not o.passed]
    assert len(wrong) == 2 * len(engine.ENGINES)
    assert all(o.passed is False and engine.REFERENCES in o.what for o in wrong)
    assert all("what eviction 0 keeps" in o.told for o in wrong)


def test_no_engine_is_started_after_the_time_given() -> None:
    with pytest.raises(engine.EngineError, match="left out: the time given is over"):
        engine.started(Path("none"), {}, {}, {}, 0.0)


def test_an_engine_that_does_not_start_is_a_failure_with_its_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for outcome in engine.outcomes(Path("none"), float("inf")):
        assert outcome.passed is False
        assert "exit code 1" in outcome.told


# Telling -----------------------------------------------------------------------------------------


def report(**changes: Any) -> Any:
    good = cases.Result("score.block_lse", 1e-4, compared=3, worst=1e-6)
    whole = check.Report({"device": "A GPU", "driver": "1"}, [good], 1e12)
    whole.times = [timed("score", 0.8, 0.7), timed("anchors", 0.1, None)]
    whole.engine = [engine.Outcome("same text", True)]
    return replace(whole, **changes)


def test_exit_codes() -> None:
    bad = cases.Result("a.b", 0, compared=1, failures=["1: off by 1"])
    assert report().code == check.PASSED
    for changes in (
        {"kernels": [bad]},
        {"times": [timed("score", 0.6, 0.7)]},
        {"engine": [engine.Outcome("same text", False)]},
    ):
        assert report(**changes).code == check.FAILED
        assert report(**changes, left_out={"engine": "vLLM is not installed"}).code == check.FAILED
    for changes in (
        {"left_out": {"engine": "vLLM is not installed"}},
        {"engine": [engine.Outcome("same text", None)]},
        {"kernels": [], "times": [], "engine": []},
    ):
        assert report(**changes).code == check.INCOMPLETE


def test_figures_go_between_the_marks() -> None:
    document = check.DOCUMENT.read_text()
    new = check.written(document, check.section(report()))
    assert new.count("<!-- measured -->") == 1
    assert "| 8,192 | score | 100.0 | 100.0 | 80% | 70%: pass |" in new
    assert "| score.block_lse | 3 | 1e-06 | 0.0001 | pass |" in new
    assert "device A GPU; driver 1." in new
    again = check.written(new, check.section(report(times=[timed("score", 0.6, 0.7)])))
    assert "70%: FAIL" in again
    assert "80%" not in again.partition("<!-- measured -->")[2].partition("<!-- /measured")[0]


def test_a_document_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="0 places for what was measured"):
        check.written("# On a GPU\n", "figures")


def test_the_docs_claim_no_figure_that_was_not_measured() -> None:
    inside = check.DOCUMENT.read_text().partition("<!-- measured -->")[2]
    inside = inside.partition("<!-- /measured -->")[0]
    assert "not yet measured" in inside or "driver" in inside
    if "not yet measured" in inside:
        assert not any(word in inside for word in ("%", "TB/s", " us"))
