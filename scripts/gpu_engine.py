"""The end-to-end part of scripts/gpu_check.py: real engines on a GPU, each in a process of its own.

Run by itself, `gpu_engine.py JSON`, it is one of those processes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from gpu_check import reach_kernels

SCRIPTS = Path(__file__).resolve().parent
ENGINES = (("TRITON_ATTN", "float32"), ("FLASH_ATTN", "bfloat16"))
"""Attention backends and dtypes: one whose rounding seldom changes a word, one that is served."""
PROMPT, DECODED, BUDGET = 300, 96, 160
POLICIES = ("nexus", "snapkv", "h2o", "tova", "knorm", "keydiff", "vase", "expected-attention")
UNEVEN = ("auto", "global", "ada")
OPTIONS = {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 400,
    "gpu_memory_utilization": 0.3,
    "seed": 0,
}
GRAPHS, EAGER, REFERENCES = "CUDA graphs", "eager", "eager with references for kernels"
RUNS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    GRAPHS: ({}, {}),
    EAGER: ({"enforce_eager": True}, {}),
    REFERENCES: ({"enforce_eager": True}, {"NEXUS_VLLM_KERNELS": "torch"}),
}
"""Options of the engine, and variables of its process."""
COMPARED = ((GRAPHS, EAGER), (EAGER, REFERENCES))
LIMIT = 240.0
"""Seconds that one engine may take, start included."""


class EngineError(RuntimeError):
    """An engine did not start, failed or took too long; with the end of its log."""


class OutOfTime(EngineError):
    """An engine was not started, since the time given was over."""


@dataclass(frozen=True)
class Outcome:
    """One statement, and whether it holds. None: it could not be told."""

    what: str
    passed: bool | None
    told: str = ""


def missing() -> str:
    """Why no engine can be started with this Python; empty where one can."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    asked = "from vllm.platforms import current_platform as p; print(p.is_cuda())"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    if done.returncode:
        return f"vLLM cannot be imported: {_last(done.stderr)}"
    return (
        "" if done.stdout.split()[-1:] == ["True"] else "the vLLM installed is not built for CUDA"
    )


