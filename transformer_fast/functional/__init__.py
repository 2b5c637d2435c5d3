"""`torch.nn.functional` with fused ops.

The fused ops are in ``__all__``: PyTorch's with its arguments and more, and some that PyTorch lacks.
Every other name is `torch.nn.functional`'s own.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any

import torch.nn.functional as _torch_functional

from .attention import *
from .cross_entropy import *
from .feed_forward import *
from .int8_linear import *
from .layer_norm import *
from .linear import *
from .masks import *

if TYPE_CHECKING:
    from torch.nn.functional import *  # type: ignore[assignment,no-redef]

#: All functions of this module.
__all__ = sorted(name for name, value in globals().items() if isinstance(value, FunctionType))


if not TYPE_CHECKING:  # so that type checkers report names that do not exist

    def __getattr__(name: str) -> Any:
        try:
            return getattr(_torch_functional, name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    theirs = (
        name
        for name, value in vars(_torch_functional).items()
        if isinstance(value, (FunctionType, BuiltinFunctionType))
        and not name.startswith("_")
        and value.__module__ not in ("torch.overrides", "typing")
    )
    return sorted({*__all__, *theirs})
