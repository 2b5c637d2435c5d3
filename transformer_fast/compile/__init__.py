"""Rewriting the graphs of hand-written Transformers: the backend of `torch.compile`.

`backend.compile_backend` is the entry, and `backend.rewrite` all that is done to a graph.

An installed package is found by its entry point. So that ``torch.compile(backend=...)`` knows the
name in a checkout on ``PYTHONPATH`` too, it is entered into Dynamo's registry as well.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import ModuleType

from .._on_import import when_imported

_ENTRY = EntryPoint(
    "transformer_fast", f"{__name__}.backend:compile_backend", "torch_dynamo_backends"
)


def _enter(registry: ModuleType) -> None:
    registry._BACKENDS.setdefault(_ENTRY.name, _ENTRY)


when_imported("torch._dynamo.backends.registry", _enter)
