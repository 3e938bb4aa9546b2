"""The pure parts of `nexus-vllm bench`."""

import argparse
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from nexus_vllm.tools import bench, cli
from nexus_vllm.tools.bench_report import (
    Part,
    Table,
    as_json,
    cell,
    ideal_seconds,
    kept_parts,
    kv_bytes_per_token,
    percentile,
    pool_blocks,
    quarters,
    ratios,
    render,
    weight_elements,
)
from nexus_vllm.tools.bench_servers import NUMBERS, Load, load_table, metric, numbers, prose


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([3.0], 95, 3.0), ([4.0, 1.0, 2.0, 3.0], 50, 2.5), ([0.0, 10.0], 95, 9.5)],
)
def test_percentiles_are_linear_between_ranks(
    values: list[float], percent: float, expected: float
) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_nothing_measured_is_nan_and_a_dash() -> None:
    assert math.isnan(percentile([], 50))
    assert math.isnan(ratios([{"n": 1.0}], [{"n": 0.0}], "n")[0])
    assert cell(math.nan) == "-"


def test_ratios_are_per_round() -> None:
    ours, stock = [{"n": 4.0}, {"n": 9.0}], [{"n": 2.0}, {"n": 3.0}]
    assert ratios(ours, stock, "n") == [2.0, 3.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios(ours, stock[:1], "n")


def test_quarters() -> None:
    assert quarters([1.0, 1.0, 5.0, 5.0, 5.0, 5.0, 2.0, 4.0]) == (1.0, 3.0)


def test_pools_of_equal_memory() -> None:
    assert pool_blocks(4096, 32) - 1 == 4 * (pool_blocks(4096, 128) - 1) == 128
    assert pool_blocks(33, 32) == 3


def test_bytes_of_a_decode_step(tmp_path: Path) -> None:
    config = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    assert kv_bytes_per_token(config | {"num_hidden_layers": 30}, 4) == 2 * 30 * 3 * 64 * 4
    header = {
        "__metadata__": {"format": "pt"},
        "model.embed_tokens.weight": {"shape": [10, 4]},
        "model.norm.weight": {"shape": [4]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert weight_elements(tmp_path, tied=True) == 44
    assert weight_elements(tmp_path, tied=False) == 4
    assert ideal_seconds(100, 50, 50) == 3


def test_the_report_names_parts_and_refuses_ragged_tables() -> None:
    part = Part("c", "a pool", "Small.", ["fine"], [Table(["a", "b"], [[1, 0.12345]])], ["vllm x"])
    text = render({"machine": "m"}, [part])
    assert "- machine: m\n" in text
    assert "## c. a pool\n\nSmall.\n\n- fine\n" in text
    assert "| a | b |\n|---|---|\n| 1 | 0.123 |" in text
    assert "```sh\nvllm x\n```" in text
    part.tables[0].rows.append([1])
    with pytest.raises(ValueError, match="1 cells under 2 columns"):
        render({}, [part])


def test_json_has_every_number_and_no_nan() -> None:
    part = Part("f", "cost", "Here.", data={"rows": [{"ms": math.nan, "n": 2}]})
    told = json.loads(as_json({"machine": "m"}, [part]))
    assert told["parts"][0]["data"]["rows"] == [{"ms": None, "n": 2}]


def test_parts_are_kept_of_the_same_machine_alone() -> None:
    table = Table(["who", "ms"], [["stock", math.nan]])
    part = Part("f", "cost", "Here.", ["cheap"], [table], ["vllm"], {"rows": [1]})
    machine = {"machine": "m", "versions": "v", "model": "tiny", "date": "today"}
    text = as_json(machine, [part])
    (kept,) = kept_parts(text, machine | {"date": "later"})
    assert render(machine, [kept]) == render(machine, [part])
    assert kept_parts(text, machine | {"versions": "w"}) == []
    for bad in ("", "[]", '{"parts": 1}', json.dumps({"machine": machine, "parts": [{}]})):
        with pytest.raises(ValueError, match="not a report"):
            kept_parts(bad, machine)


def test_a_load_is_told_by_its_result_and_the_gauges() -> None:
    class Gauges:
        timeline = ((0.3, 2.0, 1.0, 0.5), (0.6, 4.0, 0.0, 0.75))

        def change(self, name: str) -> float:
            return 3.0 if "preemptions" in name else 0.0

    result = {
        "ttfts": [0.1, 0.3],
        "itls": [[0.01], [0.03, 0.05]],
        "request_throughput": 1.5,
        "output_throughput": 9.0,
        "completed": 2,
        "duration": 1.3,
    }
    told = numbers(result, Gauges())  # type: ignore[arg-type]
    assert told["ttft_p50_ms"] == pytest.approx(200)
    assert told["itl_p50_ms"] == pytest.approx(30)
    assert (told["most_running"], told["mean_running"], told["preemptions"]) == (4, 3, 3)
    table = load_table({"stock": [told], "ours": [told]})
    assert table.rows[-1][:3] == ["median", "ours / stock", 1.0]
    assert all(len(row) == len(NUMBERS) + 2 for row in table.rows)


def test_metrics_are_summed_over_labels() -> None:
    page = 'vllm:n_total{engine="0"} 2.0\nvllm:n_total{engine="1"} 3.0\nvllm:n_total_x 9\n'
    assert metric(page, "vllm:n_total") == 5
    assert metric(page, "vllm:other") == 0


def test_the_load_is_vllms_own_client() -> None:
    command = Load(1900, 64, 12, 6).command(Path("/m"), "http://h:1", 7, Path("/o/r.json"))
    assert command[:2] == ["bench", "serve"]
    for flag, value in (("--seed", "7"), ("--max-concurrency", "6"), ("--result-dir", "/o")):
        assert command[command.index(flag) + 1] == value


def test_prose_is_disjoint() -> None:
    texts = prose(3, 500)
    assert [len(text) for text in texts] == [500] * 3
    assert len(set(texts)) == 3


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_to(parser.add_subparsers())
    return parser.parse_args(["bench", *argv])


def test_every_part_has_a_title_and_runs_by_default() -> None:
    args = parsed("MODEL", "--out", "D")
    assert set(args.parts) == set(bench.PARTS) == set(bench.TITLES)
    assert args.contexts == [2048]


def test_unknown_parts_and_models_are_refused(
    capsys: pytest.CaptureFixture[Any], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit):
        parsed("MODEL", "--out", "D", "--parts", "a,x")
    assert "no part 'x': choose from a,b,c,d,e,f" in capsys.readouterr().err
    assert cli.main(["bench", str(tmp_path), "--out", str(tmp_path / "o")]) == 1
    assert "is not the folder of a model" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_report_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["nexus-vllm", "bench", "/home/me/tiny", "--out", "/a", "--rounds", "3", "--out", "/b"]
    monkeypatch.setattr("sys.argv", typed)
    told = bench._typed(argparse.Namespace(given=Path("/home/me/tiny")))
    assert told == "nexus-vllm bench MODEL --out DIR --rounds 3 --out DIR"
