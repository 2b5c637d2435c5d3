"""transformer_fast: the Transformer's modules and ops near the hardware's limit.

    from transformer_fast import nn               # torch.nn with our classes in place of torch's
    from transformer_fast import functional as F  # torch.nn.functional, likewise
    transformer_fast.accelerate(model)            # a model that exists already; restore(model)
    torch.compile(model, backend="transformer_fast")  # one that somebody wrote by hand
    transformer_fast.explain("attention", q, k, v)

The pure PyTorch reference is the specification; kernels implement it; `explain` tells which of
them a call runs on and why. ``python -m transformer_fast info`` says what this machine has.
"""

from typing import TYPE_CHECKING, Any

from . import backends, functional, memory
from ._explain import explain
from ._sdpa import disable_sdpa, enable_sdpa
from ._version import __version__
from .accelerate import accelerate, accelerated, restore
from .accelerate.graph.report import compile_reports
from .backends.triton import warm
from .dispatch import Explanation, export_operators, strict, use_backend
from .small import batch_invariant

if TYPE_CHECKING:
    from .accelerate.graph.backend import compile_backend

__all__ = [
    "Explanation",
    "__version__",
    "accelerate",
    "accelerated",
    "backends",
    "batch_invariant",
    "compile_backend",
    "compile_reports",
    "disable_sdpa",
    "enable_sdpa",
    "explain",
    "export_operators",
    "functional",
    "memory",
    "restore",
    "strict",
    "use_backend",
    "warm",
]


def __getattr__(name: str) -> Any:
    if name == "compile_backend":  # the one part that takes time to import
        from .accelerate.graph.backend import compile_backend

        return compile_backend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
