"""Counter-based random numbers: a value depends on what it is for, not on when it was drawn.

Every tensor-parallel rank, every replay after a preemption and every batch composition must choose
the same blocks, so nothing here has state. A uniform is addressed by (seed, event, layer, block,
draw); each coordinate advances a SplitMix64 stream (add an odd constant times the counter, then a
64-bit avalanche) that the previous coordinates have keyed. Integer arithmetic only, hence the same
bits on every device.
"""

import torch
from torch import Tensor

# A uniform is (2k + 1) / 2^24 with k < 2^23: exact in float32, centred, never 0 or 1. One bit more
# in k, and the largest would round to 1.
_BITS = 23


def signed(value: int) -> int:
    """The int64 with the same low 64 bits as `value`."""
    value &= 0xFFFF_FFFF_FFFF_FFFF
    return value - (1 << 64) if value >> 63 else value


_STEP = signed(0x9E37_79B9_7F4A_7C15)  # 2^64 / golden ratio, odd
_MULTIPLY_1 = signed(0xBF58_476D_1CE4_E5B9)
_MULTIPLY_2 = signed(0x94D0_49BB_1331_11EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch shifts int64 arithmetically, so clear the copies of the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _avalanche(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, a bijection of the 64-bit integers (int64 products wrap)."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLY_2
    return x ^ _shift_right(x, 31)


def _advance(state: Tensor, counter: Tensor | int) -> Tensor:
    """Output number `counter` of the stream that starts at `state`."""
    if isinstance(counter, int):
        return _avalanche(state + signed((counter + 1) * _STEP))
    return _avalanche(state + (counter + 1) * _STEP)


def uniforms(seed: int, event: int, layers: Tensor, blocks: Tensor, draws: int) -> Tensor:
    """Independent uniforms strictly inside (0, 1): odd multiples of 2^-24.

    seed: any integer (its low 64 bits count). event: how many evictions this sequence has had.
    layers: [L] int64, what a row is (a layer, or a numbered (layer, KV head) pair).
    blocks: [L, N] int64, original logical block indices, in any order.
    Returns [L, N, draws] float32 on the device of `blocks`.
    Raises ValueError on shapes that do not fit.
    """
    if layers.ndim != 1 or blocks.ndim != 2 or layers.shape[0] != blocks.shape[0]:
        raise ValueError(
            f"uniforms: layers {tuple(layers.shape)} and blocks {tuple(blocks.shape)} "
            "must be [L] and [L, N]"
        )
    if draws < 1:
        raise ValueError(f"uniforms: draws is {draws}, must be at least 1")
    layers = layers.to(blocks.device, torch.int64)
    state = _advance(torch.full_like(layers, signed(seed)), 0)
    state = _advance(state, layers)
    state = _advance(state, event)
    state = _advance(state[:, None], blocks.to(torch.int64))
    state = _advance(state[..., None], torch.arange(draws, device=blocks.device))
    odd = 2 * _shift_right(state, 64 - _BITS) + 1
    return odd.to(torch.float32) * 2.0 ** -(_BITS + 1)
