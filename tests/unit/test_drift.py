"""What of vLLM has changed is known before an engine starts, and the table has all that we use.

The last part reads our code (`uses`). It follows types, so it sees every attribute of an object of
vLLM that is read or written, whatever the object is called. It does not see operators on objects
(`len`, `in`, truth, iteration), functions of vLLM's modules and their parameters (a module or name
that is gone is an ImportError at start, or `wrap` checks it), names put together at run time, and
what an attribute holds or means. `scripts` and other tools than doctor and bench are not read.
"""

import enum
import functools
import inspect
import pkgutil
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pydantic
import pytest
from pydantic.dataclasses import dataclass as validated

import nexus_vllm.engine
import nexus_vllm.server
from nexus_vllm.engine import compat, reliance
from nexus_vllm.engine.drift import Drift, drift

if TYPE_CHECKING:
    from .uses import Reader


@dataclass
class Theirs:
    """Stands for a class of vLLM."""

    field: int

    def step(self, batch: Any, flag: bool = False) -> None: ...

    def keyed(self, batch: Any, *, key: int) -> None: ...

    @staticmethod
    def spec(spec: Any) -> Any: ...

    @classmethod
    def support(cls, config: Any) -> Any: ...

    def record(self, stats: Any) -> None: ...


class Ours(Theirs):
    def step(self, batch: Any, flag: bool = False) -> None:
        super().step(batch, flag)

    def keyed(self, batch: Any, *, key: int) -> None:
        super().keyed(batch, key=key)

    @classmethod
    def spec(cls, spec: Any) -> Any:
        return super().spec(spec)

    @staticmethod
    def support(config: Any) -> Any: ...

    def record(self, stats: Any) -> None: ...

    def own(self) -> None: ...


def change(**members: Any) -> type:
    """`Theirs` with other members; None removes one."""
    kept = {name: member for name, member in vars(Theirs).items() if not name.startswith("__")}
    kept |= members
    return type("Theirs", (), {name: m for name, m in kept.items() if m is not None})


def found(theirs: type, ours: type = Ours) -> list[tuple[str, str]]:
    return [(symbol.rsplit(".", 1)[1], how) for symbol, how in drift([(ours, theirs)], {})]


def test_no_drift_where_names_are_equal() -> None:
    assert found(Theirs) == []
    assert found(change()) == []


def test_a_renamed_method_is_gone() -> None:
    assert found(change(step=None)) == [("step", "it is gone")]
    assert found(change(spec=None)) == [("spec", "it is gone")]
    # Without super() there is no telling it from a method of our own. Ours without are abstract in
    # vLLM, where a new name keeps our class from being made.
    assert found(change(record=None)) == []


def test_added_lost_renamed_and_reordered_parameters_are_drift() -> None:
    def added(self: Any, batch: Any, flag: bool = False, more: int = 0) -> None: ...
    def lost(self: Any, batch: Any) -> None: ...
    def renamed(self: Any, batch: Any, other: bool = False) -> None: ...
    def reordered(self: Any, flag: bool, batch: Any) -> None: ...
    def wrapped(*args: Any, **kwargs: Any) -> None: ...

    for step, has in (
        (added, "self, batch, flag, more"),
        (lost, "self, batch"),
        (renamed, "self, batch, other"),
        (reordered, "self, flag, batch"),
        (wrapped, "..."),
    ):
        told = [("step", f"it takes ({has}), not (self, batch, flag)")]
        assert found(change(step=step)) == told


def test_keyword_only_is_part_of_the_signature() -> None:
    def keyed(self: Any, batch: Any, key: int) -> None: ...

    told = [("keyed", "it takes (self, batch, key), not (self, batch, *, key)")]
    assert found(change(keyed=keyed)) == told


