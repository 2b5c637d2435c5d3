"""Import hooks: deferred registration with parts of PyTorch that are slow to import (DTensor, FLOP
counter), and modules under a second name."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that calls functions once a module has been loaded."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name, self.actions = name, [action]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            self._theirs, spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._theirs
        self._theirs.exec_module(module)
        for action in self.actions:
            action(module)


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls ``action(module)`` once the module of that name is imported; immediately if it already is."""
    if name in sys.modules:
        action(sys.modules[name])
        return
    for finder in sys.meta_path:
        if isinstance(finder, _Finder) and finder.name == name:
            finder.actions.append(action)
            return
    sys.meta_path.insert(0, _Finder(name, action))


class SameModule(importlib.abc.Loader):
    """Returns an existing module; the import must not mark it as loaded under the second name."""

    def __init__(self, name: str) -> None:
        self._module = importlib.import_module(name)
        self._spec = self._module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
