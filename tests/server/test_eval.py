"""`nexus-vllm eval` against the shared server."""

import json
from pathlib import Path

import pytest
import yaml

from nexus_vllm.tools import cli

from .conftest import MODEL, Server

pytestmark = pytest.mark.engine

SUITE = {
    "name": "small",
    "about": "a pass key in 512 tokens",
    "prompt_tokens": 512,
    "settings": ["in-window"],
    "budgets": ["50%"],
    "groups": [{"haystacks": [{"source": "noise"}], "tasks": [{"task": "passkey"}]}],
}


def test_a_question_is_asked_under_each_policy_about_one_prefill(
    server: Server, tmp_path: Path
) -> None:
    suite, out = tmp_path / "small.yaml", tmp_path / "out"
    suite.write_text(yaml.safe_dump(SUITE))
    argv = ["eval", MODEL, "--base-url", server.url, "--suite", str(suite), "--out", str(out)]
    assert cli.main([*argv, "--policies", "nexus,streaming-llm", "--limit", "1"]) == 0
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    found = {(line["policy"], line["allocator"]): line for line in lines}
    assert len(lines) == len(found) == 4
    assert found["none", "-"]["score"] == 1
    assert found["none", "-"]["evicted_blocks"] == 0
    assert found["nexus", "auto"]["served"] == "lu"
    assert all(line["evicted_blocks"] for line in lines if line["policy"] != "none")
    report = (out / "eval.md").read_text()
    assert "computed more than once" not in report
    assert cli.main([*argv, "--policies", "nexus,streaming-llm", "--limit", "1"]) == 0
    assert len((out / "results.jsonl").read_text().splitlines()) == 4


def test_a_stream_is_refused_by_a_server_that_forces_nothing(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    suite, out = tmp_path / "small.yaml", tmp_path / "out"
    source = {"haystacks": [{"source": "python-reference"}]}
    told = {**SUITE, "budgets": ["128"], "decode": {"tokens": 64, "every": 64}, "groups": [source]}
    del told["settings"]
    suite.write_text(yaml.safe_dump(told))
    argv = ["eval", MODEL, "--base-url", server.url, "--suite", str(suite), "--out", str(out)]
    assert cli.main([*argv, "--policies", "nexus"]) == 1
    assert "does not say the 64 tokens" in capsys.readouterr().err