def test_an_override_that_passes_everything_on_relies_on_its_leading_names_only() -> None:
    class PassesOn(Theirs):
        def step(self, batch: Any, *args: Any, **kwargs: Any) -> None: ...
        def keyed(self, *args: Any, **kwargs: Any) -> None: ...

    def longer(self: Any, batch: Any, more: int = 0) -> None: ...
    def renamed(self: Any, data: Any, more: int = 0) -> None: ...

    assert found(change(step=longer, keyed=longer), PassesOn) == []
    told = [("step", "it takes (self, data, more), not (self, batch, ...)")]
    assert found(change(step=renamed), PassesOn) == told


def test_a_new_method_of_vllm_under_a_name_of_ours_is_drift() -> None:
    def own(self: Any, request: Any) -> None: ...

    assert found(change(own=own)) == [("own", "it takes (self, request), not (self)")]


def test_what_we_call_is_checked_too() -> None:
    calls = ("field", "step(batch)", "step(batch, flag)", "record()", "support(config)", "spec()")
    assert drift([], {Theirs: calls}) == []
    symbol = f"{__name__}.Theirs."
    assert drift([], {Theirs: ("lost()", "step(flag)", "support(vllm_config)", "field()")}) == [
        Drift(symbol + "lost", "it is gone"),
        Drift(symbol + "step", "it takes (self, batch, flag), not (self, flag, ...)"),
        Drift(symbol + "support", "it takes (config), not (vllm_config, ...)"),
        Drift(symbol + "field", "it is no method any more"),
    ]


# Attributes


def guarded(method: Any) -> Any:
    @functools.wraps(method)
    def guard(*args: Any) -> Any:
        return method(*args)

    return guard


class Base:
    def __init__(self, count: int) -> None:
        self.inherited: int = count
        self.one, (self.two, *self.more) = count, (count, [])
        self.captured = [lambda: self.inherited]

    def later(self, other: Any) -> None:
        other.not_ours = 1
        self.count += 1
        self.late = other
        with open("x") as self.opened:
            pass


class Object(Base):
    constant = 3
    declared: int

    @guarded
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.own = count

    @property
    def derived(self) -> int:
        return 1

    @functools.cached_property
    def once(self) -> int:
        return 1

    def method(self) -> None: ...


class Slots:
    __slots__ = ("field",)


class Struct(msgspec.Struct):
    field: int


@dataclass(slots=True)
class Compact:
    field: int = 0


class Model(pydantic.BaseModel):
    field: int


@validated
class Validated:
    field: int


class Named(NamedTuple):
    field: int


class Kind(enum.Enum):
    FIELD = 1


def missing(theirs: type, *names: str) -> dict[str, str]:
    return {symbol.rsplit(".", 1)[1]: how for symbol, how in drift([], {theirs: names})}


def test_whatever_a_method_assigns_to_self_is_there() -> None:
    names = ("inherited", "one", "two", "more", "captured", "late", "opened", "own")
    assert missing(Object, *names, "constant", "derived", "once") == {}
    for name in ("not_ours", "declared", "other", "Inherited"):
        assert missing(Object, name) == {name: "it is gone"}


def test_fields_and_slots_are_there() -> None:
    for theirs in (Slots, Struct, Compact, Model, Validated, Named, Theirs):
        assert missing(theirs, "field", "field_2") == {"field_2": "it is gone"}
    assert missing(Kind, "FIELD", "OTHER") == {"OTHER": "it is gone"}


def test_an_attribute_that_becomes_a_method_or_the_reverse_is_drift() -> None:
    assert missing(Object, "method", "later") == dict.fromkeys(
        ("method", "later"), "it is a method now"
    )
    assert missing(Object, "method()", "own()", "derived()", "gone()") == {
        "own": "it is no method any more",
        "derived": "it is no method any more",
        "gone": "it is gone",
    }


