"""Kernels compile for GPUs that are not here, without spills and with 16-byte accesses."""

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.compiled import CASES, EIGHT_BIT, OTHERS, TARGETS

READING = [name for name, case in {**CASES, **OTHERS}.items() if case.tile]
Told = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def compiled() -> Told:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compiled"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
    found: Told = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_nothing_is_spilled(compiled: Told, target: int) -> None:
    names = [*CASES, *(EIGHT_BIT if target >= 89 else ())]
    mine = {name: compiled[f"{name}, sm_{target}"] for name in names}
    spilled = {name: told for name, told in mine.items() if told["spills"] or told["stack"]}
    assert not spilled


@pytest.mark.parametrize("target", TARGETS)
def test_the_cache_is_read_by_16_bytes(compiled: Told, target: int) -> None:
    for name in (*READING, *(EIGHT_BIT if target >= 89 else ())):
        told = compiled[f"{name}, sm_{target}"]
        assert told["wide loads"] >= told["tile"] > 0, name


@pytest.mark.parametrize("target", TARGETS)
def test_fill_copies_by_16_bytes(compiled: Told, target: int) -> None:
    told = compiled[f"fill, sm_{target}"]
    assert told["wide stores"] == told["stores"] > 0
    assert told["wide loads"] == told["wide stores"]
    assert told["loads"] - told["wide loads"] <= 3  # where it goes, and how many are made
