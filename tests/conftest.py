from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# They run by themselves: tests/kernels/conftest.py says why.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["kernels"]

PREPARE_MODEL = Path(__file__).resolve().parents[1] / "scripts" / "prepare_model.py"


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The bundled model, fetched and converted first if it is not there yet (takes a minute)."""
    command = [sys.executable, str(PREPARE_MODEL)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.strip())
