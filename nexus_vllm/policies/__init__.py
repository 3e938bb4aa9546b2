"""Policies: from what a layer attends to, to one weight per live block.

To add one: docs/adding-a-policy.md.
"""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib.metadata import EntryPoint, entry_points
from typing import get_type_hints

from pydantic import TypeAdapter, ValidationError

from nexus_vllm.config import BUILT_IN_POLICIES, ENTRY_POINTS, Settings
from nexus_vllm.policies.base import (
    Observation,
    Policy,
    ReplayPolicy,
    Rope,
    block_attention,
    highest_attention,
    score,
    state_size,
)
from nexus_vllm.policies.cake import CakeScore
from nexus_vllm.policies.expected_attention import ExpectedAttention
from nexus_vllm.policies.h2o import H2O
from nexus_vllm.policies.keydiff import KeyDiff
from nexus_vllm.policies.knorm import KNorm
from nexus_vllm.policies.kvzip import KVzip
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
    "ReplayPolicy",
    "Rope",
    "block_attention",
    "highest_attention",
    "make",
    "names",
    "score",
    "served",
    "state_size",
]

_BUILT_IN: dict[str, type[Policy]] = {
    Nexus.name: Nexus,
    SnapKV.name: SnapKV,
    TOVA.name: TOVA,
    H2O.name: H2O,
    CakeScore.name: CakeScore,
    KeyDiff.name: KeyDiff,
    KNorm.name: KNorm,
    ExpectedAttention.name: ExpectedAttention,
    VaSE.name: VaSE,
    KVzip.name: KVzip,
    StreamingLLM.name: StreamingLLM,
    RandomBlocks.name: RandomBlocks,
    RandomGenerated.name: RandomGenerated,
}


def registered(points: Iterable[EntryPoint]) -> dict[str, type[Policy]]:
    """The policies of other packages, by name.

    Raises ValueError naming the package where one cannot be imported, is no Policy, is called
    something else than its entry point, or like another.
    """
    found: dict[str, type[Policy]] = {}
    for point in sorted(points, key=lambda point: point.name):
        said = f"policy {point.name!r} of {point.value}"
        if point.name in BUILT_IN_POLICIES or point.name in found:
            raise ValueError(f"{said}: there is another policy of this name; rename one of them")
        try:
            policy = point.load()
        except Exception as error:
            raise ValueError(
                f"{said} cannot be imported: {error!r}; repair or remove its package"
            ) from error
        if not (isinstance(policy, type) and issubclass(policy, Policy)):
            raise ValueError(f"{said} does not derive from nexus_vllm.policies.Policy")
        if policy.name != point.name:
            raise ValueError(f"{said} calls itself {policy.name!r}; name both alike")
        found[point.name] = policy
    return found


POLICIES: dict[str, type[Policy]] = {**_BUILT_IN, **registered(entry_points(group=ENTRY_POINTS))}


def served(name: str, settings: Settings) -> Policy:
    """What serves a request for the policy or variant `name`. Raises ValueError as `make`."""
    return make(settings.policy_of(name), settings.of(name))


def names() -> tuple[str, ...]:
    """The registered policy names."""
    return tuple(POLICIES)


def make(name: str, settings: object = None) -> Policy:
    """The policy `name` with the parameters given, the rest at their defaults.

    settings: a mapping of parameters, which must all be the policy's own; or any object, of which
      the attributes named like the policy's parameters are taken and the others left alone. Its
      `parameters`, if it has any, hold such mappings by policy, which win over the attributes.
    Raises ValueError on an unknown policy, an unknown parameter, or a bad value.
    """
    if name not in POLICIES:
        raise ValueError(f"policy {name!r} is unknown, choose one of {', '.join(POLICIES)}")
    policy = POLICIES[name]
    known = [field.name for field in fields(policy)]  # type: ignore[arg-type]
    if isinstance(settings, Mapping):
        own = dict(settings)
    else:
        own = dict(getattr(settings, "parameters", {}).get(name, {}))
    if unknown := [str(key) for key in own if key not in known]:
        takes = ", ".join(known) or "none"
        raise ValueError(
            f"policy {name!r} has no parameter {', '.join(unknown)}; it takes: {takes}"
        )
    kinds = get_type_hints(policy)
    for key, value in own.items():
        if isinstance(value, bool) and kinds[key] in (int, float):  # YAML's yes, which else is 1
            raise ValueError(f"{name}: {key} is {value!r}: use a number")
        try:
            own[key] = TypeAdapter(kinds[key]).validate_python(value)
        except ValidationError as error:
            (first, *_) = error.errors()
            raise ValueError(f"{name}: {key} is {value!r}: {first['msg']}") from None
    taken = {key: getattr(settings, key) for key in known if hasattr(settings, key)}
    return policy(**{**taken, **own})
