"""Policies: from what a layer attends to, to one weight per live block.

To add one: a file with a frozen dataclass that derives from Policy, and a line in POLICIES. The
contract test then covers it.
"""

from collections.abc import Mapping
from dataclasses import fields

from nexus_vllm.policies.base import Observation, Policy, Rope, block_attention, score, state_size
from nexus_vllm.policies.cake import CakeScore
from nexus_vllm.policies.expected_attention import ExpectedAttention
from nexus_vllm.policies.h2o import H2O
from nexus_vllm.policies.keydiff import KeyDiff
from nexus_vllm.policies.knorm import KNorm
from nexus_vllm.policies.nexus import Nexus
from nexus_vllm.policies.random_blocks import RandomBlocks, RandomGenerated
from nexus_vllm.policies.snapkv import SnapKV
from nexus_vllm.policies.streaming_llm import StreamingLLM
from nexus_vllm.policies.tova import TOVA
from nexus_vllm.policies.vase import VaSE

__all__ = [
    "POLICIES",
    "Observation",
    "Policy",
    "Rope",
    "block_attention",
    "make",
    "names",
    "score",
    "state_size",
]

POLICIES: dict[str, type[Policy]] = {
    Nexus.name: Nexus,
    SnapKV.name: SnapKV,
    TOVA.name: TOVA,
    H2O.name: H2O,
    CakeScore.name: CakeScore,
    KeyDiff.name: KeyDiff,
    KNorm.name: KNorm,
    ExpectedAttention.name: ExpectedAttention,
    VaSE.name: VaSE,
    StreamingLLM.name: StreamingLLM,
    RandomBlocks.name: RandomBlocks,
    RandomGenerated.name: RandomGenerated,
}


def names() -> tuple[str, ...]:
    """The registered policy names."""
    return tuple(POLICIES)


def make(name: str, settings: object = None) -> Policy:
    """The policy `name` with the parameters in `settings`, the rest at their defaults.

    settings: a mapping of parameters, which must all be the policy's own; or any object, of which
    the attributes named like the policy's parameters are taken and the others left alone.
    Raises ValueError on an unknown policy, an unknown parameter in a mapping, or a bad value.
    """
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown, choose one of {', '.join(POLICIES)}")
    policy = POLICIES[name]
    known = [field.name for field in fields(policy)]  # type: ignore[arg-type]
    if not isinstance(settings, Mapping):
        settings = {key: getattr(settings, key) for key in known if hasattr(settings, key)}
    if unknown := [str(key) for key in settings if key not in known]:
        takes = ", ".join(known) or "none"
        raise ValueError(
            f"policy {name!r} has no parameter {', '.join(unknown)}; it takes: {takes}"
        )
    return policy(**settings)
