"""Which implementation of scoring, selecting and copying a worker uses.

Every kernel in `nexus_vllm.kernels` stands beside a reference in plain torch that computes the
same. On a GPU the kernels run; elsewhere the references do, and Triton need not be there.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, SupportsInt

import torch
from torch import Tensor

from nexus_vllm import pairing, selectors
from nexus_vllm.pairing import Pairs

if TYPE_CHECKING:
    from nexus_vllm.engine.evictor import Layer
    from nexus_vllm.engine.kernel_reader import Memory

ENVIRONMENT = "NEXUS_VLLM_KERNELS"
"""`triton` or `torch`, to use kernels, or references, whatever the device."""


def use_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on this device. Raises ValueError on an unknown choice."""
    choice = os.environ.get(ENVIRONMENT, "")
    if choice not in ("", "triton", "torch"):
        raise ValueError(f"{ENVIRONMENT} is {choice!r}, must be triton or torch")
    return choice == "triton" if choice else device.type == "cuda"


def memory_of(layers: "list[Layer]") -> "Memory | None":
    """The layers' caches as kernels read them; None where references read them."""
    if not use_kernels(layers[0].cache.device):
        return None
    from nexus_vllm.engine.kernel_reader import Memory

    return Memory.of(layers)


def select(
    kind: str,
    weights: Tensor,
    keep: int | Tensor,
    forced: Tensor,
    *,
    seed: int,
    event: int,
    layers: Tensor,
    block_ids: Tensor,
    **parameters: Any,
) -> Tensor:
    """`selectors.select` without its checks, which would wait for the device: a model that
    overflows spoils its own text, and an error here would end the engine."""
    if use_kernels(weights.device):
        from nexus_vllm.kernels import select as kernel

        if kind in kernel.KINDS:
            rows = len(weights)
            return kernel.select(
                kind,
                weights,
                torch.full_like(layers, keep) if isinstance(keep, int) else keep,
                forced,
                seeds=[seed] * rows,
                events=[event] * rows,
                layers=layers,
                block_ids=block_ids,
                **parameters,
            )
    return selectors.select(
        kind,
        weights,
        keep,
        forced,
        seed=seed,
        event=event,
        layers=layers,
        block_ids=block_ids,
        validate=False,
        **parameters,
    )


def pair(kept: Tensor, slots: Tensor, places: int, most: int) -> Pairs:
    """`pairing.pair`."""
    if use_kernels(kept.device):
        from nexus_vllm.kernels import pairs

        return pairs.pairs(kept, slots, places, most)
    return pairing.pair(kept, slots, places, most)


def copy(flat: Tensor, source: Tensor, target: Tensor, size: int, counts: Tensor) -> None:
    """`kernels.fill` of `size` numbers of a flat cache, from and to places [R, C] in numbers."""
    from nexus_vllm.kernels.fill import fill

    each = 4 // flat.element_size()  # numbers in the words that it copies
    fill(flat.view(torch.int32), source // each, target // each, size // each, counts)


def sent(numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device, int64 if they are a list; a GPU takes them in stream order,
    without either waiting for the other."""
    there = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.long)
    if device.type == "cpu":
        return there
    if torch.cuda.is_available():
        there = there.pin_memory()
    return there.to(device, non_blocking=True)


class Event(Protocol):
    """A device's."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def recorded(event: Event) -> Event:
    """A device's event, which comes once all that was launched before has been done."""
    event.record()
    return event


def wait_for(event: Event) -> None:
    """Until a device's event has come."""
    event.synchronize()


class Number:
    """A number on its way from a GPU. `int` waits until it has come, and for nothing after it."""

    def __init__(self, count: Tensor) -> None:
        on_cuda = count.device.type == "cuda"
        self._copied = torch.empty((), dtype=count.dtype, pin_memory=on_cuda)
        self._copied.copy_(count, non_blocking=True)
        self._come = recorded(torch.cuda.Event()) if on_cuda else None

    def __int__(self) -> int:
        if self._come is not None:
            wait_for(self._come)
        return int(self._copied)


def number(count: Tensor) -> SupportsInt:
    """A number that the host wants to know, once the step's tokens have come, and not before."""
    return int(count) if count.device.type == "cpu" else Number(count)
