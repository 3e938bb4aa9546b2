"""Real vLLM engines for tests, one child process each.

    with Engine(Mode("v2", "async"), model_path, nexus={"budget": 512}) as engine:
        a, b = engine.generate([Request(ids), Request(others, {"max_tokens": 8}, at_step=3)])

Runners V1 and V2 cannot share a process (see shims/), nor can two configurations share an engine.
vLLM itself runs inside the child (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), so its scheduler and its
worker can be looked at between any two steps. Nothing here imports vLLM: child.py does.
"""

from __future__ import annotations

import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

HERE = Path(__file__).resolve().parent
START_TIMEOUT = 300.0
CALL_TIMEOUT = 300.0


@dataclass(frozen=True)
class Mode:
    runner: Literal["v1", "v2"]
    scheduling: Literal["sync", "async"]

    def __str__(self) -> str:
        return f"{self.runner}-{self.scheduling}"


MODES = tuple(Mode(runner, how) for runner in ("v1", "v2") for how in ("sync", "async"))


@dataclass
class Request:
    """`params` are SamplingParams; the defaults are greedy, 16 tokens, no stop at end-of-text.

    `structured_outputs` among them is a mapping. With n > 1 the i-th sequence is named "{id}/{i}"
    wherever sequences are told apart.
    """

    prompt: Sequence[int]
    params: Mapping[str, Any] = field(default_factory=dict)
    at_step: int = 0  # generate() adds it before this step
    logits: bool = False  # keep the raw logits each token was sampled from
    lora: str = ""  # the folder of an adapter
    id: str = ""


@dataclass
class Completion:
    tokens: list[int]
    text: str  # "" without `detokenize`
    finish_reason: str | None  # None while it runs
    stop_reason: int | str | None
    logprobs: list[dict[int, float]] | None  # by token id, for each token


@dataclass
class Result:
    """`tokens` and `finish_reason` are those of the first completion."""

    id: str
    completions: list[Completion]  # one, or n; those that have begun
    prompt_logprobs: list[dict[int, float]] | None  # by token id, for each token but the first
    cached_tokens: int | None
    kv_transfer_params: dict[str, Any] | None
    held_blocks: list[int]  # after each step, while the request holds a page row
    preemptions: int
    logits: torch.Tensor | None  # [len(tokens), vocab] float32

    @property
    def tokens(self) -> list[int]:
        return self.completions[0].tokens if self.completions else []

    @property
    def finish_reason(self) -> str | None:
        return self.completions[0].finish_reason if self.completions else None


@dataclass
class RequestState:
    status: str
    num_tokens: int
    num_computed_tokens: int
    num_in_flight_tokens: int
    block_ids: list[int]  # the page row of KV-cache group 0; the null block is page 0

    @property
    def held_blocks(self) -> int:
        return sum(page != 0 for page in self.block_ids)


@dataclass
class State:
    """What the scheduler holds. `pool_blocks` does not count the null block."""

    pool_blocks: int
    free_blocks: int
    hashed_blocks: int  # pages that the prefix cache can still hit
    ref_counts: dict[int, int]  # of the pages in use
    requests: dict[str, RequestState]
    batches_in_flight: int


@dataclass(frozen=True)
class Facts:
    """What really runs, for tests to assert on."""

    vllm: str
    runner: str
    scheduler: str
    worker: str
    attention_backend: str
    step: str
    batch_queue_size: int
    pool_blocks: int
    plugins: str | None


class EngineError(RuntimeError):
    """The child did not start, raised, died or ran out of time; with the end of its log."""


def shim_environment(mode: Mode) -> dict[str, str]:
    """Variables that give a process and all it spawns this runner and this scheduling."""
    return {
        "PYTHONPATH": str(HERE / "shims"),
        "NEXUS_TEST_RUNNER": mode.runner,
        "NEXUS_TEST_ASYNC": "1" if mode.scheduling == "async" else "0",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if mode.runner == "v2" else "0",
        "OMP_NUM_THREADS": os.environ.get("NEXUS_TEST_THREADS", "2"),
        # Threads that spin at barriers make a step 20 times slower as soon as a core is shared.
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


def child_environment(mode: Mode) -> dict[str, str]:
    """All variables of a child process that hosts an engine."""
    shims = shim_environment(mode)
    # The folder that this package was imported from, so that the child finds the tests' functions
    # under the names they are pickled with.
    root = str(HERE.parents[(__package__ or "engine").count(".")])
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, (shims["PYTHONPATH"], root, inherited)))
    return {**os.environ, **shims, "PYTHONPATH": path}


def engine_options(model: Path | str, options: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 4096,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 16,
        "num_gpu_blocks_override": 400,
        "seed": 0,
    }
    return {"model": str(model), **defaults, **options}


