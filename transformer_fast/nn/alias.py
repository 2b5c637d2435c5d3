"""Imports of ``transformer_fast.nn.X`` that are `torch.nn`'s own modules, under their second name.

Without this ``import transformer_fast.nn.utils.rnn`` would fail, or load a second copy.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _SameModule(Loader):
    """Gives an existing module; ``import`` must not mark it as loaded under the second name."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Finder(MetaPathFinder):
    def __init__(self, package: str, original: str) -> None:
        self.package, self.original = package, original

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, _ = fullname.rpartition(".")
        if parent == self.package:
            if PathFinder.find_spec(fullname, path) is not None:
                return None  # a file of ours
        elif not parent.startswith(self.package + "."):
            return None
        theirs = self.original + fullname.removeprefix(self.package)
        if importlib.util.find_spec(theirs) is None:
            return None
        return ModuleSpec(fullname, _SameModule(importlib.import_module(theirs)))


def install(package: str, original: str, modules: Mapping[str, ModuleType]) -> None:
    """Make ``package.X`` importable for all X of ``original`` that ``package`` has no file for.

    ``modules[X]``, where given, is what ``package.X`` is.
    """
    for name, module in modules.items():
        sys.modules[f"{package}.{name}"] = module
    if not any(isinstance(f, _Finder) and f.package == package for f in sys.meta_path):
        # In front: the usual finder would load torch's files a second time.
        sys.meta_path.insert(0, _Finder(package, original))
