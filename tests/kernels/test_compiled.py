"""Kernels compile for GPUs that are not here, without spills and with 16-byte accesses."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

TARGETS = (80, 90, 100)
COPYING = ("fill", "score", "score, tokens", "norms", "cosines", "ranges", "anchors")


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_spilled(compiled: dict[str, dict[str, int]], target: int) -> None:
    mine = {name: told for name, told in compiled.items() if name.endswith(f"sm_{target}")}
    assert len(mine) >= 12
    spilled = {name: told for name, told in mine.items() if told["spills"] or told["stack"]}
    assert not spilled


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", COPYING)
def test_the_cache_is_read_by_16_bytes(
    compiled: dict[str, dict[str, int]], name: str, target: int
) -> None:
    assert compiled[f"{name}, sm_{target}"]["wide loads"] > 0


@pytest.mark.parametrize("target", TARGETS)
def test_fill_writes_by_16_bytes(compiled: dict[str, dict[str, int]], target: int) -> None:
    told = compiled[f"fill, sm_{target}"]
    assert told["wide stores"] == told["stores"] > 0
