"""What of vLLM has changed under this plugin.

A method that vLLM renames would never be called again, a parameter it adds would end a request in
an exception, an attribute it renames would be missed at the first eviction, or be written in vain:
all must be known before an engine starts.
"""

import dis
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any, NamedTuple

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Drift(NamedTuple):
    """A symbol of vLLM that is not what this release was written for, and how it differs."""

    symbol: str
    how: str


def drift(
    overrides: Iterable[tuple[type, type]], uses: Mapping[type, Iterable[str]]
) -> list[Drift]:
    """Every symbol of vLLM that differs from what we rely on. Pure.

    Args:
        overrides: (our class, vLLM's class under it). Checked are the methods that exist in both,
            and those of ours that call `super()` by their own name.
        uses: what we call, read or write, by vLLM's class: see `reliance.uses`. An attribute is
            there if the class has or declares it, or if any of its methods assigns it to self.
    """
    found = []
    for ours, theirs in overrides:
        for name in _overriding(ours, theirs):
            found += _compared(theirs, name, _parameters(getattr(ours, name)))
    for theirs, used in uses.items():
        for use in used:
            name, call, parameters = use.rstrip(")").partition("(")
            if call:
                found += _called(theirs, name, parameters.split(", ") if parameters else [])
            else:
                found += _read(theirs, name)
    return list(dict.fromkeys(found))


def _overriding(ours: type, theirs: type) -> Iterator[str]:
    for name, member in vars(ours).items():
        function = getattr(member, "__func__", member)  # of a static or class method
        if not inspect.isfunction(function):
            continue
        inherited = getattr(theirs, name, None) is not getattr(object, name, None)
        if inherited or _calls_super(function, name):
            yield name


def _calls_super(function: Callable[..., Any], name: str) -> bool:
    code = function.__code__
    return "__class__" in code.co_freevars and name in code.co_names


def _compared(theirs: type, name: str, needed: list[Any]) -> list[Drift]:
    """Drift of a method from what it must take; a trailing ... is any further parameters."""
    method = getattr(theirs, name, None)
    if method is None:
        return [Drift(_symbol(theirs, name), "it is gone")]
    has = _parameters(method)
    leading = has[: len(needed) - 1] if needed[-1:] == [...] else has
    if leading == [parameter for parameter in needed if parameter is not ...]:
        return []
    return [Drift(_symbol(theirs, name), f"it takes ({_told(has)}), not ({_told(needed)})")]


def _called(theirs: type, name: str, parameters: list[str]) -> list[Drift]:
    method = getattr(theirs, name, None)
    if callable(method):
        bound = inspect.getattr_static(theirs, name)
        first = [] if isinstance(bound, classmethod | staticmethod) else ["self"]
        return _compared(theirs, name, [*first, *parameters, ...])
    there = method is not None or _has(theirs, name)
    return [Drift(_symbol(theirs, name), "it is no method any more" if there else "it is gone")]


def _read(theirs: type, name: str) -> list[Drift]:
    if _has(theirs, name):
        return []
    method = callable(getattr(theirs, name, None))
    return [Drift(_symbol(theirs, name), "it is a method now" if method else "it is gone")]


def _has(theirs: type, name: str) -> bool:
    """Whether instances have an attribute that is no method."""
    if name == "__dict__":
        return theirs.__dictoffset__ != 0
    for fields in ("__dataclass_fields__", "__pydantic_fields__"):
        if name in getattr(theirs, fields, ()):
            return True
    # A class also has its slots, properties and, in msgspec, its fields.
    of_class = hasattr(theirs, name) and not callable(getattr(theirs, name))
    return of_class or _assigned(theirs, name)


def _assigned(theirs: type, name: str) -> bool:
    """Whether any method of the class or of its bases assigns to `self.name`."""
    for base in theirs.__mro__:
        for member in vars(base).values():
            function = inspect.unwrap(getattr(member, "__func__", member))
            code = getattr(function, "__code__", None)
            if code is not None and name in code.co_names and name in _stored(code):
                return True
    return False


@functools.cache
def _stored(code: CodeType) -> frozenset[str]:
    """Attributes of its first parameter that a function assigns to.

    Read from bytecode: to parse one of vLLM's larger modules takes a tenth of a second.
    """
    stored, before = set(), None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            # From Python 3.13 on one instruction may load two names.
            loaded = before if isinstance(before, tuple) else (before,)
            if code.co_varnames and loaded[-1] == code.co_varnames[0]:
                stored.add(instruction.argval)
        before = instruction.argval
    return frozenset(stored)


def _symbol(theirs: type, name: str) -> str:
    return f"{theirs.__module__}.{theirs.__qualname__}.{name}"


def _parameters(function: Callable[..., Any]) -> list[Any]:
    """Parameter names in order, "*" before the first keyword-only one, ... for any others."""
    names: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in _VARIABLE:
            if names[-1:] != [...]:
                names.append(...)
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    return names


def _told(parameters: list[Any]) -> str:
    return ", ".join("..." if name is ... else name for name in parameters)


def installed() -> list[Drift]:
    """`drift` of the installed vLLM."""
    from nexus_vllm.engine import reliance

    try:
        return drift(reliance.overrides(), reliance.uses())
    except (ImportError, AttributeError) as error:  # a module or class we import has moved
        return [Drift(getattr(error, "name", None) or "vllm", str(error))]