class Engine:
    """One `vllm.LLM` in a child process.

    Args:
        nexus: keyword arguments of `nexus_vllm.engine_args`; None for stock vLLM, which then loads
            no plugin whatever is installed.
        env: variables on top of `shim_environment`.
        options: keyword arguments of `vllm.LLM`, on top of `engine_options`.
    Raises:
        EngineError: the engine did not start.
    """

    def __init__(
        self,
        mode: Mode,
        model: Path | str,
        nexus: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.mode = mode
        self._folder = Path(tempfile.mkdtemp(prefix=f"engine-{mode}-"))
        self._log = self._folder / "log"
        environment = {
            **child_environment(mode),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **({"VLLM_PLUGINS": ""} if nexus is None else {}),
            **(env or {}),
        }
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", f"{__package__}.child", str(theirs.fileno())]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,  # not the repository, whose folders would shadow packages
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        theirs.close()
        self._pipe = Connection(ours.detach())
        started = time.monotonic()
        try:
            self.facts: Facts = self._call(
                "start",
                str(mode),
                engine_options(model, options),
                None if nexus is None else dict(nexus),
                timeout=START_TIMEOUT,
            )
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.monotonic() - started

    def restart(
        self, model: Path | str, nexus: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Serve another model in the same process, which has imported everything already.

        With or without eviction, as before.
        """
        settings = None if nexus is None else dict(nexus)
        self._call("stop")
        self.facts = self._call("start", str(self.mode), engine_options(model, options), settings)

    # Whole generations -----------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], timeout: float = CALL_TIMEOUT) -> list[Result]:
        """Run these requests to their end, each joining at its `at_step`; check pages every step.

        Requests added before by `add` run along, and to their end.
        """
        return self._call("generate", list(requests), timeout=timeout)

    # Step by step ----------------------------------------------------------------------------

    def add(self, request: Request) -> str:
        """Queue a request and return its id."""
        return self._call("add", request)

    def step(self, count: int = 1) -> State:
        """Run engine steps and check the pages after each (invariant I4)."""
        return self._call("steps", count)

    def abort(self, *ids: str) -> None:
        self._call("abort", ids)

    def results(self, *ids: str) -> list[Result]:
        """What these requests have produced so far."""
        return self._call("results", ids)

    def run(self, timeout: float = CALL_TIMEOUT) -> State:
        """Step until nothing is left to do and nothing is in flight."""
        return self._call("run", timeout=timeout)

    # Looking inside --------------------------------------------------------------------------

    def state(self) -> State:
        return self._call("state")

    def most_batches_in_flight(self) -> int:
        """The most batches ever scheduled whose output was still to come."""
        return self._call("most_batches_in_flight")

    def rpc(self, method: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Call the worker's `method`, or an importable function as `method(worker, *args)`.

        Returns what each rank returns, in their order.
        """
        return self._call("rpc", method, args)

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(host, *args)` in the child; `host` is `child.Host`."""
        return self._call("do", function, args)

    def reset_prefix_cache(self) -> bool:
        return self._call("reset_prefix_cache")

    def encode(self, text: str) -> list[int]:
        return self._call("encode", text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._call("decode", list(ids))

    def log(self, lines: int = 60) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    # Process ---------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._pipe.close()  # the child leaves when it reads the end of the pipe
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, command: str, *args: Any, timeout: float = CALL_TIMEOUT) -> Any:
        if not self.alive:
            raise EngineError(f"{self.mode}: the engine is gone\n{self.log()}")
        try:
            # pickle by hand: Connection.send would use torch's shared-memory reductions.
            self._pipe.send_bytes(pickle.dumps((command, args)))
            if not self._pipe.poll(timeout):
                self._process.kill()
                self._process.wait()
                raise EngineError(
                    f"{self.mode}: `{command}` took more than {timeout:.0f} s\n{self.log()}"
                )
            succeeded, value = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self._process.wait(timeout=10)
            raise EngineError(
                f"{self.mode}: the engine died in `{command}`, exit code "
                f"{self._process.returncode}\n{self.log()}"
            ) from None
        if not succeeded:
            raise EngineError(f"{self.mode}: `{command}` raised\n{value}\nlog:\n{self.log(25)}")
        return value


class Engines:
    """Engines by configuration. Starting one costs many seconds, so a few stay up."""

    def __init__(self, model: Path, keep: int = 2) -> None:
        self.model = model
        self.keep = keep
        self._engines: dict[str, Engine] = {}  # least recently used first

    def __call__(
        self,
        mode: Mode,
        nexus: Mapping[str, Any] | None = None,
        model: Path | None = None,
        **options: Any,
    ) -> Engine:
        """The engine of this configuration, idle and with an empty prefix cache."""
        model = model or self.model
        settings = (sorted((nexus or {}).items()), nexus is None, sorted(options.items()))
        key = repr((mode, model, *settings))
        engine = self._engines.pop(key, None)
        if engine is not None:
            try:
                engine.run()
                engine.reset_prefix_cache()
            except EngineError:  # broken by the test before: start afresh
                engine.close()
                engine = None
        if engine is None:
            while len(self._engines) >= self.keep:
                self._engines.pop(next(iter(self._engines))).close()
            engine = Engine(mode, model, nexus, **options)
        self._engines[key] = engine
        return engine

    def close(self) -> None:
        while self._engines:
            self._engines.popitem()[1].close()
