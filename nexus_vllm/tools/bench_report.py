"""The pure side of `nexus-vllm bench`: statistics, byte counts, and the report as Markdown."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32  # tokens per block of ours
ELEMENT = 4  # bytes of a float32
SAME = ("machine", "versions", "model")  # what parts of one report have in common


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between ranks, as numpy does it; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def median(values: Sequence[float]) -> float:
    """NaN of nothing, so that a part with a missing number still gets a report."""
    return statistics.median(values) if values else math.nan


def ratio(ours: float, stock: float) -> float:
    """NaN where there is nothing to divide by."""
    return ours / stock if stock else math.nan


def ratios(
    ours: Sequence[Mapping[str, float]], stock: Sequence[Mapping[str, float]], key: str
) -> list[float]:
    """ours / stock of one number, round by round."""
    return [ratio(a[key], b[key]) for a, b in zip(ours, stock, strict=True)]


def quarters(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and of the last quarter."""
    count = max(1, len(values) // 4)
    return median(values[:count]), median(values[-count:])


def pool_blocks(tokens: int, block_size: int) -> int:
    """Pages of a pool of `tokens`, with the null page that vLLM takes for itself."""
    return -(-tokens // block_size) + 1


def kv_bytes_per_token(config: Mapping[str, Any], element: int) -> int:
    """Keys and values of one token in all layers, from a model's config.json."""
    kv_heads: int = config.get("num_key_value_heads") or config["num_attention_heads"]
    layers: int = config["num_hidden_layers"]
    return 2 * layers * kv_heads * head_size(config) * element


def head_size(config: Mapping[str, Any]) -> int:
    """Numbers of a head's key, from a model's config.json."""
    size: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return size


def kv_gib(config: Mapping[str, Any], tokens: int) -> int:
    """GiB that hold the KV of so many tokens, with some to spare."""
    return 1 + math.ceil(tokens * kv_bytes_per_token(config, ELEMENT) / 2**30)


def weight_elements(folder: Path, tied: bool) -> int:
    """Weights read in a decode step, from the headers of a folder's safetensors files.

    The embedding table counts where it is also the output layer; else a step reads a row of it.
    """
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, tensor in header.items():
            if name != "__metadata__" and (tied or "embed_tokens" not in name):
                total += math.prod(tensor["shape"])
    return total


def scoring_flop(config: Mapping[str, Any], window: int, tokens: int) -> int:
    """Operations that multiply `window` queries with `tokens` keys, in all layers and heads."""
    heads: int = config["num_attention_heads"]
    layers: int = config["num_hidden_layers"]
    return 2 * layers * heads * head_size(config) * window * tokens


def ideal_seconds(weight_bytes: float, kv_bytes: float, bandwidth: float) -> float:
    """A decode step that does nothing but read weights and live KV once."""
    return (weight_bytes + kv_bytes) / bandwidth


@dataclass
class Table:
    """A heading per column, and rows of numbers or text."""

    columns: Sequence[str]
    rows: list[Sequence[Any]] = field(default_factory=list)


@dataclass
class Part:
    """What one part measured. `summary`: the lines that answer its question; `data`: all of it."""

    letter: str
    title: str
    setup: str
    summary: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plot:
    """A picture of a part. `file`: its name in the report's folder."""

    file: str
    caption: str


def cell(value: object) -> str:
    """Three digits of a number that has no more to say; a dash where there is none."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if math.isnan(value):
        return "-"
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def render_table(table: Table) -> list[str]:
    lines = ["| " + " | ".join(table.columns) + " |", "|---" * len(table.columns) + "|"]
    for row in table.rows:
        if len(row) != len(table.columns):
            raise ValueError(f"a row of {len(row)} cells under {len(table.columns)} columns")
        lines.append("| " + " | ".join(map(cell, row)) + " |")
    return lines


def render(
    machine: Mapping[str, Any],
    parts: Sequence[Part],
    plots: Mapping[str, Sequence[Plot]] | None = None,
) -> str:
    """The report as Markdown. `plots`: a part's letter -> what shows it."""
    lines = ["# Stock vLLM against nexus-vllm", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    for part in parts:
        lines += ["", f"## {part.letter}. {part.title}", "", part.setup, ""]
        lines += [f"- {line}" for line in part.summary]
        for plot in (plots or {}).get(part.letter, ()):
            lines += ["", f"![{plot.caption}]({plot.file})"]
        for table in part.tables:
            lines += ["", *render_table(table)]
        if part.commands:
            lines += ["", "```sh", *part.commands, "```"]
    return "\n".join(lines) + "\n"


def finite(value: Any) -> Any:
    """The same, with None for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def as_json(machine: Mapping[str, Any], parts: Sequence[Part]) -> str:
    """The report with every number."""
    told = {"machine": dict(machine), "parts": [asdict(part) for part in parts]}
    return json.dumps(finite(told), indent=1) + "\n"


def kept_parts(text: str, machine: Mapping[str, Any]) -> list[Part]:
    """The parts of a report (`as_json`) of the same machine, versions and model, else none.

    Raises ValueError on text that is no such report.
    """
    try:
        told = json.loads(text)
        same = all(told["machine"].get(key) == machine[key] for key in SAME)
        return [
            Part(**{**part, "tables": [Table(**table) for table in part["tables"]]})
            for part in (told["parts"] if same else [])
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"not a report of nexus-vllm bench: {error!r}") from None