def test_a_renamed_attribute_keeps_an_engine_from_starting(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    source = textwrap.dedent(inspect.getsource(Scheduler.__init__))
    changed = source.replace("self.kv_holding_waiting", "self.holding_waiting")
    assert changed != source
    made: dict[str, Any] = {}
    exec(changed, dict(vars(inspect.getmodule(Scheduler))), made)
    monkeypatch.setattr(Scheduler, "__init__", made["__init__"])
    monkeypatch.setattr(compat, "refusals", lambda config: [])
    with pytest.raises(compat.UnsupportedError) as refused:
        compat.check_config(None)
    told = str(refused.value)
    assert (
        "has changed vllm.v1.core.sched.scheduler.Scheduler.kv_holding_waiting: it is gone" in told
    )
    assert "Remedy: install vLLM 0.3" in told


def test_what_we_attach_something_to_must_take_it() -> None:
    assert missing(Object, "__dict__") == missing(Theirs, "__dict__") == {}
    for theirs in (Slots, Struct, Compact):
        assert missing(theirs, "__dict__") == {"__dict__": "it is gone"}


# Our code

REFLECTION = ("drift", "hooks", "reliance")
"""Modules that look at vLLM's classes, not at its objects."""

TOOLS = ("nexus_vllm.plugin", "nexus_vllm.tools.doctor", "nexus_vllm.tools.bench_engine")
"""They find out by themselves what is gone: no engine need refuse to start for it."""

FOREIGN = {
    "f.name": "of dataclasses.fields",
    "report['requests'].items": "of a dict of ours",
}
"""What `uses` cannot tell the type of, and is not vLLM's."""

BY_DEFAULT = {
    "getattr(model.hf_text_config, 'layer_types', None)",
    "getattr(model.hf_text_config, 'num_kv_shared_layers', None)",
    "getattr(vllm_config.quant_config, 'kv_cache_scheme', None)",
    "getattr(layer, 'impl', None)",
    "getattr(layer, 'attn_backend', None)",
    "hasattr(args, 'middleware')",
    "getattr(app, 'state', None)",
    "getattr(getattr(app, 'state', None), 'vllm_config', None)",
    "getattr(vllm_config, 'additional_config', None)",
}
"""What may be missing for a reason, given where it is read. Anywhere else a default would hide that
a name is gone."""


@functools.cache
def readers() -> "list[Reader]":
    from .uses import Reader  # imports all of the engine

    return [
        Reader(f"{package.__name__}.{module.name}")
        for package in (nexus_vllm.engine, nexus_vllm.server)
        for module in pkgutil.iter_modules(package.__path__)
        if module.name not in REFLECTION
    ]


def test_the_table_has_what_our_code_uses_and_nothing_else() -> None:
    used = {
        (use.owner, use.name + "()" * use.called): where
        for reader in readers()
        for use, where in reader.uses.items()
    }
    table = {
        (owner, name.partition("(")[0] + "()" * ("(" in name))
        for owner, names in reliance.uses().items()
        for name in names
    }
    assert {entry: where for entry, where in used.items() if entry not in table} == {}
    assert table - used.keys() == set()


def test_the_table_names_all_parameters_that_our_code_passes() -> None:
    table = reliance.uses()
    for use, where in [item for reader in readers() for item in reader.uses.items()]:
        if use.called and use.name != "replace":  # whose parameters are fields
            (entry,) = [e for e in table[use.owner] if e.startswith(use.name + "(")]
            named = [name for name in entry.rstrip(")").partition("(")[2].split(", ") if name]
            in_order = named[: named.index("*")] if "*" in named else named
            assert use.positional <= len(in_order), where
            assert set(use.keywords) <= set(named[use.positional :]), where


def test_every_type_is_known() -> None:
    unknown = {what: where for reader in readers() for what, where in reader.unknown.items()}
    assert {what: where for what, where in unknown.items() if what not in FOREIGN} == {}
    assert FOREIGN.keys() == unknown.keys()


def test_nothing_else_is_read_by_default() -> None:
    assert {asked for reader in readers() for asked in reader.by_default} == BY_DEFAULT


def test_the_installed_vllm_has_it_all() -> None:
    assert compat.drifted() == []


@pytest.mark.parametrize("name", TOOLS)
def test_the_installed_vllm_has_what_tools_use(name: str) -> None:
    from .uses import Reader

    for use, where in Reader(name).uses.items():
        read, called = (drift([], {use.owner: [use.name + how]}) for how in ("", "("))
        assert not read or not called, where
