"""LU-KV's static profile (arXiv 2602.08585): budgets from measured future utility."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from nexus_vllm.allocators.base import Allocator, Situation, apportion
from nexus_vllm.profile import Profile


@dataclass(frozen=True, eq=False)
class Lu(Allocator):
    """Each head keeps the profile's share of the N blocks ever seen, at the density that adds up.

    Without bounds that density is B/N. Where a head holds or must hold another number, what this
    frees or costs the others is dealt along the profile: the density of all others rises or falls
    until the sum is B*L*H, so they gain or lose what a larger or smaller budget would have given
    or taken. So does a tensor-parallel rank, whose heads add up to B/N only together with others'.

    profile: shares of the whole model; whoever makes a Lu has checked that it fits (`check`).
    layers, heads: first and past-the-last one of this rank's part of it; None: all.
    """

    profile: Profile
    layers: tuple[int, int] | None = None
    heads: tuple[int, int] | None = None

    name: ClassVar[str] = "lu"
    needs_profile: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field, size in zip(("layers", "heads"), self.profile.shares.shape[1:], strict=True):
            part = getattr(self, field)
            if part is not None and not 0 <= part[0] < part[1] <= size:
                raise ValueError(f"lu: {field} is {part}, the profile has {size} of them")

    def counts(self, situation: Situation) -> Tensor:
        """As in Allocator. Raises ValueError where the profile has other layers or heads."""
        floor, capacity = situation.floor, situation.capacity
        rows, columns = slice(*self.layers or (None,)), slice(*self.heads or (None,))

        def path(density: float) -> Tensor:
            return situation.seen * self.profile.at(density)[rows, columns].to(floor.device)

        shape = path(1.0).shape
        if shape != floor.shape:
            raise ValueError(
                f"lu: the profile's part has {shape[0]} layers x {shape[1]} KV heads, the sequence "
                f"{floor.shape[0]} x {floor.shape[1]}; name this rank's part"
            )
        return apportion(path, 1.0, situation.total, floor, capacity)
