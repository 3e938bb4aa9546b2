"""Plots of `nexus-vllm bench`."""

import math
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nexus_vllm.tools import bench, bench_plots, cli
from nexus_vllm.tools.bench_plots import draw
from nexus_vllm.tools.bench_report import SAME, Part, Plot, as_json, kept_parts, render


def decode_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for context in (2048, 8192):
        for batch in (1, 4):
            shape = {"context": context, "batch": batch}
            rows.append(shape | {"who": "stock", "against_stock": 1.0, "ideal_ms": 20.0})
            for density in (100, 50, 20, 10):
                told = {"against_stock": 90 / density, "ideal_ms": 20 * density / 100}
                rows.append(shape | {"who": f"ours {density}%"} | told)
    return rows


def measured() -> list[Part]:
    timelines = {
        "stock": [[0.5 * i, min(i, 2), 12 - i, 0.9] for i in range(12)],
        "ours": [[0.5 * i, min(i, 9), 0, 0.7] for i in range(10)],
    }
    streams = {
        name: {"series": [[100 * i, 16, 9.0 + i % 3, 12.0, ("fed", "generated")[i > 20]]]}
        for name in ("uniform", "lu")
        for i in (10, 30)
    }
    for told in streams.values():
        told["series"].insert(0, [200, 12, 30.0, 40.0, "fed"])
    costs = [
        {"allocator": name, "live_blocks": n, "eviction_ms": n / 8, "decode_step_ms": 20.0}
        for name in ("uniform", "cake")
        for n in (16, 33, 128)
    ]
    return [
        Part("a", "idle", ""),
        Part("b", "decode", "", data={"rows": decode_rows()}),
        Part("c", "pool", "", data={"timelines": timelines}),
        Part("e", "stream", "", data={"streams": streams, "rows": [["uniform", 200, 12]]}),
        Part("f", "cost", "", data={"rows": costs}),
    ]


def texts(path: Path) -> list[str]:
    svg = "{http://www.w3.org/2000/svg}"
    root = ET.parse(path).getroot()
    assert root.tag == f"{svg}svg"
    return [text for item in root.iter(f"{svg}text") if (text := "".join(item.itertext()))]


@pytest.fixture(autouse=True)
def _said_nothing_yet() -> Iterator[None]:
    bench_plots.installed.cache_clear()
    yield
    bench_plots.installed.cache_clear()


@pytest.mark.parametrize(
    ("letter", "labels"),
    [
        ("b", ["batch of 1", "batch of 4", "2,048 tokens", "8,192 tokens", "100 %", "10 %"]),
        ("b", ["density", "decode speed, times stock's", "ideal by bytes read"]),
        ("c", ["stock", "ours", "running sequences", "pool in use, %", "seconds"]),
        ("e", ["uniform", "lu", "fed", "generated", "pages held", "step time, ms"]),
        ("f", ["eviction, uniform", "eviction, cake", "decode step", "live blocks", "33", "128"]),
    ],
)
def test_a_plot_says_what_it_shows(tmp_path: Path, letter: str, labels: list[str]) -> None:
    part = next(part for part in measured() if part.letter == letter)
    (plot,) = draw([part], tmp_path)[letter]
    assert plot.file == f"plot-{letter}.svg"
    assert set(labels) <= set(texts(tmp_path / plot.file))


def test_the_same_numbers_give_the_same_bytes_also_from_the_report(tmp_path: Path) -> None:
    files: list[dict[str, bytes]] = []
    machine = dict.fromkeys(SAME, "")
    read = kept_parts(as_json(machine, measured()), machine)
    for index, parts in enumerate((measured(), read)):
        folder = tmp_path / str(index)
        folder.mkdir()
        assert list(draw(parts, folder)) == ["b", "c", "e", "f"]
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert len(files[0]) == 4
    assert files[0] == files[1]
    assert all(len(content) < 60_000 for content in files[0].values())


NOTHING: list[tuple[str, dict[str, Any]]] = [
    *((letter, {}) for letter in "abcdef"),
    *((letter, {key: None}) for letter in "bcef" for key in ("rows", "timelines", "streams")),
    ("b", {"rows": [{"context": 1, "batch": 1, "who": "stock", "ideal_ms": 1.0}]}),
    ("b", {"rows": [{"context": 1, "batch": 1, "who": "ours 50%", "against_stock": math.nan}]}),
    ("b", {"rows": [{"who": "ours 50%", "against_stock": 2.0}]}),
    ("c", {"timelines": {"stock": [], "ours": [[0.1, None, None, math.nan], []]}}),
    ("e", {"streams": {"uniform": {"series": [[1, None, math.inf, 1.0, "fed"]]}, "lu": {}}}),
    ("e", {"streams": {"uniform": None}}),
    ("f", {"rows": [{"allocator": "lu", "live_blocks": 4, "eviction_ms": None}, None]}),
    ("f", {"rows": [{"allocator": "lu", "live_blocks": 0, "decode_step_ms": 1.0}]}),
    ("f", {"rows": [{"allocator": "lu", "eviction_ms": 4.0, "decode_step_ms": 1.0}]}),
]


@pytest.mark.parametrize(("letter", "data"), NOTHING)
def test_nothing_measured_is_no_plot(tmp_path: Path, letter: str, data: dict[str, Any]) -> None:
    assert draw([Part(letter, "", "", data=data)], tmp_path) == {}
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("letter", "data", "missing"),
    [
        ("b", {"rows": [row | {"ideal_ms": None} for row in decode_rows()]}, "ideal by bytes read"),
        ("c", {"timelines": {"ours": [[0, 1, 0, None]]}}, "stock"),
        ("c", {"timelines": {"ours": [[0, 1, 0, None]]}}, "pool in use, %"),
        ("e", {"streams": {"lu": {"series": [[5, None, 2.0, 2.0, "fed"]]}}}, "generated"),
        ("e", {"streams": {"lu": {"series": [[5, 1, 0.0, 0.0, "fed"]]}}}, "step time, ms"),
        ("f", {"rows": [{"live_blocks": 9, "decode_step_ms": 2.0}]}, "eviction, None"),
    ],
)
def test_what_is_missing_is_left_out(
    tmp_path: Path, letter: str, data: dict[str, Any], missing: str
) -> None:
    (plot,) = draw([Part(letter, "", "", data=data)], tmp_path)[letter]
    assert missing not in texts(tmp_path / plot.file)


def test_without_matplotlib_one_line_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw(measured(), tmp_path) == draw(measured(), tmp_path) == {}
    assert not list(tmp_path.iterdir())
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install matplotlib" in line


def test_the_report_shows_a_plot_below_the_summary() -> None:
    parts = [Part("c", "a pool", "Small.", ["fine"], commands=["x"]), Part("f", "cost", "Here.")]
    plots = {"c": [Plot("plot-c.svg", "It runs"), Plot("plot-c-2.svg", "More")]}
    text = render({}, parts, plots)
    assert "- fine\n\n![It runs](plot-c.svg)\n\n![More](plot-c-2.svg)\n\n```sh" in text
    assert text.count("![") == 2
    assert "![" not in render({}, parts)


def test_the_command_writes_plots_beside_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = {part.letter: part for part in measured()}
    for letter in "af":
        monkeypatch.setitem(bench.PARTS, letter, lambda _, letter=letter: done[letter])
    (tmp_path / "config.json").write_text("{}")
    out = tmp_path / "out"
    assert cli.main(["bench", str(tmp_path), "--out", str(out), "--parts", "a,f"]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["plot-f.svg", "report.json", "report.md"]
    assert "](plot-f.svg)\n" in (out / "report.md").read_text()
