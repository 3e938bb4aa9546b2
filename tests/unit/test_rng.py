"""Counter-based uniforms: frozen values, dependence on the counters alone, and quality."""

import math

import pytest
import torch
from torch import Tensor

from nexus_vllm.rng import uniforms

LAYERS = torch.arange(8)
BLOCKS = torch.arange(512).expand(8, 512)


def grid(seed: int = 7, event: int = 0, draws: int = 8) -> Tensor:
    return uniforms(seed, event, LAYERS, BLOCKS, draws).double()


def splitmix(seed: int, event: int, layer: int, block: int, draw: int) -> float:
    """The same number in Python integers, written from the description."""
    mask, state = (1 << 64) - 1, seed & ((1 << 64) - 1)
    for counter in (0, layer, event, block, draw):
        x = (state + (counter + 1) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        state = x ^ (x >> 31)
    return (2 * (state >> 41) + 1) / 2**24


def test_values_are_frozen() -> None:
    """Changing them changes every kept set that was ever recorded: do so on purpose only."""
    got = uniforms(0, 0, torch.tensor([0, 5]), torch.tensor([[0, 1], [3, 2]]), 2)
    expected = [
        [[7908955, 12159323], [13114453, 3226565]],
        [[12287067, 5373333], [2038319, 16092389]],
    ]
    assert (got * 2**24).tolist() == expected


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 2**64 + 5])
@pytest.mark.parametrize("event", [0, 3, 2**31])
def test_equals_integer_reference(seed: int, event: int) -> None:
    layers, blocks = torch.tensor([0, 31]), torch.tensor([[0, 4095, 7], [2**40, 1, 2]])
    got = uniforms(seed, event, layers, blocks, 3)
    for row, layer in enumerate(layers.tolist()):
        for column, block in enumerate(blocks[row].tolist()):
            expected = [splitmix(seed, event, layer, block, draw) for draw in range(3)]
            assert got[row, column].tolist() == expected


def test_seed_counts_modulo_two_to_64() -> None:
    assert torch.equal(grid(seed=5), grid(seed=5 + 2**64))


def test_value_depends_on_its_counters_alone() -> None:
    whole = uniforms(3, 9, LAYERS, BLOCKS, 5)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(0))[:40]
    part = uniforms(3, 9, LAYERS[[6, 2]], BLOCKS[[6, 2]][:, order], 2)
    assert torch.equal(part, whole[[6, 2]][:, order, :2])


def test_every_counter_matters() -> None:
    base = uniforms(3, 9, LAYERS, BLOCKS, 1)
    for other in (
        uniforms(4, 9, LAYERS, BLOCKS, 1),
        uniforms(3, 10, LAYERS, BLOCKS, 1),
        uniforms(3, 9, LAYERS + 1, BLOCKS, 1),
        uniforms(3, 9, LAYERS, BLOCKS + 1, 1),
    ):
        assert (base == other).double().mean() < 0.001


def test_strictly_inside_the_unit_interval() -> None:
    """Odd multiples of 2^-24, so that neither log u nor log(-log u) is infinite."""
    u = grid(draws=32)
    assert u.min() > 0
    assert u.max() < 1
    assert torch.all((u * 2**24).remainder(2) == 1)
    largest = torch.tensor((2 * (2**23 - 1) + 1) / 2**24, dtype=torch.float32)
    assert largest < 1


def test_mean_and_variance() -> None:
    u = grid(draws=32)  # 131072 numbers
    sigma = math.sqrt(1 / 12 / u.numel())
    assert abs(u.mean().item() - 0.5) < 4 * sigma
    assert abs(u.var().item() - 1 / 12) < 4 * math.sqrt(1 / 180 / u.numel())


@pytest.mark.parametrize("bins", [2, 16, 256])
def test_chi_square_uniform(bins: int) -> None:
    u = grid(draws=32).flatten()
    seen = torch.bincount((u * bins).long(), minlength=bins).double()
    expected = u.numel() / bins
    chi = ((seen - expected) ** 2 / expected).sum().item()
    assert abs(chi - (bins - 1)) < 4 * math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("axis", ["seed", "event", "layer", "block", "draw"])
def test_neighbouring_counters_are_uncorrelated(axis: str) -> None:
    u = grid() - 0.5
    if axis == "seed":
        v = grid(seed=8) - 0.5
    elif axis == "event":
        v = grid(event=1) - 0.5
    else:
        v = u.roll(1, dims={"layer": 0, "block": 1, "draw": 2}[axis])
    correlation = (u * v).mean().item() * 12
    assert abs(correlation) < 4 / math.sqrt(u.numel())


def test_pairs_fill_the_square() -> None:
    """Chi-square on 16 x 16 cells of (draw, next draw) and of (block, next block)."""
    u = (grid(draws=16) * 16).long()
    for first, second in ((u[..., ::2], u[..., 1::2]), (u[:, ::2], u[:, 1::2])):
        cells = torch.bincount((first * 16 + second).flatten(), minlength=256).double()
        expected = cells.sum() / 256
        chi = ((cells - expected) ** 2 / expected).sum().item()
        assert abs(chi - 255) < 4 * math.sqrt(2 * 255)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(8,\).*\(3, 2\)"):
        uniforms(0, 0, LAYERS, torch.zeros(3, 2, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match="draws is 0"):
        uniforms(0, 0, LAYERS, BLOCKS, 0)
