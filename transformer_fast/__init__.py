"""Drop-in Transformer modules and ops for PyTorch, with fused kernels.

    from transformer_fast import nn               # torch.nn, with fused modules
    from transformer_fast import functional as F  # torch.nn.functional, with fused ops
    transformer_fast.accelerate(model)            # an existing model, in place; restore(model)
    torch.compile(model, backend="transformer_fast")  # hand-written code
    transformer_fast.explain("attention", q, k, v)    # which kernel runs a call, and why

`models` has whole models and decoding, `training` the training loop, `viz` pictures (needs
matplotlib). ``python -m transformer_fast info`` shows what this machine can run.
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import backends, functional, memory
from ._explain import explain
from ._sdpa import disable_sdpa, enable_sdpa
from ._version import __version__
from .accelerate import accelerate, accelerated, restore
from .backends import warm
from .compile.graph_report import compile_reports
from .dispatch import (
    Explanation,
    batch_invariant,
    export_operators,
    set_defaults,
    strict,
    use_backend,
)

if TYPE_CHECKING:
    from . import models, nn, training
    from . import viz as viz
    from .compile.backend import compile_backend

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
    "models",
    "nn",
    "restore",
    "set_defaults",
    "strict",
    "training",
    "use_backend",
    "warm",
]


_SUBMODULES = ("models", "nn", "training", "viz")

if not TYPE_CHECKING:  # so that type checkers report names that do not exist

    def __getattr__(name: str) -> Any:
        """Imports submodules on first use if they are slow to import or need further packages."""
        if name in _SUBMODULES:
            return importlib.import_module(f".{name}", __name__)
        if name == "compile_backend":
            from .compile.backend import compile_backend

            return compile_backend
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES, *(name for name in globals() if name.startswith("__"))})
