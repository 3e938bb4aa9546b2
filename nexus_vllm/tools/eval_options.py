"""What `nexus-vllm eval` and scripts/peers.py take on the command line, and what they refuse."""

import argparse
from collections.abc import Sequence

from nexus_vllm.config import MAX_SEED
from nexus_vllm.tools.eval_plan import Method
from nexus_vllm.tools.eval_suite import SETTINGS


def words(text: str) -> list[str]:
    """The items of a list with commas, each once."""
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty item")
    return list(dict.fromkeys(items))


def settings(text: str) -> list[str]:
    for name in (names := words(text)):
        if name not in SETTINGS:
            raise argparse.ArgumentTypeError(f"no setting {name!r}: {', '.join(SETTINGS)}")
    return names


def seeds(text: str) -> list[int]:
    for item in (items := words(text)):
        if not (item.isascii() and item.isdigit() and int(item) <= MAX_SEED):
            raise argparse.ArgumentTypeError(f"{item!r} is no seed: use 0 to {MAX_SEED}")
    return list(dict.fromkeys(map(int, items)))


def natural(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def named(text: str) -> Method:
    """The method that POLICY[,ALLOCATOR] means."""
    policy, _, allocator = text.partition(",")
    return Method(policy.strip(), allocator.strip() or "uniform")


def check_baseline(text: str | None, methods: Sequence[Method]) -> None:
    """Raise ValueError where a baseline is named that is not among the methods."""
    if text is not None and named(text) not in methods:
        known = "; ".join(f"{method.policy},{method.allocator}" for method in methods)
        raise ValueError(
            f"--baseline {text!r} is {named(text).label}, which is not asked: use one of {known}. "
            "(The full cache is compared with in any case.)"
        )
