"""One server over two engines, as `--data-parallel-size 2` starts it: two front ends, too."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine import tiny

from .conftest import CALL_TIMEOUT, MODEL, Server, wait_until_up

pytestmark = pytest.mark.engine

BLOCK = 32
BUDGETS = ("full", "128", "160", "256", "50%")


@pytest.fixture(scope="module")
def pair(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("data-parallel")
    model = tiny.save(folder / "model", tokenizer_of=model_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--kv-eviction", "nexus", "--port", str(port), "--host", "127.0.0.1"]
    flags += ["--kv-eviction-config", '{"budget_floor": 128, "check_integrity": true}']
    flags += ["--data-parallel-size", "2", "--served-model-name", MODEL, "--dtype", "float32"]
    flags += ["--enforce-eager", "--max-num-seqs", "8", "--max-model-len", "1024"]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = folder / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name("vllm")), "serve", str(model), *flags],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", model)
    try:
        wait_until_up(server, process, log)
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def by_engine(server: Server, name: str) -> dict[str, float]:
    pattern = rf'^{re.escape(name)}\{{.*?engine="(\d+)".*?\}} (\S+)$'
    found = re.findall(pattern, server.get("/metrics").text, re.M)
    return {engine: float(value) for engine, value in found}


def eventually(look: Callable[[], bool]) -> bool:
    """Statistics come a moment after the reply."""
    end = time.monotonic() + CALL_TIMEOUT
    while not (seen := look()) and time.monotonic() < end:
        time.sleep(0.05)
    return seen


def record_of(server: Server, request_id: str) -> dict[str, Any]:
    """From the front end that has it, which need not be the one that answered; each connection may
    go to another one."""
    found: list[dict[str, Any]] = []

    def look() -> bool:
        reply = server.get(f"/kv_eviction/requests/{request_id}")
        found.extend(reply.json().get("sequences", ()))
        return bool(found)

    assert eventually(look), f"no front end knows {request_id}"
    (record,) = found
    return record


def test_twenty_requests_over_two_engines(pair: Server) -> None:
    requests = [
        (tiny.tokens(300 + 30 * index, index), BUDGETS[index % len(BUDGETS)]) for index in range(20)
    ]

    def ask(request: tuple[list[int], str]) -> dict[str, Any]:
        return pair.complete(request[0], 60, {"X-KV-Budget": request[1], "X-KV-Seed": "1"})

    alone = [ask(request) for request in requests]
    with ThreadPoolExecutor(20) as pool:
        together = list(pool.map(ask, requests))
    evicted = 0
    for (_, budget), one, many in zip(requests, alone, together, strict=True):
        assert many["choices"][0]["token_ids"] == one["choices"][0]["token_ids"]
        told = many["kv_transfer_params"]["kv_eviction"]
        assert told == one["kv_transfer_params"]["kv_eviction"]
        assert (told["evicted_blocks"] > 0) == (budget != "full")
        record = record_of(pair, many["id"])
        assert {key: record[key] for key in told} == told
        evicted += 2 * told["evicted_blocks"]

    assert eventually(lambda: pair.metric("nexus:evicted_blocks_total") == evicted)
    served = by_engine(pair, "vllm:generation_tokens_total")
    assert set(served) == {"0", "1"}
    assert min(served.values()) > 0
    idle = {"0": 0.0, "1": 0.0}
    for gauge in ("nexus:live_blocks", "vllm:kv_cache_usage_perc", "vllm:num_requests_running"):
        assert eventually(lambda name=gauge: by_engine(pair, name) == idle), gauge  # type: ignore[misc]
