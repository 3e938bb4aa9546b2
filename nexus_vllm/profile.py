"""The profile file: how many blocks each (layer, KV head) of one model deserves at each density.

JSON, one line per density. Shares are stored as whole ten-thousandths that add up, so the same
profile is always the same file, and loading and saving a file changes nothing in it.
"""

import hashlib
import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nexus_vllm import policies

FORMAT = "nexus-vllm profile"
VERSION = 1
_STEPS = 10_000
_TOLERANCE = 1e-6
"""Largest difference between a density and the mean of its shares."""


@dataclass(frozen=True)
class ModelFacts:
    """Which model. `name` is a hub id or a path; only its last component is kept and compared.

    Of a path in the Hugging Face cache (models--OWNER--NAME/snapshots/...) that is NAME.
    """

    name: str
    layers: int
    kv_heads: int
    head_size: int

    def __post_init__(self) -> None:
        parts = [part for part in self.name.split("/") if part]
        hub = [part for part in parts if part.startswith("models--")]
        name = hub[-1].rsplit("--", 1)[-1] if hub else parts[-1]
        object.__setattr__(self, "name", name)

    @property
    def fingerprint(self) -> str:
        """Hash of the shape (layers, kv_heads, head_size), 12 hexadecimal digits."""
        shape = f"{self.layers},{self.kv_heads},{self.head_size}"
        return hashlib.sha256(shape.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Origin:
    """Where a profile comes from; nothing is decided by it.

    source: "oracle" or "replay". contexts: names of the contexts. seeds, versions: what it takes to
    make the profile again. No dates, so that it is then the same file.
    """

    source: str = ""
    contexts: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Profile:
    """Shares of blocks by density, layer and KV head, and what they were measured with.

    score, parameters: the policy whose ranking inside heads was assumed. block_size: in tokens.
    densities: [K] ascending, in (0, 1]. shares: [K, L, H] float64 in [0, 1], the fraction of the
    blocks ever seen that a head keeps; the mean over heads is the density.
    Raises ValueError where that does not hold.
    """

    model: ModelFacts
    score: str
    parameters: Mapping[str, Any]
    block_size: int
    densities: tuple[float, ...]
    shares: Tensor
    origin: Origin = field(default_factory=Origin)

    def __post_init__(self) -> None:
        knots = (0.0, *self.densities)
        if not self.densities or knots[-1] > 1 or any(a >= b for a, b in pairwise(knots)):
            raise ValueError(f"profile: densities {self.densities} must ascend within (0, 1]")
        expected = (len(self.densities), self.model.layers, self.model.kv_heads)
        if tuple(self.shares.shape) != expected:
            raise ValueError(
                f"profile: shares are {tuple(self.shares.shape)}, expected {expected} "
                "(densities, layers, KV heads)"
            )
        if not bool(((self.shares >= 0) & (self.shares <= 1)).all()):
            raise ValueError("profile: shares must lie between 0 and 1")
        for density, mean in zip(self.densities, self.shares.mean((1, 2)).tolist(), strict=True):
            if abs(density - mean) > _TOLERANCE:
                raise ValueError(f"profile: shares at density {density} have mean {mean}")

    def at(self, density: float) -> Tensor:
        """Shares [L, H] at any density from 0 to 1, linear between knots; all 0 at 0, 1 at 1."""
        above = bisect_left(self.densities, density)
        low = self.densities[above - 1] if above else 0.0
        shares = self.shares[above - 1] if above else torch.zeros_like(self.shares[0])
        inside = above < len(self.densities)
        high = self.densities[above] if inside else 1.0
        target = self.shares[above] if inside else torch.ones_like(shares)
        return torch.lerp(shares, target, (density - low) / (high - low))

    def check(
        self, model: ModelFacts, score: str, parameters: Mapping[str, Any], block_size: int
    ) -> None:
        """Raises ValueError that says what this profile was made for, if it is something else.

        Replays look at heads and not at scores, so that such a profile is good for any score. A
        parameter that the profile does not name came later; before, its default was what there was.
        """
        mine = asdict(self.model) | {"score": self.score, "block_size": self.block_size}
        yours = asdict(model) | {"score": score, "block_size": block_size}
        if self.origin.source == "replay":
            score, parameters = self.score, self.parameters
            yours["score"] = score
        if model.name.lower() == self.model.name.lower():
            yours["name"] = self.model.name
        if score == self.score:
            known = _defaults(score)
            for facts, own in ((mine, self.parameters), (yours, parameters)):
                facts |= {f"{score} {key}": value for key, value in (known | dict(own)).items()}
        keys = [key for key in mine | yours if mine.get(key) != yours.get(key)]
        if keys:
            made = ", ".join(f"{key}={mine.get(key)!r}" for key in keys)
            this = ", ".join(f"{key}={yours.get(key)!r}" for key in keys)
            raise ValueError(
                f"profile made for {made}, this is {this}; make one that fits with "
                "`nexus-vllm profile MODEL`, or choose an allocator that needs none"
            )

    def save(self, path: Path) -> None:
        """Write the file. Shares are rounded to four decimals that still add up."""
        head = {
            "format": FORMAT,
            "version": VERSION,
            "model": asdict(self.model) | {"fingerprint": self.model.fingerprint},
            "score": {"name": self.score, "parameters": dict(self.parameters)},
            "block_size": self.block_size,
            "origin": asdict(self.origin),
            "densities": list(self.densities),
        }
        lines = [f'"{key}":{_compact(value)}' for key, value in head.items()]
        rows = ",\n".join(_compact(row) for row in _to_steps(self).flatten(1).tolist())
        lines.append(f'"shares":[\n{rows}\n]')
        path.write_text("{" + ",\n".join(lines) + "}\n")

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Read a file. Raises OSError, or ValueError that names the file and what is wrong."""
        try:
            return _parse(json.loads(path.read_text()))
        except KeyError as error:
            raise ValueError(f"{path}: no valid profile, {error} is missing") from error
        except (TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path}: no valid profile, {error}") from error


def _defaults(score: str) -> dict[str, Any]:
    """The parameters of a policy that has them, at their defaults."""
    known = policies.POLICIES.get(score)
    return {} if known is None else asdict(known())  # type: ignore[call-overload]


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _to_steps(profile: Profile) -> Tensor:
    """Shares in whole 1/_STEPS, [K, L, H] int64: largest remainder within each density."""
    wanted = profile.shares.flatten(1) * _STEPS
    steps = wanted.floor()
    # Halves go up, float noise or not, or the file of a loaded profile could be another one.
    missing = (wanted.sum(1) + 0.501).floor() - steps.sum(1)
    order = (wanted - steps).argsort(dim=1, descending=True, stable=True)
    extra = torch.arange(steps.shape[1]).expand_as(order) < missing[:, None]
    steps += torch.zeros_like(steps).scatter(1, order, extra.to(steps.dtype))
    return steps.to(torch.int64).view(profile.shares.shape)


def _parse(data: dict[str, Any]) -> Profile:
    if data.get("format") != FORMAT:
        raise ValueError(f"its format is {data.get('format')!r}, not {FORMAT!r}")
    if data["version"] != VERSION:
        raise ValueError(f"its version is {data['version']}, this nexus-vllm reads {VERSION}")
    facts = dict(data["model"])
    fingerprint = facts.pop("fingerprint")
    model = ModelFacts(**facts)
    if fingerprint != model.fingerprint:
        raise ValueError(f"its fingerprint {fingerprint} is not that of {facts}; was it edited?")
    densities = tuple(float(density) for density in data["densities"])
    shares = torch.tensor(data["shares"], dtype=torch.float64) / _STEPS
    expected = (len(densities), model.layers * model.kv_heads)
    if shares.shape != expected:
        raise ValueError(f"its shares are {tuple(shares.shape)}, expected {expected}")
    # Four decimals leave a hair between mean and density: give it to whoever has room for it.
    error = torch.tensor(densities, dtype=torch.float64)[:, None] - shares.mean(1, keepdim=True)
    if not bool((error.abs() <= 1 / _STEPS).all()):
        raise ValueError("its shares do not have the densities as means; was it edited?")
    room = torch.where(error > 0, 1 - shares, shares)
    shares = (shares + error * room / room.mean(1, keepdim=True).clamp(min=1e-12)).clamp(0, 1)
    origin = data["origin"]
    return Profile(
        model=model,
        score=data["score"]["name"],
        parameters=data["score"]["parameters"],
        block_size=data["block_size"],
        densities=densities,
        shares=shares.view(len(densities), model.layers, model.kv_heads),
        origin=Origin(
            source=origin["source"],
            contexts=tuple(origin["contexts"]),
            seeds=tuple(origin["seeds"]),
            versions=origin["versions"],
        ),
    )


def fitting(
    folder: Path, model: ModelFacts, score: str, parameters: Mapping[str, Any], block_size: int
) -> Path | None:
    """The first of the folder's profiles, by file name, that was made for exactly this."""
    for path in sorted(folder.glob("*.json")):
        profile = Profile.load(path)
        try:
            profile.check(model, score, parameters, block_size)
        except ValueError:
            continue
        return path
    return None


def average(profiles: Sequence[Profile]) -> Profile:
    """The mean profile. Raises ValueError where they differ in model, score, blocks or densities.

    Contexts and seeds are all of theirs in order, each once; source and versions the first one's.
    """
    if not profiles:
        raise ValueError("there is no profile to average")
    first = profiles[0]
    for other in profiles[1:]:
        first.check(other.model, other.score, other.parameters, other.block_size)
        if other.densities != first.densities:
            raise ValueError(f"profile densities {other.densities} are not {first.densities}")
    return Profile(
        model=first.model,
        score=first.score,
        parameters=first.parameters,
        block_size=first.block_size,
        densities=first.densities,
        shares=torch.stack([profile.shares for profile in profiles]).mean(0),
        origin=Origin(
            source=first.origin.source,
            contexts=tuple(dict.fromkeys(c for p in profiles for c in p.origin.contexts)),
            seeds=tuple(dict.fromkeys(s for p in profiles for s in p.origin.seeds)),
            versions=first.origin.versions,
        ),
    )


def rank_correlation(one: Profile, other: Profile, density: float) -> float:
    """Spearman's rank correlation of two profiles' heads at one density, ties at their mean rank.

    nan where one of them has equal shares everywhere. Raises ValueError on different shapes.
    """
    mine, yours = one.at(density), other.at(density)
    if mine.shape != yours.shape:
        raise ValueError(f"profiles of {tuple(mine.shape)} and {tuple(yours.shape)} heads")
    ranks = torch.stack([_ranks(mine.flatten()), _ranks(yours.flatten())])
    ranks = ranks - ranks.mean(1, keepdim=True)
    return float((ranks[0] * ranks[1]).sum() / ranks.square().sum(1).prod().sqrt())


def _ranks(values: Tensor) -> Tensor:
    """Rank of each entry, [E] float64, equal entries at the mean of their ranks."""
    _, inverse, sizes = values.unique(return_inverse=True, return_counts=True)
    return (sizes.cumsum(0) - (sizes - 1) / 2)[inverse].to(torch.float64)
