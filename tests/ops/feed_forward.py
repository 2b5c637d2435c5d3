"""Test data of feed_forward; see `Row`."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from hypothesis import strategies as st

from transformer_fast import reference
from transformer_fast.specs.feed_forward import _feed_forward

from . import MIDDLE, SMALL, Drawing, Drawn, Row, some, wrong
from .linear import ACTIVATIONS, near_a_kink

_wrong = functools.partial(wrong, "feed_forward")
_BUGS = {
    "missing first bias": ("relu", _wrong(bias1=None)),
    "missing second bias": ("relu", _wrong(bias2=None)),
    "no activation": ("relu", _wrong(activation=lambda call: lambda hidden: hidden)),
    "gelu by tanh": ("gelu", _wrong(activation="gelu_tanh")),
    "last hidden value dropped": (
        "primes",
        _wrong(
            weight1=lambda call: call.weight1[:-1],
            bias1=lambda call: call.bias1[:-1],
            weight2=lambda call: call.weight2[:, :-1],
        ),
    ),
    "dropout on the result": (
        "dropout",
        _wrong(
            lambda call, y: reference.dropout(y, call.dropout_p, call.seed),
            dropout_p=0.0,
            seed=None,
        ),
    ),
    "dropout forgotten": ("dropout", _wrong(dropout_p=0.0)),
}


@st.composite
def _drawn(draw: Any, dtype: torch.dtype) -> Drawn:
    numbers = Drawing(draw, dtype)
    m = numbers.size(SMALL, MIDDLE, (0, 127, 129))
    f = numbers.size(SMALL, MIDDLE, (0, 127, 129, 257))
    out = m if draw(st.booleans()) else numbers.size(SMALL, MIDDLE)
    lead = numbers.lead(2_000_000 // max(1, f * (m + out)))
    x = numbers.valued(*lead, m)
    weight1 = numbers.normal(f, m, scale=1.0 / math.sqrt(max(1, m)))
    weight2 = numbers.normal(out, f, scale=1.0 / math.sqrt(max(1, f)))
    bias1 = numbers.normal(f) if draw(st.booleans()) else None
    bias2 = numbers.normal(out) if draw(st.booleans()) else None
    act = draw(st.sampled_from(ACTIVATIONS[1:]))
    p = draw(st.sampled_from((0.0, 0.0, 0.1, 0.5, 1.0)))
    seed = numbers.integers(end=2**62) if 0.0 < p < 1.0 else None
    grads = draw(st.booleans()) and x.numel() > 0 and f > 0
    if grads and act == "relu":
        grads = not near_a_kink(x, weight1, bias1)
    x = numbers.laid_out(x)
    weight1, weight2 = (
        numbers.laid_out(weight1),
        numbers.laid_out(weight2),
    )
    names = ("input", "weight1", "bias1", "weight2", "bias2") if grads else ()
    return Drawn((x, weight1, bias1, weight2, bias2, act, p, seed), names, draw(st.integers(0, 3)))


def _small(draw: Any) -> list[tuple[Any, ...]]:
    kinds = (("relu", 0.0), ("gelu", 0.3), ("gelu_tanh", 0.0), ("silu", 0.5))
    return [_feed_forward((3,), 2, 4, activation=name, dropout_p=p)(draw) for name, p in kinds]


# One thread works on blocks of rows from about 60 rows on; n threads do from about n times that.
def _large(draw: Any) -> list[tuple[Any, ...]]:
    rows = (1, 40, 60, 100, 170, 500)
    found = [_feed_forward((n,), 90, 300, activation="gelu")(draw) for n in rows]
    return [*found, _feed_forward((900,), 70, 300, activation="silu", dropout_p=0.3)(draw)]


def _swept(
    draw: Any, rows: int, model: int, hidden: int, out: int, p: float = 0.0
) -> tuple[Any, ...]:
    return _feed_forward((rows,), model, hidden, outputs=out, dropout_p=p)(draw)


ROWS = {
    "feed_forward": Row(
        bugs=_BUGS,
        sweeps={
            "rows": lambda draw, n: _swept(draw, n, 18, 35, some(n)),
            "model size": lambda draw, n: _swept(draw, 9, n, 35, 34),
            "hidden size": lambda draw, n: _swept(draw, 9, 18, n, 34),
            "hidden size, dropout": lambda draw, n: _swept(draw, 9, 18, n, 34, 0.3),
            "outputs": lambda draw, n: _swept(draw, some(n), 18, 35, n),
        },
        small=_small,
        large=_large,
        drawn=_drawn,
        sample="dropout",
    )
}
