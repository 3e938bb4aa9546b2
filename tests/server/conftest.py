"""One real server for all tests here, started with the README's own command."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m-instruct"
START_TIMEOUT = 600.0
CALL_TIMEOUT = 600.0


@dataclass
class Server:
    url: str
    model_path: Path

    def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        return httpx.post(
            self.url + path, json={"model": MODEL, **body}, headers=headers, timeout=CALL_TIMEOUT
        )

    def complete(
        self, prompt: str | list[int], max_tokens: int, headers: Mapping[str, str], **more: Any
    ) -> dict[str, Any]:
        """A greedy completion that runs to its full length, with its token ids."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        reply = self.post("/v1/completions", {**body, "return_token_ids": True, **more}, headers)
        assert reply.status_code == 200, reply.text
        told: dict[str, Any] = reply.json()
        return told

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=CALL_TIMEOUT)

    def metric(self, name: str) -> float:
        """The sum over labels of one metric."""
        lines = re.findall(
            rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", self.get("/metrics").text, re.M
        )
        assert lines, f"{name} is not on /metrics"
        return sum(float(value) for value in lines)

    def pool_pages(self) -> int:
        """The pool's pages, without vLLM's null page."""
        found = re.search(
            r'vllm:cache_config_info\{.*num_gpu_blocks="(\d+)"', self.get("/metrics").text
        )
        assert found
        return int(found[1]) - 1


@pytest.fixture(scope="session")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    # As scripts/serve.sh does it, but without touching the environment the tests run in.
    options = ["--port", str(port), "--max-num-seqs", "16", "--trust-request-chat-template"]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_RESPONSES_API_STORE": "1",
    }
    with log.open("w") as sink:
        process = subprocess.Popen(
            [ROOT / "scripts" / "serve.sh", *options],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    running = Server(f"http://127.0.0.1:{port}", model_path)
    try:
        wait_until_up(running, process, log)
        yield running
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        print(log.read_text()[-3000:], file=sys.stderr)


def wait_until_up(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_TIMEOUT
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}:\n{log.read_text()}")
        try:
            if server.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"no /health after {START_TIMEOUT:.0f} s:\n{log.read_text()}")
