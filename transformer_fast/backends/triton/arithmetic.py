"""Products, and rounding to the types of memory, the same on the GPU and in the interpreter.

Triton's interpreter multiplies the bit patterns of bf16 and cuts fp32 off where hardware rounds to the
nearest bf16; both are made up for here, in code that exists in the interpreter only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .runtime import INTERPRETED

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, accumulator, PRECISION: tl.constexpr):
    """a @ b + accumulator in fp32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b in fp32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def divide(x, y):
    """x / y in fp32, rounded to nearest. Triton's own ``/`` may be off by two units in the last place:
    enough for a mean of rows far from 0, or for what multiplies a whole row, to miss the budget."""
    return tl.div_rn(x, y)


@triton.jit
def _nearest_bf16(x):
    bits = x.to(tl.uint32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return tl.where(x == x, (bits & 0xFFFF0000).to(tl.float32, bitcast=True), x)


@triton.jit
def narrow(x, like):
    """fp32 x in the type of ``like``."""
    if _INTERPRETED and like.dtype == tl.bfloat16:
        x = _nearest_bf16(x)
    return x.to(like.dtype)


@triton.jit
def store(at, x, mask):
    """Store fp32 x in the type that ``at`` points to."""
    if _INTERPRETED and at.dtype.element_ty == tl.bfloat16:
        x = _nearest_bf16(x)
    tl.store(at, x.to(at.dtype.element_ty), mask=mask)
