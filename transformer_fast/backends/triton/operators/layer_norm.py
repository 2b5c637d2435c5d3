"""layer_norm and add_layer_norm on Triton."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....functional.layer_norm import BACKWARD, TRAINING, add_layer_norm_on, layer_norm_on
from .define import implement


def _forward(*arguments: Any) -> tuple[Tensor | None, ...]:
    from ..layer_norm import forward

    return forward(*arguments)


def _backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    from ..layer_norm import backward

    return backward(*arguments)


implement(TRAINING, _forward)
implement(BACKWARD, _backward)
layer_norm = layer_norm_on("triton")
add_layer_norm = add_layer_norm_on("triton")