def bundled_model() -> Path:
    """scripts/prepare_model.py's folder. Raises EngineError where it cannot be had."""
    command = [sys.executable, str(SCRIPTS / "prepare_model.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise EngineError(f"no model: {_last(done.stderr)}; name a folder with --model")
    return Path(done.stdout.strip())


def outcomes(model: Path, deadline: float) -> Iterator[Outcome]:
    """All that is to be shown, engine by engine. deadline: of time.monotonic()."""
    for backend, dtype in ENGINES:
        where = f"{backend}, {dtype}"
        options = {"attention_backend": backend, "dtype": dtype}
        found: dict[str, dict[str, Any]] = {}
        for run, (more, variables) in RUNS.items():
            try:
                found[run] = started(model, {**options, **more}, {}, variables, deadline)
            except EngineError as error:
                passed = None if isinstance(error, OutOfTime) else False
                yield Outcome(f"{where}, {run}: the engine runs", passed, str(error))
                continue
            yield from sound(where, run, backend, found[run])
        same = [
            compared(where, one, other, batch, found)
            for one, other in COMPARED
            if one in found and other in found
            for batch in found[one]["batches"]
        ]
        if any(not outcome.passed and GRAPHS in outcome.what for outcome in same):
            yield from excused(where, model, options, deadline, same)
        else:
            yield from same


def excused(
    where: str, model: Path, options: dict[str, Any], deadline: float, same: list[Outcome]
) -> Iterator[Outcome]:
    """What is the same, and what cannot be told: eager engines compile nothing, so they round
    otherwise. Where vLLM without eviction gives two texts as well, a difference between CUDA graphs
    and eager may be that, and is neither passed nor failed.
    """
    try:
        apart = stock(model, options, deadline)
    except EngineError as error:
        apart = ""
        yield Outcome(f"{where}: vLLM without eviction runs, to compare", None, str(error))
    for outcome in same:
        if apart and not outcome.passed and GRAPHS in outcome.what:
            told = f"{outcome.told}; vLLM without eviction differs as well ({apart})"
            outcome = replace(outcome, passed=None, told=told)
        yield outcome


def stock(model: Path, options: dict[str, Any], deadline: float) -> str:
    """Where CUDA graphs and eager differ in vLLM without eviction, empty if nowhere."""
    graphs, eager = (
        started(model, {**options, **RUNS[run][0]}, None, {}, deadline) for run in (GRAPHS, EAGER)
    )
    apart = (difference(told, eager["batches"][b]) for b, told in graphs["batches"].items())
    return next(filter(None, apart), "")


def sound(where: str, run: str, backend: str, told: Mapping[str, Any]) -> Iterator[Outcome]:
    """That a run was what it is called: otherwise its comparison would say nothing."""
    used = told["backend"]
    yield Outcome(f"{where}, {run}: attention is {backend} with eviction", used == backend, used)
    replays = told["batches"]["equal heads"]["replays"]
    wanted = (replays > 0) == (run == GRAPHS)
    yield Outcome(f"{where}, {run}: graphs replayed as they should be", wanted, f"{replays}")
    requests = [r for batch in told["batches"].values() for r in batch["requests"].values()]
    evicted = all(len(request["trace"]) >= 2 for request in requests)
    yield Outcome(f"{where}, {run}: every request was shrunk twice or more", evicted)
    uneven = told["batches"]["uneven heads"]["requests"]
    dealt = all(_uneven(uneven[name]["trace"]) for name in ("global", "ada"))
    yield Outcome(f"{where}, {run}: heads had budgets of their own", dealt)


def _uneven(trace: list[dict[str, Any]]) -> bool:
    """Whether some KV head keeps fewer blocks than another: -1 fills up."""
    return any(
        block < 0
        for event in trace
        for layer in event["kept"]
        for head in layer
        if isinstance(head, list)
        for block in head
    )


def compared(
    where: str, one: str, other: str, batch: str, found: Mapping[str, dict[str, Any]]
) -> Outcome:
    what = f"{where}, {batch}: {one} and {other} give the same text and kept sets"
    apart = difference(found[one]["batches"][batch], found[other]["batches"][batch])
    return Outcome(what, not apart, apart)


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first thing in which two batches differ, empty if none."""
    if one["requests"].keys() != other["requests"].keys():
        return "not the same requests"
    for name, told in one["requests"].items():
        beside = other["requests"][name]
        for event, (a, b) in enumerate(zip(told["trace"], beside["trace"], strict=False)):
            if a != b:
                return f"{name}: what eviction {event} keeps"
        for place, (a, b) in enumerate(zip(told["tokens"], beside["tokens"], strict=False)):
            if a != b:
                return f"{name}: token {place}"
        if told != beside:
            return f"{name}: how many tokens or evictions"
    return ""


def started(
    model: Path,
    options: dict[str, Any],
    nexus: dict[str, Any] | None,
    variables: dict[str, str],
    deadline: float,
) -> dict[str, Any]:
    """What an engine in a process of its own tells. nexus None: vLLM without eviction."""
    left = min(LIMIT, deadline - time.monotonic())
    if left <= 0:
        raise OutOfTime("left out: the time given is over")
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "told.json", Path(folder) / "log"
        told = {"model": str(model), "options": options, "nexus": nexus, "out": str(out)}
        command = [sys.executable, str(Path(__file__).resolve()), json.dumps(told)]
        environment = {**os.environ, **environment_of(nexus is not None), **variables}
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                stdout=stream, stderr=subprocess.STDOUT,
            )  # fmt: skip
            try:
                process.wait(timeout=left)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise EngineError(f"took more than {left:.0f} s: {_tail(log)}") from None
        if process.returncode or not out.exists():
            raise EngineError(f"exit code {process.returncode}: {_tail(log)}")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def environment_of(evicting: bool) -> dict[str, str]:
    """Of a process with an engine."""
    return {
        # In one process, so that the replays of graphs can be counted.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "NEXUS_VLLM_UNCONFIRMED": "1",
        **({} if evicting else {"VLLM_PLUGINS": ""}),
    }


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no word of why"])[-1]


# In the engine's process ------------------------------------------------------------------------


def serve(told: Mapping[str, Any]) -> dict[str, Any]:
    """Start the engine, ask it two batches, and tell tokens and kept sets of each request."""
    import torch
    from vllm import LLM

    evicting = told["nexus"] is not None
    options = {"model": told["model"], **OPTIONS, **told["options"]}
    if evicting:
        import nexus_vllm

        settings = {"budget": BUDGET, "trace": True, **told["nexus"]}
        options |= nexus_vllm.engine_args(**settings)
    replays = [0]
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> Any:
        replays[0] += 1
        return replay(graph)

    torch.cuda.CUDAGraph.replay = counted
    llm = LLM(**options)
    equal = {policy: {"kv_policy": policy, "kv_allocator": "uniform"} for policy in POLICIES}
    uneven = {name: {"kv_allocator": name} for name in UNEVEN}
    batches = {}
    for name, requests in {"equal heads": equal, "uneven heads": uneven}.items():
        before = replays[0]
        answers = ask(llm, name, requests, evicting)
        batches[name] = {"requests": answers, "replays": replays[0] - before}
    backend = llm.collective_rpc(backend_of)[0] if evicting else ""
    return {"backend": backend, "batches": batches}


def ask(
    llm: Any, batch: str, requests: Mapping[str, dict[str, str]], evicting: bool
) -> dict[str, Any]:
    """Run these requests together; each has a part of the text of its own."""
    from vllm import SamplingParams

    book = " ".join(" ".join(topics[name].split()) for name in ("with", "class", "import", "yield"))
    ids = llm.get_tokenizer().encode(book)
    internal, tokens = {}, {}
    for index, (name, directive) in enumerate(requests.items()):
        extra = {**directive, "kv_budget": BUDGET, "kv_seed": 3, "kv_prefill": "oneshot"}
        params = SamplingParams(
            temperature=0, max_tokens=DECODED, ignore_eos=True, detokenize=False,
            extra_args=extra if evicting else None,
        )  # fmt: skip
        prompt = {"prompt_token_ids": ids[40 * index : 40 * index + PROMPT]}
        identity = f"{batch} {name}"
        internal[name] = llm.llm_engine.add_request(identity, prompt, params)
    while llm.llm_engine.has_unfinished_requests():
        for output in llm.llm_engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    traces = llm.collective_rpc("kv_eviction_trace")[0] if evicting else {}
    return {
        name: {"tokens": tokens[f"{batch} {name}"], "trace": traces.get(internal[name], [])}
        for name in requests
    }


def backend_of(worker: Any) -> str:
    """The attention backend of the first layer, where it is one with eviction."""
    from nexus_vllm.engine.attention import EvictionImplMixin

    layer = next(iter(worker._attention_layers().values()))
    name: str = layer.attn_backend.get_name()
    return name if isinstance(layer.impl, EvictionImplMixin) else f"{name} without eviction"


def main() -> int:
    told = json.loads(sys.argv[1])
    reach_kernels()
    Path(told["out"]).write_text(json.dumps(serve(told)))
    sys.stdout.flush()
    os._exit(0)  # vLLM's shutdown has nothing to save


if __name__ == "__main__":
    sys.exit(main())
