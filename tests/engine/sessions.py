"""The child process of test_sessions: streaming-input sessions on a `vllm.AsyncLLM`."""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .child import completion_of
from .harness import Completion, engine_options
from .ranks import qualified_name


@dataclass(frozen=True)
class Turn:
    prompt: Sequence[int]
    params: Mapping[str, Any]  # of SamplingParams


@dataclass
class Told:
    scheduler: str
    runner: str
    answers: dict[str, list[Completion]] = field(default_factory=dict)  # of each session's turns
    traces: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    held: list[bool] = field(default_factory=list)  # pages by each that waits for another turn
    freed: bool = False  # all pages were free when all sessions had ended


async def converse(llm: Any, told: Told, name: str, turns: Sequence[Turn]) -> None:
    """Each turn is sent when the one before has been answered."""
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    common = {"temperature": 0, "detokenize": False, "output_kind": RequestOutputKind.DELTA}
    params = [SamplingParams(**common, **turn.params) for turn in turns]
    answered = asyncio.Event()

    async def inputs() -> AsyncIterator[Any]:
        for turn, asked in zip(turns, params, strict=True):
            answered.clear()
            yield StreamingInput({"prompt_token_ids": list(turn.prompt)}, asked)
            await answered.wait()
        told.held.append(not await llm.reset_prefix_cache())

    answers = told.answers[name] = []
    begun = False
    async for output in llm.generate(inputs(), params[0], name):
        part = completion_of(output.outputs[0])
        if begun:
            answers[-1].tokens += part.tokens
            answers[-1].logprobs = [*(answers[-1].logprobs or ()), *(part.logprobs or ())]
            answers[-1].finish_reason = part.finish_reason
        else:
            answers.append(part)
        begun = part.finish_reason is None
        if not begun:
            answered.set()


async def talk(
    options: Mapping[str, Any], nexus: Mapping[str, Any], sessions: Mapping[str, Sequence[Turn]]
) -> Told:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    import nexus_vllm

    arguments = {**options, **nexus_vllm.engine_args(**nexus), "async_scheduling": True}
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    try:
        (runner,) = await llm.collective_rpc(runner_of)
        told = Told(llm.vllm_config.scheduler_config.scheduler_cls, runner)
        await asyncio.gather(*(converse(llm, told, *each) for each in sessions.items()))
        (traces,) = await llm.collective_rpc("kv_eviction_trace")
        told.traces = {key.rsplit("-", 1)[0]: events for key, events in traces.items()}
        told.freed = await llm.reset_prefix_cache()
    finally:
        llm.shutdown()
    return told


def runner_of(worker: Any) -> str:
    return qualified_name(worker.model_runner)


def main() -> None:
    given, results = map(Path, sys.argv[1:])
    model, options, nexus, sessions = pickle.loads(given.read_bytes())
    told = asyncio.run(talk(engine_options(model, options), nexus, sessions))
    results.write_bytes(pickle.dumps(told))
