"""The `torch.compile` backend: rewrites the graphs of hand-written Transformers.

`backend.compile_backend` is the entry point. `backend.rewrite` applies all graph rewrites.

PyTorch finds the backend of an installed package by its entry point. A checkout on ``PYTHONPATH``
has no entry point, so the backend is also added to Dynamo's registry:
``torch.compile(backend=...)`` accepts the name in both cases.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint
from types import ModuleType

from .._on_import import when_imported

_ENTRY = EntryPoint(
    "transformer_fast", f"{__name__}.backend:compile_backend", "torch_dynamo_backends"
)


def _register(registry: ModuleType) -> None:
    registry._BACKENDS.setdefault(_ENTRY.name, _ENTRY)


when_imported("torch._dynamo.backends.registry", _register)
