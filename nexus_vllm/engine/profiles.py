"""Which profile an engine deals budgets out by, and each rank's part of it."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nexus_vllm import allocators, policies
from nexus_vllm.allocators import Allocator
from nexus_vllm.config import Settings, config_folder
from nexus_vllm.engine.compat import UnsupportedError, settings_of
from nexus_vllm.profile import ModelFacts, Profile, fitting

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def settle(vllm_config: "VllmConfig") -> Settings:
    """The engine's settings with its profile in them: the one given, else a shipped one that fits.

    Raises UnsupportedError for a profile of another model, score or block size, and where `lu` is
    asked for and there is none.
    """
    settings = settings_of(vllm_config)
    fits = _facts(vllm_config, settings)
    if settings.profile is not None:
        try:
            Profile.load(Path(settings.profile)).check(*fits)
        except (OSError, ValueError) as error:
            raise UnsupportedError(
                f"--kv-profile {settings.profile}: {error}",
                "shares are those of one model, score and block size",
                "give the file that `nexus-vllm profile MODEL` makes for them, or no profile",
            ) from None
        return settings
    try:
        shipped = fitting(config_folder() / "profiles", *fits)
    except ValueError as error:
        raise UnsupportedError(str(error), "it ships whole", "install nexus-vllm again") from None
    if shipped is not None:
        return Settings.from_source(settings.to_json(), profile=str(shipped))
    if settings.allocator == "lu":
        raise UnsupportedError(
            "--kv-allocator lu without a profile",
            f"none is shipped for {fits[0].name} with this score and block size",
            "make one with `nexus-vllm profile MODEL` and pass it as --kv-profile FILE",
        )
    return settings


def _facts(
    vllm_config: "VllmConfig", settings: Settings
) -> tuple[ModelFacts, str, dict[str, Any], int]:
    """What a profile must have been made for: the arguments of `Profile.check`."""
    model = vllm_config.model_config
    folder = Path(model.model)
    facts = ModelFacts(
        str(folder.absolute()) if folder.is_dir() else model.model,
        model.get_total_num_hidden_layers(),
        model.get_total_num_kv_heads(),
        model.get_head_size(),
    )
    policy = policies.make(settings.policy, settings)
    return facts, settings.policy, asdict(policy), settings.block_size  # type: ignore[call-overload]


def servable(
    vllm_config: "VllmConfig", layers: tuple[int, int], heads: tuple[int, int]
) -> dict[str, Allocator]:
    """Every allocator that the engine can serve, for the rank that holds this part of the model.

    layers, heads: first and past-the-last attention layer and KV head.
    """
    settings = settings_of(vllm_config)
    profile = None if settings.profile is None else Profile.load(Path(settings.profile))
    served = {}
    for name in allocators.names():
        if not allocators.ALLOCATORS[name].needs_profile:
            served[name] = allocators.make(name)
        elif profile is not None:
            served[name] = allocators.make(name, profile, layers=layers, heads=heads)
    return served


def rank_heads(vllm_config: "VllmConfig", rank: int) -> tuple[int, int]:
    """First and past-the-last KV head of a tensor-parallel rank, as vLLM's layers divide them.

    With more ranks than KV heads, several ranks hold the same one.
    """
    total = vllm_config.model_config.get_total_num_kv_heads()
    ranks = vllm_config.parallel_config.tensor_parallel_size
    own = max(1, total // ranks)
    first = rank * own if total >= ranks else rank * total // ranks
    return first, first + own
