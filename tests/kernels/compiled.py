"""Compile every kernel ahead of time, for GPUs that are not here; prints what came out as JSON.

A process of its own, in which Triton does not interpret: `python -m tests.kernels.compiled`.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = (80, 90, 100)
INT32, INT64 = "*i32", "*i64"
SIZES = {"*bf16": 2, "*fp32": 4, "*fp8e4nv": 1}


@dataclass(frozen=True)
class Case:
    """A kernel with the types of its arguments, as a model of 8B parameters has them."""

    kernel: Any
    constants: dict[str, Any]
    types: dict[str, str]
    aligned: tuple[str, ...]
    warps: int = 4
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def tile(self) -> int:
        """Loads of 16 bytes by which each thread reads its share of the cache's numbers."""
        told = self.constants
        if "cache" not in self.types or "BLOCKS" not in told:
            return 0
        numbers = told["BLOCKS"] * told["BLOCK"] * told["DIMS"]
        return numbers * SIZES[self.types["cache"]] // 16 // (32 * self.warps)

    def compile(self, capability: int) -> Any:
        names = self.kernel.arg_names
        signature = {
            name: "constexpr" if name in self.constants else self.types.get(name, "i32")
            for name in names
        }
        attributes = {
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(names)
            if signature[name].startswith("*") or name in self.aligned
        }
        source = ASTSource(self.kernel, signature, self.constants, attributes)
        target = GPUTarget("cuda", capability, 32)
        options = {"num_warps": self.warps, "enable_fp_fusion": True, **self.more}
        return triton.compile(source, target=target, options=options)


def attention(
    kernel: Any,
    cache: str = "*bf16",
    queries: str = "*bf16",
    group: int = 4,
    window: int = 16,
    dim: int = 128,
) -> Case:
    """Llama-3.1-8B: 4 query heads of 128 to a KV head, a window of 16."""
    exact = queries == "*fp32"
    shape = score._shape(32, group, window, dim, 4 if exact else 2)
    warps = shape.pop("num_warps")
    constants = {
        **{"HEADS": 1, "DIM": dim, "POOLS": 0, "EXACT": exact, "ALIGNED": 4 if exact else 8},
        **{"dim_step": 1, "SCALED": cache == "*fp8e4nv", **shape},
    }
    types = {
        **{"cache": cache, "units": INT64, "blocks": INT64, "counts": INT64, "scale": "fp32"},
        **{"queries": queries, "positions": INT64, "totals": "*fp32", "scales": "*fp32"},
        **{"lse": "*fp32", "found": "*fp32"},
    }
    return Case(kernel, constants, types, ("first", "token_step", "head_step"), warps)


