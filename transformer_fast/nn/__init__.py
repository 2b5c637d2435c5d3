"""`torch.nn` with our classes in place of torch's where we have kernels.

Ours, from `LayerNorm` and `Linear` to `Transformer`, are subclasses of torch's; `functional` is
`transformer_fast.functional`.
Every other name, submodules included (``transformer_fast.nn.utils.rnn``), is `torch.nn`'s own.

Where the native kernels are missing, on macOS, Windows and ARM for example, the classes run
`torch.nn`'s own forward on CPU tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn as _torch_nn

from .. import functional as functional
from . import alias as _alias
from .embedding import Embedding as Embedding
from .layer_norm import *
from .layer_norm import __all__ as _norms
from .linear import Linear as Linear
from .loss import CrossEntropyLoss as CrossEntropyLoss
from .multihead_attention import MultiheadAttention as MultiheadAttention
from .transformer import Transformer as Transformer
from .transformer import TransformerDecoder as TransformerDecoder
from .transformer import TransformerEncoder as TransformerEncoder
from .transformer_layers import TransformerDecoderLayer as TransformerDecoderLayer
from .transformer_layers import TransformerEncoderLayer as TransformerEncoderLayer

if TYPE_CHECKING:
    from torch.nn import *  # type: ignore[no-redef,assignment]

_OURS = (
    "CrossEntropyLoss",
    "Embedding",
    "Linear",
    "MultiheadAttention",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "functional",
    *_norms,
)
_THEIRS = tuple(name for name in dir(_torch_nn) if not name.startswith("_"))

__all__ = sorted({*_OURS, *_THEIRS})

_alias.install(__name__, _torch_nn.__name__, {"functional": functional})


if not TYPE_CHECKING:  # so that type checkers report names that do not exist

    def __getattr__(name: str) -> Any:
        try:
            return getattr(_torch_nn, name)
        except AttributeError:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torch_nn)})
