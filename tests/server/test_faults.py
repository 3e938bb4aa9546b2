"""A process of the engine is killed while requests with a budget run: all ends, as in stock vLLM.

Waits have a limit only so that a hang fails; nothing here depends on how fast anything is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from .conftest import CALL_TIMEOUT, MODEL, Server, wait_until_up

pytestmark = pytest.mark.engine

CLIENTS = 3
TOKENS = 40
"""Each client has seen so many when the process is killed, of 7000 that it asked for."""


@pytest.fixture
def doomed(
    model_path: Path, tmp_path: Path
) -> Iterator[tuple[Server, subprocess.Popen[bytes], Path]]:
    """A server for one test, in a process group of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--kv-eviction", "nexus", "--port", str(port), "--host", "127.0.0.1"]
    flags += ["--enforce-eager", "--dtype", "float32", "--max-num-seqs", "8"]
    flags += ["--max-model-len", "8192", "--served-model-name", MODEL]
    log = tmp_path / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("vllm")), "serve", str(model_path), *flags],
            env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", model_path)
    try:
        wait_until_up(server, process, log)
        yield server, process, log
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Client(threading.Thread):
    """Streams one completion and keeps what it heard."""

    def __init__(self, server: Server, index: int, running: threading.Semaphore) -> None:
        super().__init__(daemon=True)
        self.server, self.index, self.running = server, index, running
        self.lines: list[str] = []
        self.broken = False

    def run(self) -> None:
        body = {
            "model": MODEL,
            "prompt": f"{self.index} The grass is green. " * 100,
            "max_tokens": 7000,
            "ignore_eos": True,
            "stream": True,
        }
        url, headers = self.server.url + "/v1/completions", {"X-KV-Budget": "256"}
        try:
            with httpx.stream(
                "POST", url, json=body, headers=headers, timeout=CALL_TIMEOUT
            ) as reply:
                for line in filter(None, reply.iter_lines()):
                    self.lines.append(line)
                    if len(self.lines) == TOKENS:
                        self.running.release()
        except httpx.TransportError:
            self.broken = True


@pytest.mark.parametrize("victim", ["EngineCore", "Worker"])
def test_a_killed_process_ends_every_request_and_the_server(
    doomed: tuple[Server, subprocess.Popen[bytes], Path], victim: str
) -> None:
    server, process, log = doomed
    children = psutil.Process(process.pid).children(recursive=True)
    found = [child for child in children if victim in child.name()]
    if victim == "Worker" and not found:
        pytest.skip("the worker is part of the EngineCore process here")
    assert len(found) == 1, children

    running = threading.Semaphore(0)
    clients = [Client(server, index, running) for index in range(CLIENTS)]
    for client in clients:
        client.start()
    for _ in clients:
        assert running.acquire(timeout=CALL_TIMEOUT), [client.lines for client in clients]
    assert server.metric("nexus:evicted_blocks_total") > 0
    found[0].kill()

    for client in clients:
        client.join(CALL_TIMEOUT)
        assert not client.is_alive(), "a client waits for a dead engine"
        assert client.broken or any('"error"' in line for line in client.lines[-2:]), client.lines
        assert not any('"finish_reason":"' in line for line in client.lines)
    with contextlib.suppress(httpx.TransportError):  # gone already
        assert server.get("/health").status_code != 200
    process.wait(CALL_TIMEOUT)
    end = time.monotonic() + CALL_TIMEOUT
    while left := [child for child in children if lives(child)]:
        assert time.monotonic() < end, (left, log.read_text()[-3000:])
        time.sleep(0.1)


def lives(process: psutil.Process) -> bool:
    """A zombie does not: whoever adopted it may take its time."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
