"""vLLM's model runner V2 on a CPU: its Triton kernels run in Triton's interpreter.

Written for vLLM 0.32 and Triton 3.9. It proves bookkeeping; it cannot prove compilation, alignment
or stream races. It also takes vLLM's C++ replacements of Triton kernels out of use, so tests of
runner V1 belong in a process without it.
"""

from __future__ import annotations

import os
import sys
from typing import Any


class _AlwaysActive:
    """Stands for a Triton driver. vLLM asks only this; the interpreter needs no driver at all."""

    @staticmethod
    def is_active() -> bool:
        return True


class _NothingToUndo:
    @staticmethod
    def restore() -> None:
        pass


def install() -> None:
    # Read when @triton.jit decorates a kernel, so it has to be there before vLLM is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    declare_cpu_backend()
    patch_language_once()
    pass_cpu_tensors_through()
    store_under_boolean_masks()
    adapt_launches()


def declare_cpu_backend() -> None:
    """Without a Triton backend called `cpu`, vLLM sets HAS_TRITON to False and refuses V2."""
    from triton.backends import Backend, backends

    backends.setdefault("cpu", Backend(compiler=None, driver=_AlwaysActive))


def patch_language_once() -> None:
    """Speed. The interpreter swaps the functions of triton.language in and out at every launch and
    every call between kernels. Nothing is compiled here, so they may stay swapped.
    """
    from triton.runtime import interpreter

    swap, done = interpreter._patch_lang, {}

    def swap_once(fn: Any) -> Any:
        # Keyed by the module's globals; holding them keeps their id from being used again.
        if id(fn.__globals__) not in done:
            done[id(fn.__globals__)] = fn.__globals__
            swap(fn)
        return _NothingToUndo

    interpreter._patch_lang = swap_once


def pass_cpu_tensors_through() -> None:
    """Speed. After every launch the interpreter copies each argument's whole storage back to the
    device, here onto itself: the entire KV cache for a kernel that is handed a view of it.
    """
    from triton.runtime.interpreter import GridExecutor

    GridExecutor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
    GridExecutor._restore_args_dev = lambda self, *args: None


def store_under_boolean_masks() -> None:
    """Gap: a mask made with a scalar condition, as structured output has it, is not of booleans."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    store = InterpreterBuilder.create_masked_store

    def store_under_booleans(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask = TensorHandle(mask.data.astype(bool), mask.dtype)
        return store(self, pointers, value, mask, *rest)

    InterpreterBuilder.create_masked_store = store_under_booleans


def adapt_launches() -> None:
    from triton import next_power_of_2
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def adapted(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        # Gap: the top-k/top-p kernel calls a tensor method on a `tl.range` index, which is a plain
        # int in the interpreter. vLLM has a PyTorch version. Done here, since vLLM comes later.
        sampler = sys.modules.get("vllm.v1.sample.ops.topk_topp_sampler")
        if sampler is not None:
            vars(sampler)["HAS_TRITON"] = False
        # Speed: sampling runs one program per 1,024 tokens of the vocabulary. One program for all
        # of it finds the same token (noise depends on the token, ties go to the left).
        if self.fn.__name__ == "_gumbel_sample_kernel" and not warmup:
            block_maximum = args[2]
            block_maximum[:, 1:] = float("-inf")
            kwargs["BLOCK_SIZE"] = next_power_of_2(grid[1] * kwargs["BLOCK_SIZE"])
            grid = (grid[0], 1)
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    InterpretedFunction.run = adapted
