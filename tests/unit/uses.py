"""Which attributes of vLLM's objects our code uses, found by reading it.

A small type inference over syntax trees: ours and, where ours lead there, vLLM's. It knows
annotations, what is assigned to names and to `self`, what containers hold and what calls return.
Whatever it cannot follow it says, and `STANDS_FOR` tells it.
"""

import ast
import builtins
import collections.abc
import copy
import dataclasses
import functools
import importlib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nexus_vllm.engine import attention, reliance

STANDS_FOR: dict[str, type] = {
    "Attention.impl": attention.EvictionImplMixin,
    "customize_spec.spec": FullAttentionSpec,
    "forward.attn_metadata": CPUAttentionMetadata,
}
"""Types that no annotation tells: of attributes of vLLM's classes, of parameters of ours."""

UNDER: dict[type, type] = dict(reliance.overrides())
"""vLLM's class under each of ours that is mixed in."""


class Of(NamedTuple):
    """An instance of `cls`; `args`: the types of a container's elements, or of a class object."""

    cls: Any
    args: tuple["Types", ...] = ()


class Function(NamedTuple):
    """A function; `owner` is the class it was looked up on."""

    node: Any
    module: "Module"
    owner: Any = None


Types: TypeAlias = frozenset[Any]  # of Of, Function and modules; empty: unknown
NONE: Types = frozenset()
FOREIGN: Types = frozenset({Of(object)})  # nothing of vLLM's, so never mind what


class Use(NamedTuple):
    """`owner.name` in our code; if it is called: with so many positional arguments, and these."""

    owner: type
    name: str
    called: bool = False
    positional: int = 0
    keywords: tuple[str, ...] = ()


def root(thing: Any) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]


def known(cls: Any) -> bool:
    return root(cls) in ("vllm", "nexus_vllm")


def union(parts: Iterable[Types]) -> Types:
    return NONE.union(*parts)


def a(cls: Any, *args: Types) -> Types:
    return frozenset({Of(cls, args)})


def each(found: Types, cls: Any = None) -> list[Of]:
    return [one for one in found if isinstance(one, Of) and cls in (None, one.cls)]


def instances(found: Types) -> Types:
    """Of class objects, their instances."""
    return union(union(one.args) for one in each(found, type))


def under(cls: type) -> Any:
    """vLLM's class under one of ours."""
    return next(
        (base for base in getattr(cls, "__mro__", ()) if root(base) == "vllm"), UNDER.get(cls)
    )


# Modules and scopes


class Module:
    """A module's names, its imports for type checkers included."""

    def __init__(self, name: str) -> None:
        self.runtime = importlib.import_module(name)
        self.tree = ast.parse(inspect.getsource(self.runtime))
        self.classes: dict[str, ast.ClassDef] = {}
        self.functions: dict[str, Any] = {}
        self._checking: dict[str, Callable[[], Types]] = {}
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                self.functions[node.name] = node
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                for child in node.body:
                    if isinstance(child, ast.Import | ast.ImportFrom):
                        self._checking |= imported(child)

    def lookup(self, name: str) -> Types:
        if name in vars(self.runtime):
            return value(vars(self.runtime)[name])
        return value(vars(builtins).get(name))

    def annotation(self, node: ast.AST | None, owner: Any) -> Types:
        """The types that an annotation names; none of Any and None."""
        return NONE if node is None else self._named(ast.unparse(node), owner)

    def _named(self, text: str, owner: Any) -> Types:
        module = self

        class Names(dict[str, Any]):
            def __missing__(self, name: str) -> Any:
                if name not in module._checking:
                    raise KeyError(name)
                return next(one.cls for one in each(instances(module._checking[name]())))

        try:
            meant = eval(text, vars(self.runtime), Names())
        except (NameError, TypeError, StopIteration):
            return NONE
        return self._types(meant, owner)

    def _types(self, meant: Any, owner: Any) -> Types:
        if isinstance(meant, str):
            return self._named(meant, owner)
        if meant is typing.Self:
            return a(owner)
        if meant in (None, type(None), Any) or isinstance(meant, typing.TypeVar):
            return NONE
        origin, args = typing.get_origin(meant), typing.get_args(meant)
        if origin is None:
            return a(meant) if isinstance(meant, type) else FOREIGN
        if origin in (typing.Union, types.UnionType):
            return union(self._types(arg, owner) for arg in args)
        if origin is collections.abc.Callable:
            args = args[-1:]
        return a(origin, *(self._types(arg, owner) for arg in args if arg is not ...))


