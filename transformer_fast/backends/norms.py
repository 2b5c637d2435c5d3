"""Kernel records of the norms, for backends that have the operators of `ops.layer_norm`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..dispatch import Call, Kernel
from ..ops.layer_norm import NORMS, norm_on
from ..reference import ANNOTATED


def norm_kernels(
    backend: str, ops: Collection[str] = NORMS, float_weights: bool = False, **limits: Any
) -> list[Kernel]:
    """Returns the kernel records of these norms, alone and behind a residual connection.

    Backends with RMS norms also have the Annotated Transformer's norms.

    Args:
        float_weights: True if rows of low precision may have weights and biases in float32.
    """
    names = [*ops, *ANNOTATED[:1]] if "rms_norm" in ops else ops
    also = limits.pop("refuses", None)

    def refuses_annotated(call: Call) -> str | None:
        return _refuse_annotated(call) or (None if also is None else also(call))

    return [
        Kernel(
            op,
            backend,
            norm_on(backend, op),
            gradients=True,
            same_dtype=1 + adds if float_weights else None,
            refuses=refuses_annotated if op in ANNOTATED else also,
            **limits,
        )
        for name in names
        for adds, op in enumerate((name, f"add_{name}"))
    ]


def _refuse_annotated(call: Call) -> str | None:
    shape = call.tensors[0].shape[-1:]
    if not shape or shape[0] < 2:
        return "it needs rows of two values or more, for their standard deviation"
    if any(x is not None and x.shape != shape for x in call.tensors[-2:]):
        return "it supports weights and biases of the last dimension's size only"
    return None
