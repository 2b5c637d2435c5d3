"""Test data of int8_linear and int8_feed_forward; see `Row`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from transformer_fast import reference
from transformer_fast.reference.int8_linear import quantize_rows, width_of
from transformer_fast.specs.int8_linear import feed_forward_arguments, linear_arguments

from . import MIDDLE, SMALL, Drawing, Drawn, Row, some, wrong
from .linear import ACTIVATIONS


def _saturated(call: Any, right: Tensor) -> Tensor:
    """Sums of two products that stop at 16 bits."""
    q, row = quantize_rows(call.input)
    zero = -q.amin(-1, keepdim=True).clamp(max=0)
    products = (q + zero)[:, None, :] * call.weight.float()
    pairs = products.unflatten(-1, (-1, 2)).sum(-1).clamp(-(2**15), 2**15 - 1)
    sums = pairs.sum(-1) - zero * call.weight.float().sum(-1)
    return sums * call.scale * row + call.bias


def _shifted(call: Any, right: Tensor) -> Tensor:
    """A zero point that is off by one: each value differs by a step."""
    step = width_of(call.input) / 254
    return right + step * call.weight.float().sum(-1) * call.scale


_wrong = functools.partial(wrong, "int8_linear")
_BUGS = {
    "zero point off by one": ("bias", _wrong(_shifted)),
    "saturated sums": ("bias", _wrong(_saturated)),
    "1e-4": ("no bias", _wrong(lambda call, y: y * (1 + 1e-4))),
    "scales of the wrong columns": ("bias", _wrong(scale=lambda call: call.scale.roll(1))),
    "missing bias": ("bias", _wrong(bias=None)),
    "missing residual": ("primes", _wrong(residual=None)),
    "last value dropped": (
        "primes",
        _wrong(input=lambda call: call.input[:, :-1], weight=lambda call: call.weight[:, :-1]),
    ),
    "gelu by tanh": ("gelu", _wrong(activation="gelu_tanh")),
    "missing factors": ("factors", _wrong(factors=None)),
}
_network_wrong = functools.partial(wrong, "int8_feed_forward")
_NETWORK_BUGS = {
    "missing first bias": ("relu", _network_wrong(bias1=None)),
    "missing second bias": ("gelu", _network_wrong(bias2=None)),
    "no activation": ("relu", _network_wrong(activation=lambda call: lambda hidden: hidden)),
    "second scales of the wrong columns": (
        "relu", _network_wrong(scale2=lambda call: call.scale2.roll(1)),
    ),
    "missing factors of the hidden units": ("factors", _network_wrong(factors2=None)),
}  # fmt: skip


class _Drawing(Drawing):
    def weight(self, n: int, k: int) -> tuple[Tensor, Tensor]:
        weight, scale = reference.quantize_weight(self.valued(n, k))
        return self.laid_out(weight), self.laid_out(scale)

    def bias(self, n: int) -> Tensor | None:
        return self.normal(n) if self.draw(st.booleans()) else None

    def factors(self, k: int) -> Tensor | None:
        if not self.draw(st.booleans()):
            return None
        return self.laid_out(self.normal(k).float().round().clamp(-4.0, 0.0).exp2())


@st.composite
def _drawn(draw: Any, dtype: torch.dtype) -> Drawn:
    numbers = _Drawing(draw, dtype)
    k = numbers.size(SMALL, MIDDLE, (0, 127, 129, 257, 300, 513))
    n = numbers.size(SMALL, MIDDLE, (0, 127, 129, 257, 300))
    lead = numbers.lead(4_000_000 // max(1, k * n))
    x = numbers.laid_out(numbers.valued(*lead, k))
    weight, scale = numbers.weight(n, k)
    bias, act = numbers.bias(n), draw(st.sampled_from(ACTIVATIONS))
    residual = numbers.laid_out(numbers.normal(*lead, n)) if draw(st.booleans()) else None
    arguments = x, weight, scale, bias, act, residual, numbers.factors(k)
    return Drawn(arguments, (), draw(st.integers(0, 3)))


@st.composite
def _drawn_network(draw: Any, dtype: torch.dtype) -> Drawn:
    numbers = _Drawing(draw, dtype)
    m = numbers.size(SMALL, MIDDLE, (0, 127, 129))
    f = numbers.size(SMALL, MIDDLE, (0, 127, 129, 257))
    out = m if draw(st.booleans()) else numbers.size(SMALL, MIDDLE)
    x = numbers.laid_out(numbers.valued(*numbers.lead(2_000_000 // max(1, f * (m + out))), m))
    first = *numbers.weight(f, m), numbers.bias(f)
    second = *numbers.weight(out, f), numbers.bias(out)
    act = draw(st.sampled_from(ACTIVATIONS[1:]))
    arguments = x, *first, *second, act, numbers.factors(m), numbers.factors(f)
    return Drawn(arguments, (), draw(st.integers(0, 3)))


def _large(draw: Any) -> list[tuple[Any, ...]]:
    shapes = (1, 90, 700), (40, 90, 300), (100, 90, 300), (500, 90, 130), (130, 1100, 600)
    options: Any = {"activation": "relu", "residual": True}
    found = [linear_arguments((rows,), *sizes, **options)(draw) for rows, *sizes in shapes]
    return [*found, linear_arguments((300,), 70, 130, activation="silu")(draw)]


def _large_networks(draw: Any) -> list[tuple[Any, ...]]:
    rows = (1, 40, 60, 100, 170, 500)
    return [feed_forward_arguments((n,), 90, 300, activation="gelu")(draw) for n in rows]


def _swept(draw: Any, rows: int, inputs: int, outputs: int) -> tuple[Any, ...]:
    return linear_arguments((rows,), inputs, outputs, activation="relu", residual=True)(draw)


def _swept_network(draw: Any, rows: int, model: int, hidden: int, out: int) -> tuple[Any, ...]:
    return feed_forward_arguments((rows,), model, hidden, outputs=out)(draw)


ROWS = {
    "int8_linear": Row(
        bugs=_BUGS,
        sweeps={
            "rows": lambda draw, n: _swept(draw, n, 19, some(n)),
            "inputs": lambda draw, n: _swept(draw, 9, n, 35),
            "outputs": lambda draw, n: _swept(draw, some(n), 19, n),
        },
        small=lambda draw: [],
        large=_large,
        drawn=_drawn,
        sample="silu, residual",
    ),
    "int8_feed_forward": Row(
        bugs=_NETWORK_BUGS,
        sweeps={
            "rows": lambda draw, n: _swept_network(draw, n, 18, 35, some(n)),
            "model size": lambda draw, n: _swept_network(draw, 9, n, 35, 34),
            "hidden size": lambda draw, n: _swept_network(draw, 9, 18, n, 34),
            "outputs": lambda draw, n: _swept_network(draw, some(n), 18, 35, n),
        },
        small=lambda draw: [],
        large=_large_networks,
        drawn=_drawn_network,
        sample="gelu",
    ),
}