module_of = functools.cache(Module)


def imported(node: ast.Import | ast.ImportFrom) -> dict[str, Callable[[], Types]]:
    """What an import statement binds, looked up when asked for."""

    def load(module: str, name: str) -> Types:
        found: Any = importlib.import_module(module)
        if name and not hasattr(found, name):  # a module in a package
            return value(importlib.import_module(f"{module}.{name}"))
        return value(getattr(found, name) if name else found)

    module = getattr(node, "module", "")
    return {
        alias.asname or alias.name.partition(".")[0]: functools.partial(
            load, *((module, alias.name) if module else (alias.name.partition(".")[0], ""))
        )
        for alias in node.names
    }


def value(thing: Any) -> Types:
    """The types of an object that is there."""
    if isinstance(thing, types.ModuleType):
        return frozenset({thing})
    if isinstance(thing, type):
        return a(type, a(thing))
    if thing in SAME or thing in LISTS or thing in ELEMENT:
        return a(thing)
    function = inspect.unwrap(thing) if callable(thing) else thing
    if isinstance(function, types.FunctionType) and known(function):
        module = module_of(function.__module__)
        return frozenset({Function(module.functions.get(function.__name__), module)})
    return NONE if thing is None else a(type(thing)) if known(type(thing)) else FOREIGN


class Scope:
    """The names of a function, of its comprehensions too; each has the types of all it is given."""

    def __init__(self, node: Any, parent: "Scope | Module", owner: Any) -> None:
        self.node, self.parent, self.owner = node, parent, owner
        self.module: Module = parent if isinstance(parent, Module) else parent.module
        self._names: dict[str, list[Callable[[], Types]]] = {}
        self._busy: set[str] = set()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._parameters(node.args, {getattr(d, "id", "") for d in node.decorator_list})
        for child in within(node):
            self._bind(child)

    def _parameters(self, args: ast.arguments, decorators: set[str]) -> None:
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
        for arg in every:
            self._add(arg.arg, functools.partial(self._parameter, arg))
        if every and self.owner and "staticmethod" not in decorators and not every[0].annotation:
            me = a(self.owner)
            me = a(type, me) if "classmethod" in decorators else me
            self._names[every[0].arg] = [lambda: me]
        for star in (args.vararg, args.kwarg):
            if star:
                self._add(star.arg, lambda: FOREIGN)

    def _parameter(self, arg: ast.arg) -> Types:
        told = STANDS_FOR.get(f"{self.node.name}.{arg.arg}")
        return a(told) if told else self.module.annotation(arg.annotation, self.owner)

    def _add(self, name: str, infer: Callable[[], Types]) -> None:
        self._names.setdefault(name, []).append(infer)

    def _bind(self, node: Any) -> None:
        pairs: list[tuple[Any, Callable[[], Types]]] = []
        match node:
            case ast.Assign():
                pairs = [(target, lambda: self.infer(node.value)) for target in node.targets]
            case ast.AnnAssign():
                pairs = [(node.target, lambda: self.annotated(node))]
            case ast.NamedExpr():
                pairs = [(node.target, lambda: self.infer(node.value))]
            case ast.For() | ast.AsyncFor() | ast.comprehension():
                pairs = [(node.target, lambda: elements(self.infer(node.iter)))]
            case ast.withitem() if node.optional_vars:
                pairs = [(node.optional_vars, lambda: entered(self.infer(node.context_expr)))]
            case ast.ExceptHandler() if node.name:
                self._add(node.name, lambda: instances(self.infer(node.type)))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._add(node.name, lambda: frozenset({Function(node, self.module)}))
            case ast.ClassDef():
                self._add(node.name, lambda: FOREIGN)
            case ast.Import() | ast.ImportFrom():
                for name, infer in imported(node).items():
                    self._add(name, infer)
        for target, given in pairs:
            for part, infer in unpacked(target, given):
                if isinstance(part, ast.Name):
                    self._add(part.id, infer)

    def annotated(self, node: ast.AnnAssign) -> Types:
        """What the annotation says; if that is Any, the value does."""
        told = self.module.annotation(node.annotation, self.owner)
        return told or (self.infer(node.value) if node.value else NONE)

    def lookup(self, name: str) -> Types:
        if name not in self._names:
            return self.parent.lookup(name)
        if name in self._busy:
            return NONE
        self._busy.add(name)
        try:
            return union(infer() for infer in self._names[name])
        finally:
            self._busy.discard(name)

    def infer(self, node: Any) -> Types:
        """The types of an expression."""
        match node:
            case ast.Name():
                return self.lookup(node.id)
            case ast.Attribute():
                return attribute(self.infer(node.value), node.attr)
            case ast.Call():
                return self._call(node)
            case ast.Subscript():
                return subscript(self.infer(node.value), node.slice)
            case ast.Tuple():
                return a(tuple, *map(self._part, node.elts))
            case ast.List() | ast.Set():
                return a(list, union(map(self._part, node.elts)))
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return a(list, self.infer(node.elt))
            case ast.DictComp():
                return a(dict, self.infer(node.key), self.infer(node.value))
            case ast.Dict():
                return a(
                    dict,
                    union(self.infer(key) for key in node.keys if key),
                    union(map(self.infer, node.values)),
                )
            case ast.BoolOp():
                return union(map(self.infer, node.values))
            case ast.IfExp():
                return self.infer(node.body) | self.infer(node.orelse)
            case ast.BinOp():
                return self.infer(node.left) | self.infer(node.right)
            case ast.NamedExpr() | ast.Await() | ast.Starred():
                return self.infer(node.value)
            case ast.Constant():
                return NONE if node.value is None else FOREIGN
            case ast.UnaryOp() | ast.Compare() | ast.JoinedStr() | ast.Lambda():
                return FOREIGN
        return NONE

    def _part(self, node: ast.AST) -> Types:
        found = self.infer(node)
        return elements(found) if isinstance(node, ast.Starred) else found

    def _call(self, node: ast.Call) -> Types:
        given = [self._part(arg) for arg in node.args]
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return a(super, given[1] if given else self.lookup("self"))
        if isinstance(node.func, ast.Attribute):
            holders = each(self.infer(node.func.value))
            if held := union(from_container(one, node.func.attr, given) for one in holders):
                return held
        return union(returned(one, given) for one in self.infer(node.func))


