"""kvpress' presses, called as scripts/peers_kvpress.py calls them, against a prefill under them.

Needs .venv-kvpress: scripts/peers.py --setup.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("KVPRESS_ENV", ROOT / ".venv-kvpress")) / "bin" / "python"
CLOSE = 1e-3  # of logits tens apart: what another order of summing moves in float32


@pytest.fixture(scope="module")
def differences(
    model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, float]]:
    if not PYTHON.exists():
        pytest.skip("no .venv-kvpress: scripts/peers.py --setup")
    folder = tmp_path_factory.mktemp("tiny")
    command = [PYTHON, ROOT / "tests" / "unit" / "peers_replay.py", model_path, folder]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=offline)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("what", ["replay", "single", "again"])
def test_a_press_leaves_the_same_cache_however_it_is_called(
    differences: dict[str, dict[str, float]], what: str
) -> None:
    far = {name: found[what] for name, found in differences.items() if not found[what] < CLOSE}
    assert not far
    assert len(differences) == 16
