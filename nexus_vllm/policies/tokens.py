"""From scores of tokens to weights of blocks."""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from nexus_vllm.policies.base import Observation, Pool, Tokens, pool

Pooling = Literal["avg", "max"]


def pooled(scores: Tensor, block_ids: Tensor, kernel: int, pooling: Pooling = "avg") -> Tensor:
    """Each token's score [..., H, N, b] averaged with, or the largest among, its neighbours'.

    kernel: odd, how many tokens; 1 changes nothing. Neighbours are those next to it in what is left
    of the text, whatever lay between; beyond the ends there are zeros. block_ids: [..., N].
    """
    if kernel == 1:
        return scores
    *lead, size, block = scores.shape
    order = block_ids.argsort(dim=-1)[..., None, :, None].expand(scores.shape)
    line = scores.gather(-2, order).reshape(-1, 1, size * block)
    if pooling == "avg":
        line = functional.avg_pool1d(line, kernel, stride=1, padding=kernel // 2)
    else:
        line = functional.max_pool1d(line, kernel, stride=1, padding=kernel // 2)
    return scores.new_empty(scores.shape).scatter_(-2, order, line.view(*lead, size, block))


def of_blocks(scores: Tensor, heads: Pool = "mean") -> Tensor:
    """Weights [..., N] of token scores [..., H, N, b]: summed in a block, pooled over heads."""
    return pool(scores.sum(-1), heads, -2)


def spread_out(scores: Tensor, candidates: Tensor) -> Tensor:
    """Weights [..., N] of scores that only rank blocks: e^z, z in standard deviations.

    z is the distance of a score from the mean of the row's candidates. Scores of a method that
    keeps the highest may be all but alike; selectors read ratios of weights, and would draw from
    such almost evenly. The ranking stays. Differences in the last bits do not count, nor z over 80.
    """
    exact = scores.double()
    count = candidates.sum(-1, keepdim=True).clamp(min=1)
    mean = exact.masked_fill(~candidates, 0).sum(-1, keepdim=True) / count
    apart = exact - mean
    variance = apart.square().masked_fill(~candidates, 0).sum(-1, keepdim=True) / count
    deviation = torch.maximum(variance.sqrt(), mean.abs() * 2**-16).clamp(min=torch.finfo().tiny)
    return (apart / deviation).clamp(-80, 80).exp().float()


def ranked(scores: Tensor, candidates: Tensor, tokens: Tokens) -> Tensor:
    """Weights [..., H, N] of tokens' scores [..., N, H, b] that only rank.

    tokens: "sum" adds up e^z of a block's tokens, z among all tokens of candidates (`spread_out`),
    so that a block counts for its high tokens; "max" takes its highest score and "mean" the mean of
    its scores, and e^z of that among the blocks.
    """
    heads = scores.movedim(-2, -3)  # [..., H, N, b]
    inside = candidates[..., None, :].expand(heads.shape[:-1])
    if tokens == "sum":
        each = inside[..., None].expand(heads.shape).flatten(-2)
        return spread_out(heads.flatten(-2), each).unflatten(-1, heads.shape[-2:]).sum(-1)
    return spread_out(heads.amax(-1) if tokens == "max" else heads.mean(-1), inside)


def weights_of(obs: Observation, scores: Tensor, tokens: Tokens) -> Tensor:
    """`ranked` of scores [..., N, H, b] of an observation's tokens."""
    if obs.reader is not None:
        return obs.reader.ranked(scores, obs.candidates, tokens)
    return ranked(scores, obs.candidates, tokens)


def check_pool(policy: str, kernel: int, pooling: str = "avg") -> None:
    """Raise ValueError unless `pooled` takes them."""
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"{policy}: pool is {kernel}, must be odd and at least 1")
    if pooling not in get_args(Pooling):
        choices = ", ".join(get_args(Pooling))
        raise ValueError(f"{policy}: pooling is {pooling!r}, choose one of {choices}")
