"""Test data of linear; see `Row`."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from harness import ISAS
from hypothesis import strategies as st
from torch import Tensor

from transformer_fast.reference.linear import activate
from transformer_fast.specs.linear import _linear

from . import MIDDLE, SMALL, Drawing, Drawn, Row, some, wrong

#: Maximum error of an fp32 sum, relative to the sum of the absolute values of its terms.
KINK = 1e-5
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")

_wrong = functools.partial(wrong, "linear")
_BUGS = {
    "missing bias": ("bias", _wrong(bias=None)),
    "missing residual": ("residual", _wrong(residual=None)),
    "activation after the residual": (
        "silu, residual, no bias",
        _wrong(lambda call, y: activate(y, call.activation), activation=None),
    ),
    "no activation": ("relu", _wrong(activation=None)),
    "gelu by tanh": ("gelu", _wrong(activation="gelu_tanh")),
    "last input dropped": (
        "primes",
        _wrong(input=lambda call: call.input[..., :-1], weight=lambda call: call.weight[:, :-1]),
    ),
    "sums in bf16": (
        "long sums",
        _wrong(
            lambda call, y: y.to(call.input.dtype),
            input=lambda call: call.input.bfloat16(),
            weight=lambda call: call.weight.bfloat16(),
            bias=lambda call: call.bias.bfloat16(),
        ),
    ),
    "result transposed": ("bias", _wrong(lambda call, y: y.mT.contiguous())),
    "result in fp64": ("bias", _wrong(lambda call, y: y.double())),
    "last columns not written": (
        "primes", _wrong(lambda call, y: torch.cat((y[..., :-3], y[..., -3:] * math.nan), dim=-1)),
    ),
}  # fmt: skip


def near_a_kink(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if rounding may change the sign of an output, where the derivative of ReLU jumps."""
    x, weight = x.double().reshape(-1, x.shape[-1]), weight.double()
    z, size = x @ weight.mT, x.abs() @ weight.abs().mT
    if bias is not None:
        z, size = z + bias.double(), size + bias.double().abs()
    return bool(((z.abs() <= KINK * size) & (size > 0)).any())


@st.composite
def _drawn(draw: Any, dtype: torch.dtype) -> Drawn:
    numbers = Drawing(draw, dtype)
    k = numbers.size(SMALL, MIDDLE, (0, 127, 129, 257, 300, 513))
    n = numbers.size(SMALL, MIDDLE, (0, 127, 129, 257, 300))
    lead = numbers.lead(4_000_000 // max(1, k * n))
    # AMX treats the bfloat16 pieces of denormal numbers as 0 (docs/guides/backends.md).
    flushed = dtype == torch.bfloat16 or (dtype == torch.float32 and "amx" in ISAS)
    x = numbers.valued(*lead, k, denormal=not flushed)
    weight = numbers.valued(n, k)
    weight = weight / math.sqrt(max(1, k)) if dtype == torch.float16 else weight
    bias = numbers.normal(n) if draw(st.booleans()) else None
    act = draw(st.sampled_from(ACTIVATIONS))
    residual = numbers.normal(*lead, n) if draw(st.booleans()) else None
    grads = draw(st.booleans()) and x.numel() > 0 and n > 0
    if grads and act == "relu":
        grads = not near_a_kink(x, weight, bias)
    x, weight = numbers.laid_out(x), numbers.laid_out(weight)
    if residual is not None:
        residual = numbers.laid_out(residual)
    names = ("input", "weight", "bias", "residual") if grads else ()
    return Drawn((x, weight, bias, act, residual), names, draw(st.integers(0, 3)))


def _small(draw: Any) -> list[tuple[Any, ...]]:
    names = (None, "relu", "gelu", "gelu_tanh", torch.tanh, "silu")
    return [_linear((3,), 4, 2, activation=name, residual=True)(draw) for name in names]


def _large(draw: Any) -> list[tuple[Any, ...]]:
    shapes = (
        *((1, 90, 700), (40, 90, 300), (100, 90, 300), (500, 90, 130), (130, 1100, 600)),
        *((75, 300, 130), (150, 300, 130)),
    )
    options: Any = {"bias": False, "activation": "relu", "residual": True}
    found = [_linear((rows,), *sizes, **options)(draw) for rows, *sizes in shapes]
    return [*found, _linear((300,), 70, 130, activation="silu")(draw)]


def _swept(draw: Any, rows: int, inputs: int, outputs: int) -> tuple[Any, ...]:
    return _linear((rows,), inputs, outputs, activation="relu", residual=True)(draw)


ROWS = {
    "linear": Row(
        bugs=_BUGS,
        sweeps={
            "rows": lambda draw, n: _swept(draw, n, 19, some(n)),
            "inputs": lambda draw, n: _swept(draw, 9, n, 35),
            "outputs": lambda draw, n: _swept(draw, some(n), 19, n),
        },
        small=_small,
        large=_large,
        drawn=_drawn,
        sample="silu, residual",
    )
}
