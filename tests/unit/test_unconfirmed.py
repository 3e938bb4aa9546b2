"""Attention backends that no GPU has confirmed: refused, unless they are asked for by name."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from nexus_vllm.engine import attention, compat, reliance, worker

MODEL: Any = SimpleNamespace(dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(attention.ENVIRONMENT, raising=False)


def layer(backend: Any) -> Any:
    """A layer with this backend's implementation, as vLLM makes it, but for its memory."""
    impl = backend.get_impl_cls().__new__(backend.get_impl_cls())
    impl.alibi_slopes = impl.sinks = None
    return SimpleNamespace(
        attn_backend=backend,
        impl=impl,
        kv_sharing_target_layer_name=None,
        kv_cache_dtype="auto",
    )


@pytest.mark.parametrize("choice", [None, "", "0"])
def test_only_tested_backends_are_admitted(
    monkeypatch: pytest.MonkeyPatch, choice: str | None
) -> None:
    if choice is not None:
        monkeypatch.setenv(attention.ENVIRONMENT, choice)
    assert attention.admitted() == attention.BACKENDS
    assert not set(attention.UNCONFIRMED) & set(attention.BACKENDS)


def test_unconfirmed_ones_are_admitted_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(attention.ENVIRONMENT, "1")
    assert attention.admitted() == (*attention.BACKENDS, *attention.UNCONFIRMED)


def test_another_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(attention.ENVIRONMENT, "yes")
    with pytest.raises(ValueError, match="NEXUS_VLLM_UNCONFIRMED is 'yes', must be 0 or 1"):
        attention.admitted()


@pytest.mark.parametrize("choice", ["0", "1"])
def test_only_what_is_admitted_is_overridden(monkeypatch: pytest.MonkeyPatch, choice: str) -> None:
    monkeypatch.setenv(attention.ENVIRONMENT, choice)
    with mock.patch.object(attention, "register_backend") as register:
        attention.install()
    overridden = [call.args[0].name for call in register.call_args_list]
    assert overridden == list(attention.admitted())
    assert [call.args[1].rpartition(".")[2] for call in register.call_args_list] == overridden


@pytest.mark.parametrize("name", attention.UNCONFIRMED)
def test_a_layer_that_uses_one_is_refused_with_the_way_to_admit_it(name: str) -> None:
    stock = AttentionBackendEnum[name].get_class()
    with pytest.raises(compat.UnsupportedError) as refused:
        worker._check_layer("layers.0", layer(stock), MODEL)
    found, needed, remedy = refused.value.refusal
    assert found == f"layer layers.0 uses {stock.get_impl_cls().__name__}"
    assert needed == "eviction has been tested with the attention backends CPU_ATTN"
    assert remedy == (
        "run scripts/gpu_check.sh and, where it passes, set NEXUS_VLLM_UNCONFIRMED=1 "
        "(docs/gpu.md), or serve without --kv-eviction"
    )


def test_the_way_is_named_for_those_backends_only() -> None:
    other = SimpleNamespace(impl=object(), attn_backend=AttentionBackendEnum.CPU_ATTN.get_class())
    for odd in (other, SimpleNamespace()):
        with pytest.raises(compat.UnsupportedError, match="Remedy: choose one with --attention"):
            worker._check_layer("layers.0", odd, MODEL)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", attention.UNCONFIRMED)
def test_an_admitted_one_passes_with_a_warning(name: str) -> None:
    evicting = layer(getattr(attention, name))
    assert isinstance(evicting.impl, attention.EvictionImplMixin)
    worker._check_layer("layers.0", evicting, MODEL)
    with mock.patch.object(worker.logger, "warning") as warned:
        worker._warn_if_unconfirmed({"layers.0": evicting, "layers.1": evicting})
    (call,) = warned.call_args_list
    text = call.args[0] % call.args[1:]
    for told in ("NEXUS_VLLM_UNCONFIRMED", name, "NOT", "docs/gpu.md", "scripts/gpu_check.sh"):
        assert told in text


def test_a_tested_one_is_not_warned_of() -> None:
    with mock.patch.object(worker.logger, "warning") as warned:
        worker._warn_if_unconfirmed({"layers.0": layer(attention.CPU_ATTN)})  # type: ignore[attr-defined]
    warned.assert_not_called()


def test_what_we_rely_on_is_checked_of_admitted_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(attention.ENVIRONMENT, "1")
    found = {stock for _, stock in reliance.overrides()}
    for name in attention.UNCONFIRMED:
        assert attention._stock(name) in found
        assert attention._stock(name).get_impl_cls() in reliance.uses()
