"""The reference as a backend, which supports every call."""

from __future__ import annotations

from functools import partial

from .. import reference
from ..dispatch import ANNOTATED, OPS, Kernel, register, unpacked
from ..ops.chunked_loss import chunked_loss, register_losses
from ..reference import DIFFERENTIABLE

register_losses("reference", unpacked(reference.linear), unpacked(reference.cross_entropy))
#: Replacements of reference functions that need less memory.
_FUNCTIONS = {"linear_cross_entropy": partial(chunked_loss, "reference")}

for _op in (*OPS, *ANNOTATED):
    register(
        Kernel(
            _op,
            "reference",
            _FUNCTIONS.get(_op) or unpacked(getattr(reference, _op)),
            gradients=_op in (*DIFFERENTIABLE, *ANNOTATED),
            mask_gradient=True,
            dropout=True,
            query_lengths=True,
            softcap=True,
        )
    )
