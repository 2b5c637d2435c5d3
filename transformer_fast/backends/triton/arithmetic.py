"""Products, rounding to the types of memory, the same on the GPU and in the interpreter, and activations.

Triton's interpreter multiplies the bit patterns of bf16 and cuts fp32 off where hardware rounds to the
nearest bf16; both are made up for here, in code that exists in the interpreter only.

Activations and their derivatives are in fp32, as the epilogues of `matmul` use them. relu: max(x, 0) ·
gelu: x Phi(x) with Phi through erf · gelu_tanh: x (1 + tanh u) / 2 = x sigmoid(2 u),
u = sqrt(2 / pi) (x + 0.044715 x^3) · silu: x sigmoid(x).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .runtime import INTERPRETED

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)

# As `functional.linear.CODES`.
NONE, RELU, GELU, GELU_TANH, SILU = range(5)

_RELU: tl.constexpr = tl.constexpr(RELU)
_GELU: tl.constexpr = tl.constexpr(GELU)
_GELU_TANH: tl.constexpr = tl.constexpr(GELU_TANH)
_SILU: tl.constexpr = tl.constexpr(SILU)
# Constants stand on the right of products: on the left the interpreter would wrap the result.
_SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)
_INVERSE_SQRT_2PI: tl.constexpr = tl.constexpr(0.3989422804014327)
_TWICE_SQRT_2_OVER_PI: tl.constexpr = tl.constexpr(1.5957691216057308)


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
    """The derivative at x; for relu x may also be relu(x)."""
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
