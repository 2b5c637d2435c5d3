"""Matrix products, rounding, and activations, with equal results on the GPU and in the interpreter.

Triton's interpreter multiplies the bit patterns of bf16 values, and it truncates fp32 to bf16 where
hardware rounds to nearest. Both are corrected here, by code that runs in the interpreter only.

Activations and their derivatives are in fp32, for the epilogues of `matmul`:

    relu: max(x, 0)                    gelu: x Phi(x), with Phi by erf
    silu: x sigmoid(x)                 gelu_tanh: x (1 + tanh u) / 2 = x sigmoid(2 u),
                                       where u = sqrt(2 / pi) (x + 0.044715 x^3)
"""

from __future__ import annotations

import triton
import triton.language as tl

from .runtime import INTERPRETED

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)

# Equal to `functional.linear.CODES`.
NONE, RELU, GELU, GELU_TANH, SILU = range(5)

_RELU: tl.constexpr = tl.constexpr(RELU)
_GELU: tl.constexpr = tl.constexpr(GELU)
_GELU_TANH: tl.constexpr = tl.constexpr(GELU_TANH)
_SILU: tl.constexpr = tl.constexpr(SILU)
# Constants must be the right operand of a product: on the left the interpreter wraps the result.
_SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
_INVERSE_SQRT_2PI: tl.constexpr = tl.constexpr(0.3989422804014327)
_TWICE_SQRT_2_OVER_PI: tl.constexpr = tl.constexpr(1.5957691216057308)


@triton.jit
def dot(a, b, accumulator, PRECISION: tl.constexpr):
    """Returns a @ b + accumulator in fp32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """Returns a @ b in fp32."""
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def divide(x, y):
    """Returns x / y in fp32, rounded to nearest.

    Triton's own ``/`` may be off by two units in the last place. In the mean of rows far from 0, or in
    a factor of a whole row, that is enough to exceed the error budget.
    """
    return tl.div_rn(x, y)


@triton.jit
def _nearest_bf16(x):
    bits = x.to(tl.uint32, bitcast=True)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return tl.where(x == x, (bits & 0xFFFF0000).to(tl.float32, bitcast=True), x)


@triton.jit
def narrow(x, like):
    """Converts fp32 x to the dtype of ``like``."""
    if _INTERPRETED and like.dtype == tl.bfloat16:
        x = _nearest_bf16(x)
    return x.to(like.dtype)


@triton.jit
def store(at, x, mask):
    """Stores fp32 x in the dtype that ``at`` points to."""
    if _INTERPRETED and at.dtype.element_ty == tl.bfloat16:
        x = _nearest_bf16(x)
    tl.store(at, x.to(at.dtype.element_ty), mask=mask)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def activate(x, KIND: tl.constexpr):
    if KIND == _RELU:
        # Written so that NaN stays NaN.
        return tl.where(x < 0.0, 0.0, x)
    if KIND == _GELU:
        return 0.5 * x * (1.0 + tl.erf(x * _SQRT_HALF))
    if KIND == _GELU_TANH:
        return x * _sigmoid(x * _TWICE_SQRT_2_OVER_PI * (1.0 + 0.044715 * x * x))
    if KIND == _SILU:
        return x * _sigmoid(x)
    return x


@triton.jit
def activation_slope(x, KIND: tl.constexpr):
    """Returns the derivative at x; for relu, x may also be relu(x)."""
    if KIND == _RELU:
        return tl.where(x > 0.0, 1.0, 0.0)
    if KIND == _GELU:
        density = tl.exp(-0.5 * x * x) * _INVERSE_SQRT_2PI
        return 0.5 * (1.0 + tl.erf(x * _SQRT_HALF)) + x * density
    if KIND == _GELU_TANH:
        s = _sigmoid(x * _TWICE_SQRT_2_OVER_PI * (1.0 + 0.044715 * x * x))
        inner = (1.0 + 3.0 * 0.044715 * x * x) * _TWICE_SQRT_2_OVER_PI
        return s + x * s * (1.0 - s) * inner
    if KIND == _SILU:
        s = _sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    return x * 0.0 + 1.0
