"""`torch.nn`, with fused classes in place of PyTorch's where this library has kernels.

The fused classes, from `LayerNorm` and `Linear` to `Transformer`, are subclasses of PyTorch's;
`functional` is `transformer_fast.functional`. Every other name, submodules included
(``transformer_fast.nn.utils.rnn``), is `torch.nn`'s own.

Without the native kernels, for example on macOS, Windows and ARM, the classes run `torch.nn`'s own
forward on CPU tensors.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch.nn as _torch_nn

from .. import functional as functional
from .._on_import import SameModule
from .multihead_attention import MultiheadAttention as MultiheadAttention
from .ops import *
from .ops import __all__ as _ops
from .transformer import Transformer as Transformer
from .transformer import TransformerDecoder as TransformerDecoder
from .transformer import TransformerEncoder as TransformerEncoder
from .transformer_layers import TransformerDecoderLayer as TransformerDecoderLayer
from .transformer_layers import TransformerEncoderLayer as TransformerEncoderLayer

if TYPE_CHECKING:
    from torch.nn import *  # type: ignore[no-redef,assignment]

_OURS = (
    "MultiheadAttention",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "functional",
    *_ops,
)
_THEIRS = tuple(name for name in dir(_torch_nn) if not name.startswith("_"))

__all__ = sorted({*_OURS, *_THEIRS})


class _Finder(MetaPathFinder):
    """Import hook: submodules that exist only in `torch.nn` resolve to those of `torch.nn`.

    Without it, ``import transformer_fast.nn.utils.rnn`` would fail, or load a second copy.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, _ = fullname.rpartition(".")
        if parent == __name__:
            if PathFinder.find_spec(fullname, path) is not None:
                return None  # a file of ours
        elif not parent.startswith(__name__ + "."):
            return None
        theirs = _torch_nn.__name__ + fullname.removeprefix(__name__)
        if importlib.util.find_spec(theirs) is None:
            return None
        return ModuleSpec(fullname, SameModule(theirs))


sys.modules[f"{__name__}.functional"] = functional
# In front: the usual finder would load torch's files a second time.
sys.meta_path.insert(0, _Finder())


if not TYPE_CHECKING:  # so that type checkers report names that do not exist

    def __getattr__(name: str) -> Any:
        try:
            return getattr(_torch_nn, name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return list(__all__)
