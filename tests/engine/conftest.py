from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .harness import MODES, Engine, Engines, Mode


@pytest.fixture(scope="session")
def engines(model_path: Path) -> Iterator[Engines]:
    """`engines(mode, nexus={...}, **llm_options)` gives a running engine, started if need be."""
    pool = Engines(model_path)
    yield pool
    pool.close()


# Of session scope, so that pytest runs all tests of one mode together and few engines start.
@pytest.fixture(
    scope="session",
    params=[
        pytest.param(mode, marks=[pytest.mark.engine, *([pytest.mark.v2] * (mode.runner == "v2"))])
        for mode in MODES
    ],
    ids=str,
)
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param


@pytest.fixture
def stock(mode: Mode, engines: Engines) -> Engine:
    """vLLM without any plugin, in every mode."""
    return engines(mode)


NEXUS = {
    "budget": "full",
    "allocator": "uniform",  # the bundled model ships with a profile: the default would be lu
    "chunk": 64,
    "variants": {"nexus-carried": {"walk_state": "carried"}},
    "trace": True,
    "check_integrity": True,
}


@pytest.fixture
def nexus(mode: Mode, engines: Engines) -> Engine:
    """vLLM with eviction, in every mode; full budgets unless a request asks for less."""
    return engines(mode, nexus=NEXUS)