def numbers(kernel: Any, kind: int) -> Case:
    constants = {
        **{"KIND": kind, "DIM": 128, "DIMS": 128, "BLOCK": 32},
        **{"BLOCKS": score.TOKENS // 32, "ALIGNED": 8, "dim_step": 1, "SCALED": False},
    }
    types = {
        **{"cache": "*bf16", "units": INT64, "counts": INT64},
        **{"found": "*fp32", "sums": "*fp32", "anchor": "*fp32", "scales": "*fp32"},
    }
    return Case(kernel, constants, types, ("first", "token_step"))


def selection(kind: int, size: int = 4096) -> Case:
    """Rows of 131,072 tokens."""
    types = {
        **{"weights": "*fp32", "keep": INT64, "forced": "*i1", "address": INT64},
        **{
            "layers": INT64,
            "block_ids": INT64,
            "keys": INT64,
            "kept": "*i1",
            "temperature": "fp32",
        },
    }
    shape = select._shape(size)
    constants = {"KIND": kind, "SIZE": shape.pop("SIZE"), "PART": select.PART}
    return Case(select._select, constants, types, (), shape.pop("num_warps"), shape)


def walking(window: int = 16, steps: int = 3) -> Case:
    """By default over three of 16 rows and the candidates, for any number of blocks."""
    constants = {
        **{"ORDER": tuple(window - 1 - step for step in range(steps)), "STEPS": 16},
        **{"HOW": "mean", "CHOSEN": True, "STARTED": True, **walk._shape(window)},
    }
    types = dict.fromkeys(("lse", "start", "score", "found"), "*fp32")
    return Case(walk._walk, constants, {**types, "candidates": "*i1", "lam": "fp32"}, ())


CASES = {
    "fill": Case(
        fill._fill,
        {"WORDS": fill.WORDS, "GUARDED": True},
        {"cache": INT32, "source": INT64, "target": INT64, "counts": INT64},
        ("words",),
        warps=2,
    ),
    "shift": Case(
        shift._shift,
        {"COLUMNS": shift.COLUMNS},
        dict.fromkeys(("table", "lengths", "released", "new_table", "new_lengths"), INT32),
        ("table_step", "new_step"),
    ),
    "window": Case(
        window._window,
        {"SIZE": 4096},
        {
            **{"query": "*bf16", "ring": "*bf16"},
            **dict.fromkeys(("starts", "lengths", "slots"), INT32),
        },
        ("query_step", "size"),
    ),
    "units": Case(
        units._tables,
        {"COLUMNS": units.COLUMNS},
        {
            **{"address": INT64, "base": INT64},
            **dict.fromkeys(("table", "lengths", "new", "tokens"), INT32),
        },
        ("table_step",),
    ),
    "score": attention(score._block_lse),
    "score, tokens": attention(score._token_attention),
    "norms": numbers(statistics._tokens, 0),
    "cosines": numbers(statistics._tokens, 1),
    "ranges": numbers(statistics._tokens, 2),
    "anchors": numbers(statistics._sums, 0),
    "walk": walking(),
    "pooled rows": Case(
        walk._pooled,
        {"HOW": "max", **walk._shape(16)},
        {"lse": "*fp32", "found": "*fp32"},
        (),
    ),
    **{
        f"rankings, {how}": Case(
            ranked._ranked,
            {"HOW": place, "BLOCK": 32, "BLOCKS": ranked.BLOCKS},
            {"scores": "*fp32", "candidates": "*i1", "found": "*fp32"},
            (),
        )
        for place, how in enumerate(ranked.HOW)
    },
    "pairs": Case(
        pairs._pairs,
        {"PART": pairs.PART},
        {"kept": "*i1", **dict.fromkeys(("slots", *pairs.Pairs._fields), INT64)},
        (),
    ),
    **{f"select, {kind}": selection(place) for place, kind in enumerate(select.KINDS)},
}
EIGHT_BIT = {
    "score, fp8": attention(score._block_lse, "*fp8e4nv"),
    "score, tokens, fp8": attention(score._token_attention, "*fp8e4nv"),
}
"""Only for targets that have the type."""
OTHERS = {
    "score, float32": attention(score._block_lse, "*fp32", "*fp32"),
    "score, 16 heads of 256": attention(score._block_lse, group=16, dim=256),
    "score, a window of 256": attention(score._block_lse, window=256),
    "walk, 16 rows of 256": walking(256, 16),
}
"""Not what an 8B model has by default: these must compile, and may spill."""


def report(case: Case, capability: int) -> dict[str, int]:
    """Registers, bytes spilled, and how many accesses of 16 bytes the machine code has."""
    compiled = case.compile(capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run("cuobjdump", "-res-usage", file.name)
        code = _run("nvdisasm", "-c", file.name)
    told = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return {
        "registers": told["REG"],
        "stack": told["STACK"] + told["LOCAL"],
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "wide loads": len(re.findall(r"\b(?:LDG|LDGSTS)\.E(?:\.\w+)*\.128\b", code)),
        "wide stores": len(re.findall(r"\bSTG\.E(?:\.\w+)*\.128\b", code)),
        "tile": case.tile,
        "loads": len(re.findall(r"\b(?:LDG|LDGSTS)\b", code)),
        "stores": len(re.findall(r"\bSTG\b", code)),
        "shared": compiled.metadata.shared,
    }


def _run(tool: str, *arguments: str) -> str:
    """What a tool prints. Raises RuntimeError with its complaints, unless they are warnings."""
    done = subprocess.run([str(TOOLS / tool), *arguments], capture_output=True, text=True)
    warning = f"{tool} warning"
    complaints = [line for line in done.stderr.splitlines() if not line.startswith(warning)]
    if done.returncode or complaints:
        raise RuntimeError(f"{tool} exited with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    found = {
        f"{name}, sm_{capability}": report(case, capability)
        for capability in TARGETS
        for name, case in {**CASES, **OTHERS, **(EIGHT_BIT if capability >= 89 else {})}.items()
    }
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    assert not os.environ.get("TRITON_INTERPRET"), "this process must not interpret"
    main()
