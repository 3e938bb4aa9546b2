"""Kernels in Triton's interpreter: what they compute, not how fast, and not for which hardware."""

import importlib
from types import SimpleNamespace

import pytest

NAMES = ("fill", "score", "select", "shift", "statistics", "window")


@pytest.fixture(scope="session")
def kernels() -> SimpleNamespace:
    """The modules of `nexus_vllm.kernels`, interpreted. The choice is made as they are imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        found = {name: importlib.import_module(f"nexus_vllm.kernels.{name}") for name in NAMES}
    for name, module in found.items():
        kernel = next(v for v in vars(module).values() if hasattr(v, "arg_names"))
        assert type(kernel).__name__ == "InterpretedFunction", f"{name} was imported before"
    return SimpleNamespace(**found)
