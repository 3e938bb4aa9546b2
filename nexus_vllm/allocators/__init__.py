"""Allocators: from a sequence's budget to a number of blocks for each layer and KV head.

To add one: a file with a frozen dataclass that derives from Allocator, and a line in ALLOCATORS.
The contract test then covers it.
"""

from dataclasses import fields
from typing import Any

from nexus_vllm.allocators.ada import Ada
from nexus_vllm.allocators.base import Allocator, Situation, on_host
from nexus_vllm.allocators.cake import Cake
from nexus_vllm.allocators.global_rank import GlobalRank
from nexus_vllm.allocators.lu import Lu
from nexus_vllm.allocators.pyramid import Pyramid
from nexus_vllm.allocators.uniform import PerHead, Uniform
from nexus_vllm.profile import Profile

__all__ = ["ALLOCATORS", "Allocator", "Situation", "make", "names", "on_host"]

ALLOCATORS: dict[str, type[Allocator]] = {
    Uniform.name: Uniform,
    PerHead.name: PerHead,
    Pyramid.name: Pyramid,
    Ada.name: Ada,
    Cake.name: Cake,
    Lu.name: Lu,
    GlobalRank.name: GlobalRank,
}


def names() -> tuple[str, ...]:
    """The registered allocator names."""
    return tuple(ALLOCATORS)


def make(name: str, profile: Profile | None = None, **params: Any) -> Allocator:
    """The allocator `name` with the parameters given, the rest at their defaults.

    profile: for an allocator that needs one; the others leave it alone.
    Raises ValueError on an unknown allocator or parameter, a bad value, or a missing profile.
    """
    if name not in ALLOCATORS:
        raise ValueError(f"allocator {name!r} is unknown, choose one of {', '.join(ALLOCATORS)}")
    allocator = ALLOCATORS[name]
    known = [
        field.name
        for field in fields(allocator)  # type: ignore[arg-type]
        if field.name != "profile"
    ]
    if unknown := [key for key in params if key not in known]:
        raise ValueError(
            f"allocator {name!r} has no parameter {', '.join(unknown)}; "
            f"it takes: {', '.join(known) or 'none'}"
        )
    if allocator.needs_profile:
        if profile is None:
            raise ValueError(
                f"allocator {name!r} needs a profile of the model: give --kv-profile FILE, "
                "make one with `nexus-vllm profile MODEL`"
            )
        params["profile"] = profile
    return allocator(**params)