def within(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a function but those of functions and classes in it."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from within(child)


def unpacked(target: Any, infer: Callable[[], Types]) -> Iterator[tuple[Any, Any]]:
    """An assignment's targets, each with what it is given."""
    if isinstance(target, ast.Tuple | ast.List):
        for index, part in enumerate(target.elts):
            at = ast.Constant(index)
            yield from unpacked(part, lambda at=at: subscript(infer(), at))
    else:
        yield target, infer


# Calls and containers

SAME = (copy.copy, dataclasses.replace)
LISTS = (sorted, reversed, iter, list, tuple, set)
ELEMENT = (next, min, max)


def returned(function: Any, given: list[Types]) -> Types:
    """What a call returns."""
    if isinstance(function, Function):
        return function.module.annotation(getattr(function.node, "returns", None), function.owner)
    first = given[0] if given else NONE
    if isinstance(function, Of):
        classes = {one.cls for one in each(instances(frozenset({function})))}
        if function.cls is collections.abc.Callable:
            return function.args[0]
        if function.cls in SAME or (dict in classes and given):
            return first
        if function.cls in LISTS or classes & {*LISTS}:
            return a(list, elements(first))
        if function.cls in ELEMENT:
            return union(elements(one) or one for one in given)
        if enumerate in classes:
            return a(list, a(tuple, FOREIGN, elements(first)))
        if zip in classes:
            return a(list, a(tuple, *map(elements, given)))
        if function.cls is type:
            return union(function.args)
    # Something foreign that takes an object of vLLM may hand it on.
    return NONE if any(map(of_vllm, given)) else FOREIGN


def of_vllm(found: Types) -> bool:
    return any(
        one.cls is not type and (root(one.cls) == "vllm" or any(map(of_vllm, one.args)))
        for one in each(found)
    )


def from_container(one: Of, method: str, given: list[Types]) -> Types:
    """What a container's method returns, if that is something it holds."""
    if not one.args or one.cls is type:
        return NONE
    if issubclass(one.cls, collections.abc.Mapping):
        match method:
            case "get" | "pop" | "setdefault":
                return union([one.args[1], *given[1:]])
            case "values":
                return a(list, one.args[1])
            case "items":
                return a(list, a(tuple, *one.args))
    return elements(frozenset({one})) if method == "pop" else NONE


def elements(found: Types) -> Types:
    """What iterating yields."""
    parts = [NONE]
    for one in each(found):
        if one.cls is tuple:
            parts += one.args
        elif one.args:
            parts.append(one.args[0])
        elif known(one.cls):
            iterators = union(returned(f, []) for f in attribute(frozenset({one}), "__iter__"))
            parts.append(elements(iterators))
        else:
            parts.append(FOREIGN)
    return union(parts)


def entered(found: Types) -> Types:
    """What `with` binds: what a generator yields, or else, mostly, the thing itself."""
    return union(one.args[0] if one.args else frozenset({one}) for one in each(found))


def subscript(found: Types, index: Any) -> Types:
    parts = [NONE]
    for one in each(found):
        if isinstance(index, ast.Slice):
            parts.append(frozenset({one}))
        elif one.cls is tuple and isinstance(index, ast.Constant) and len(one.args) > index.value:
            parts.append(one.args[index.value])
        elif len(one.args) > 1 and issubclass(one.cls, collections.abc.Mapping):
            parts.append(one.args[1])
        else:
            parts.append(elements(frozenset({one})))
    return union(parts)


# Attributes


def attribute(found: Types, name: str) -> Types:
    parts = [NONE]
    for one in found:
        if isinstance(one, types.ModuleType):
            parts.append(value(getattr(one, name)) if hasattr(one, name) else FOREIGN)
        elif isinstance(one, Function):
            parts.append(FOREIGN)
        elif one.cls is super:
            bases = [under(me.cls) for me in each(instances(union(one.args)) or union(one.args))]
            parts += [member(base, name) if base else FOREIGN for base in bases]
        elif one.cls is type:
            parts += [member(made.cls, name) for made in each(union(one.args))]
        else:
            parts.append(member(one.cls, name))
    return union(parts)


_members: dict[tuple[Any, str], Types] = {}


def member(cls: Any, name: str) -> Types:
    """The types of `cls.name`."""
    if not known(cls):
        return FOREIGN
    if (cls, name) not in _members:
        _members[cls, name] = NONE  # for one that is made of itself
        _members[cls, name] = _member(cls, name)
    return _members[cls, name]


def _member(cls: Any, name: str) -> Types:
    for base in cls.__mro__:
        if f"{base.__name__}.{name}" in STANDS_FOR:
            return a(STANDS_FOR[f"{base.__name__}.{name}"])
        if found := union(infer() for infer in definitions(base, name, cls)):
            return found
    return member(UNDER[cls], name) if cls in UNDER else NONE


def definitions(base: Any, name: str, owner: Any) -> Iterator[Callable[[], Types]]:
    """Each place where the class itself defines the attribute, to infer its types from."""
    if not known(base):
        if base is not object and hasattr(base, name):
            yield lambda: FOREIGN
        return
    module = module_of(base.__module__)
    node = module.classes.get(base.__name__)
    for child in node.body if node else ():
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if child.name == name:
                yield functools.partial(method, child, module, owner)
            yield from assigned(child, module, owner, name)
        elif isinstance(child, ast.AnnAssign) and getattr(child.target, "id", "") == name:
            yield functools.partial(scope_of(child, module, owner).annotated, child)
        elif isinstance(child, ast.Assign) and name in (
            getattr(t, "id", "") for t in child.targets
        ):
            yield functools.partial(Scope(child, module, owner).infer, child.value)


def method(node: Any, module: Module, owner: Any) -> Types:
    kinds = {ast.unparse(decorator).rpartition(".")[2] for decorator in node.decorator_list}
    if kinds & {"property", "cached_property"}:
        return module.annotation(node.returns, owner)
    return frozenset({Function(node, module, owner)})


@functools.cache
def self_stores(function: Any) -> dict[str, list[Any]]:
    """Assignments to attributes of `self` in a method, by name: (statement, target, part)."""
    found: dict[str, list[Any]] = {}
    for node in within(function):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for part in ast.walk(target):
                    if isinstance(part, ast.Attribute) and getattr(part.value, "id", "") == "self":
                        found.setdefault(part.attr, []).append((node, target, part))
    return found


def assigned(function: Any, module: Module, owner: Any, name: str) -> Iterator[Callable[[], Types]]:
    for node, target, wanted in self_stores(function).get(name, ()):
        scope = scope_of(function, module, owner)
        if isinstance(node, ast.AnnAssign):
            yield functools.partial(scope.annotated, node)
            continue
        for part, infer in unpacked(target, functools.partial(scope.infer, node.value)):
            if part is wanted:
                yield infer


scope_of = functools.cache(Scope)


# What is used


class Reader:
    """Reads a module of ours. What it does while it is imported is left out: where that fails, the
    module does not load."""

    def __init__(self, name: str) -> None:
        self.module = module_of(name)
        self.uses: dict[Use, str] = {}
        self.by_default: dict[str, str] = {}
        self.unknown: dict[str, str] = {}
        self._read(self.module.tree, self.module, None)

    def _read(self, node: Any, scope: Scope | Module, owner: Any) -> None:
        for child in ast.iter_child_nodes(node):
            inner, inside = scope, owner
            if isinstance(child, ast.ClassDef):
                inside = getattr(self.module.runtime, child.name, None)
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner, inside = Scope(child, scope, owner), None
            if isinstance(scope, Scope):
                if isinstance(child, ast.Call):
                    self._called(scope, child)
                elif isinstance(child, ast.Attribute) and getattr(node, "func", None) is not child:
                    self._used(scope, child, child.value, child.attr)
            self._read(child, inner, inside)

    def _called(self, scope: Scope, call: ast.Call) -> None:
        function = call.func
        keywords = tuple(keyword.arg for keyword in call.keywords if keyword.arg)
        if isinstance(function, ast.Attribute):
            how = (True, len(call.args), keywords)
            self._used(scope, call, function.value, function.attr, *how)
        elif isinstance(function, ast.Name) and function.id in ("vars", "setattr"):
            self._used(scope, call, call.args[0], "__dict__")
        elif isinstance(function, ast.Name) and function.id in ("getattr", "hasattr"):
            by_default = isinstance(call.args[1], ast.Constant)
            self.by_default |= {ast.unparse(call): self._where(call)} if by_default else {}
        made = instances(scope.infer(function))
        if isinstance(function, ast.Attribute) and function.attr == "replace":
            made = scope.infer(function.value)
        for one in each(made):
            if root(one.cls) == "vllm" and (keywords or call.args):
                where = self._where(call)
                if hasattr(one.cls, "__dataclass_fields__") or hasattr(
                    one.cls, "__struct_fields__"
                ):
                    self.uses |= {Use(one.cls, name): where for name in keywords}
                else:
                    self.uses[Use(one.cls, "__init__", True, len(call.args), keywords)] = where

    def _used(self, scope: Scope, node: ast.AST, on: ast.AST, name: str, *how: Any) -> None:
        if name.startswith("__") and name != "__dict__":
            return
        found = scope.infer(on)
        if not found:
            self.unknown[f"{ast.unparse(on)}.{name}"] = self._where(node)
        for one in each(found):
            above = each(union(one.args)) if one.cls in (type, super) else [one]
            for owner in (other.cls for other in above):
                theirs = owner if root(owner) == "vllm" else under(owner)
                if theirs is not None and not _our_own(owner, name) and _vllms(theirs, name):
                    self.uses[Use(theirs, name, *how)] = self._where(node)

    def _where(self, node: Any) -> str:
        return f"{self.module.runtime.__name__}:{node.lineno}"


def _our_own(cls: type, name: str) -> bool:
    """Whether a class of ours has the attribute. If vLLM's has it, too, ours overrides it."""
    ours = [base for base in getattr(cls, "__mro__", ()) if root(base) == "nexus_vllm"]
    return any(any(True for _ in definitions(base, name, cls)) for base in ours)


def _vllms(cls: type, name: str) -> bool:
    """Whether it is vLLM that gives the class the attribute, as far as one can see."""
    foreign = [base for base in cls.__mro__ if base is not object and not known(base)]
    given = any(inspect.getattr_static(base, name, None) is not None for base in foreign)
    return name == "__dict__" or not given
