"""Kernel records of the norms, for backends that have the operators of `ops.layer_norm`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..dispatch import VARIANTS, Call, Kernel
from ..ops.layer_norm import ANNOTATED, ANNOTATED_BIASED, NORMS, add_norm_on, norm_on


def norm_kernels(
    backend: str, ops: Iterable[str] = NORMS, float_weights: bool = False, **limits: Any
) -> list[Kernel]:
    """Returns the records of a backend whose operators have these norms, alone and behind a sum.

    Operators that have RMS norms have the Annotated Transformer's, too.

    Args:
        float_weights: whether rows of low precision may have weights and biases in float32.
    """
    records = []
    for op in ops:
        kind, *_, has_bias = NORMS[op]
        norm, add_norm = norm_on(backend, kind), add_norm_on(backend, kind)
        if not has_bias:
            norm, add_norm = _without_bias(norm, 3), _without_bias(add_norm, 4)
        records += [
            Kernel(op, backend, norm, gradients=True, **limits),
            Kernel(f"add_{op}", backend, add_norm, gradients=True, dropout=True, **limits),
        ]
    if "rms_norm" in ops:
        records += _annotated_kernels(backend, **limits)
    if float_weights:
        records = [replace(r, same_dtype=2 if r.op.startswith("add_") else 1) for r in records]
    return records


def _refuse_annotated(call: Call) -> str | None:
    shape = call.normalized_shape
    if not shape or shape[0] < 2:
        return "it needs rows of two values or more, for their standard deviation"
    if any(x is not None and x.shape != shape for x in call.tensors[-2:]):
        return "it supports weights and biases of the last dimension's size only"
    return None


def _annotated_kernels(backend: str, **limits: Any) -> list[Kernel]:
    """The records of the Annotated Transformer's norms, by the operators of the others."""

    def of_kind(unbiased: bool) -> int:
        return ANNOTATED if unbiased else ANNOTATED_BIASED

    def norm(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, unbiased: bool
    ) -> Tensor:
        return norm_on(backend, of_kind(unbiased))(input, input.shape[-1:], weight, bias, eps)

    def add_norm(
        input: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
        unbiased: bool, dropout_p: float, seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        run = add_norm_on(backend, of_kind(unbiased))
        return run(input, residual, input.shape[-1:], weight, bias, eps, dropout_p, seed)

    also = limits.pop("refuses", None)

    def refuses(call: Call) -> str | None:
        return _refuse_annotated(call) or (None if also is None else also(call))

    first, second = VARIANTS
    return [
        Kernel(first, backend, norm, gradients=True, refuses=refuses, **limits),
        Kernel(second, backend, add_norm, gradients=True, dropout=True, refuses=refuses, **limits),
    ]


def _without_bias(run: Callable[..., Any], place: int) -> Callable[..., Any]:
    return lambda *given: run(*given[:place], None, *given[place:])
