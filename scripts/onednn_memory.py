"""How vLLM's linear layers on a CPU fill memory with oneDNN's kernels, without this plugin.

    [ONEDNN_PRIMITIVE_CACHE_CAPACITY=0] .venv/bin/python scripts/onednn_memory.py

Every number of tokens in a step is a shape of its own. Prints the resident memory as more steps
have run, and what malloc_trim() leaves of it at the end: the rest was held by nobody, in pieces.
"""

import ctypes
import random

import psutil
import torch
from vllm import _custom_ops as ops

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # SmolLM2-135M's: outputs, inputs
LAYERS = 4
STEPS = 4000
REPORT_EVERY = 500


def resident() -> int:
    """MiB."""
    return psutil.Process().memory_info().rss >> 20


def tokens(draw: random.Random) -> int:
    """Of one step: mostly decoding, sometimes a prompt."""
    return draw.randint(1, 400) if draw.random() < 0.3 else draw.randint(1, 24)


def main() -> None:
    draw = random.Random(0)
    # As vLLM's dispatch_cpu_unquantized_gemm makes them, with 32 kernels for each layer.
    linear = [
        (inputs, ops.create_onednn_mm(torch.randn(outputs, inputs).t(), 32))
        for _ in range(LAYERS)
        for outputs, inputs in SHAPES
    ]
    print(f"{LAYERS} layers: {resident()} MiB", flush=True)
    for step in range(1, STEPS + 1):
        count = tokens(draw)
        for inputs, handler in linear:
            ops.onednn_mm(handler, torch.zeros(count, inputs), None)
        if step % REPORT_EVERY == 0:
            print(f"after {step} steps: {resident()} MiB", flush=True)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    print(f"after malloc_trim: {resident()} MiB")


if __name__ == "__main__":
    main()
