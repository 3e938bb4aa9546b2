"""Change a module as soon as somebody imports it, and not before.

Importing vLLM in `sitecustomize` would be too early for its plugins, and too slow for the many
processes that never need it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_patches: dict[str, list[Callable[[Any], None]]] = {}


class _PatchingLoader(Loader):
    def __init__(self, wrapped: Any) -> None:
        self.wrapped = wrapped

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.wrapped.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.wrapped.exec_module(module)
        for patch in _patches[module.__name__]:
            patch(module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in _patches:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


def on_import(name: str, patch: Callable[[Any], None]) -> None:
    """Call `patch(module)` when the module of this name has been imported."""
    if not _patches:
        sys.meta_path.insert(0, _Finder())
    _patches.setdefault(name, []).append(patch)
