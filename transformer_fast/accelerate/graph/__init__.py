"""Rewriting the graphs of hand-written Transformers: the backend of `torch.compile`.

`backend.compile_backend` is the entry; `rewrite.rewrite` lists what is done, one file each.

An installed package is found by its entry point. So that ``torch.compile(backend=...)`` knows the
name in a checkout on ``PYTHONPATH`` too, it is entered into Dynamo's registry as well: when that is
imported, which takes seconds and is what a program that compiles nothing never does.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint
from types import ModuleType

_REGISTRY = "torch._dynamo.backends.registry"
_ENTRY = EntryPoint(
    "transformer_fast", f"{__name__}.backend:compile_backend", "torch_dynamo_backends"
)


def _enter(registry: ModuleType) -> None:
    registry._BACKENDS.setdefault(_ENTRY.name, _ENTRY)


class _OnImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the registry as Python does, and enters the backend once it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == _REGISTRY else None
        if spec is not None and spec.loader is not None:
            self._theirs, spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path.remove(self)
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._theirs
        self._theirs.exec_module(module)
        _enter(module)


if _REGISTRY in sys.modules:
    _enter(sys.modules[_REGISTRY])
else:
    sys.meta_path.insert(0, _OnImport())
