"""Test data of the norms, with and without a residual; see `Row`."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from transformer_fast import reference
from transformer_fast.specs.layer_norm import _added, _plain, _without_bias

from . import LARGE, MIDDLE, SMALL, Drawing, Drawn, Row, some, wrong


def by_formula(bug: str) -> Any:
    """Returns layer_norm with a bug in its formula."""

    def run(x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Tensor:
        dims = tuple(range(-len(shape), 0))
        tail = bug == "tail column dropped from the statistics"
        mean = (x[..., :-1] if tail else x).mean(dim=dims, keepdim=True)
        centred = x - mean
        variance = (centred * centred).mean(dim=dims, keepdim=True)
        if bug == "variance by E[x^2] - E[x]^2":
            variance = (x * x).mean(dim=dims, keepdim=True) - mean * mean
        if bug == "unbiased variance":
            variance = x.var(dim=dims, keepdim=True)
        scale = torch.rsqrt(variance + eps)
        if bug == "eps outside the root":
            scale = 1 / (variance.sqrt() + eps)
        if bug == "reciprocal root to 12 bits":
            scale = scale * (1 + 2.0**-13)
        y = centred * scale
        y = y if weight is None else y * weight
        return (y if bias is None else y + bias).to(x.dtype)

    return run


FORMULA_BUGS = {
    "tail column dropped from the statistics": "rows of 64",
    "variance by E[x^2] - E[x]^2": "values far from zero",
    "unbiased variance": "rows of 64",
    "eps outside the root": "values of the size of eps",
    "reciprocal root to 12 bits": "rows of 64",
}
_wrong = functools.partial(wrong, "layer_norm")
_BUGS = {
    **{bug: (case, by_formula(bug)) for bug, case in FORMULA_BUGS.items()},
    "no eps": ("values of the size of eps", _wrong(eps=0.0)),
    "weight + 1": ("rows of 64", _wrong(weight=lambda call: call.weight + 1)),
    "missing weight": ("rows of 64", _wrong(weight=None)),
    "missing bias": ("rows of 64", _wrong(bias=None)),
    "last row not written": (
        "rows of 64", _wrong(lambda call, y: torch.cat((y[:-1], y[-1:] * math.nan))),
    ),
    "last column zero": (
        "prime columns", _wrong(lambda call, y: torch.cat((y[..., :-1], y[..., -1:] * 0), dim=-1)),
    ),
}  # fmt: skip


def _of_input(call: Any, y: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    bias = [call.bias] if hasattr(call, "bias") else []
    norm = reference.layer_norm if bias else reference.rms_norm
    return norm(call.input, call.normalized_shape, call.weight, *bias, call.eps), total


def _dropping_sum(call: Any, y: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    return y, reference.dropout(call.residual + call.input, call.dropout_p, call.seed)


def _not_rescaled(call: Any, y: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    return y, call.residual + (total - call.residual) * (1 - call.dropout_p)


_wrong = functools.partial(wrong, "add_layer_norm")
_SUM_BUGS = {
    "sum is the input": ("rows of 64", _wrong(lambda call, y, total: (y, call.input))),
    "norm of the input alone": ("rows of 64", _wrong(_of_input)),
    "dropout on the sum": ("dropout", _wrong(_dropping_sum)),
    "dropout not rescaled": ("dropout", _wrong(_not_rescaled)),
    "another seed": ("dropout", _wrong(seed=lambda call: call.seed + 1)),
}
_wrong = functools.partial(wrong, "rms_norm")
_RMS_BUGS = {
    "the mean is subtracted": (
        "rows of 64", _wrong(input=lambda call: call.input - call.input.mean(-1, keepdim=True)),
    ),
    "no eps": ("values of the size of eps", _wrong(eps=0.0)),
    "sum of squares": ("rows of 64", _wrong(lambda call, y: y / math.prod(call.normalized_shape) ** 0.5)),
    "missing weight": ("rows of 64", _wrong(weight=None)),
}  # fmt: skip
_RMS_SUM_BUGS = {
    "norm of the input alone": ("rows of 64", wrong("add_rms_norm", _of_input)),
    "dropout on the sum": ("dropout", wrong("add_rms_norm", _dropping_sum)),
}


@st.composite
def _drawn(draw: Any, dtype: torch.dtype, add: bool, is_rms: bool) -> Drawn:
    numbers = Drawing(draw, dtype)
    columns = numbers.size(SMALL, MIDDLE, LARGE, (0, 768, 1000, 1025))
    lead = numbers.lead(60_000 // max(1, columns))
    shape: tuple[int, ...] = (columns,)
    if draw(st.integers(0, 5)) == 5 and columns:
        shape = (2, columns)
    x = numbers.valued(*lead, *shape, denormal=dtype != torch.bfloat16)
    eps = draw(st.sampled_from((1e-5, 1e-6, 1e-12, 0.1)))
    weight = bias = None
    if draw(st.booleans()):
        weight = numbers.laid_out(numbers.normal(*shape))
    if not is_rms and draw(st.booleans()):
        bias = numbers.normal(*shape)
    biased = () if is_rms else (bias,)
    x = numbers.laid_out(x)
    offset, grads = draw(st.integers(0, 3)), draw(st.booleans())
    if not add:
        given: tuple[Any, ...] = (x, shape, weight, *biased, eps)
        names: tuple[str, ...] = ("input", "weight", "bias")
    else:
        p = draw(st.sampled_from((0.0, 0.0, 0.1, 0.5, 0.9, 1.0)))
        seed = numbers.integers(end=2**62) if 0.0 < p < 1.0 else None
        residual = numbers.laid_out(numbers.valued(*x.shape))
        given = (x, residual, shape, weight, *biased, eps, p, seed)
        names = ("input", "residual", "weight", "bias")
    names = tuple(name for name in names if not (is_rms and name == "bias"))
    return Drawn(given, names if grads and x.numel() else (), offset)


def _rms(row: Row, **changes: Any) -> Row:
    """Returns the row with the same calls, without a bias."""

    def without_biases(make: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        return lambda draw: [_without_bias(one) for one in make(draw)]

    sweeps = {
        what: lambda draw, n, make=make: _without_bias(make(draw, n))
        for what, make in row.sweeps.items()
    }
    small, large = without_biases(row.small), without_biases(row.large)
    return dataclasses.replace(row, sweeps=sweeps, small=small, large=large, **changes)


_NORM = Row(
    bugs=_BUGS,
    sweeps={
        "columns": lambda draw, n: _plain(some(n), n)(draw),
        "rows": lambda draw, n: _plain(n, 37)(draw),
    },
    small=lambda draw: [_plain(3, 4)(draw)],
    large=lambda draw: [_plain(900, 130)(draw)],
    drawn=lambda dtype: _drawn(dtype, False, False),
    sample="three dimensions",
)
_SUM = Row(
    bugs=_SUM_BUGS,
    sweeps={
        "columns": lambda draw, n: _added(_plain(some(n), n))(draw),
        "columns, dropout": lambda draw, n: _added(_plain(some(n), n), 0.4)(draw),
        "rows": lambda draw, n: _added(_plain(n, 37))(draw),
    },
    small=lambda draw: [_added(_plain(3, 4), p)(draw) for p in (0.0, 0.4)],
    large=lambda draw: [_added(_plain(900, 130))(draw)],
    drawn=lambda dtype: _drawn(dtype, True, False),
    sample="dropout",
)
ROWS = {
    "layer_norm": _NORM,
    "add_layer_norm": _SUM,
    "rms_norm": _rms(
        _NORM,
        bugs=_RMS_BUGS,
        # In rows of one element, some of PyTorch's second derivatives are exactly 0.
        second_derivatives=False,
        drawn=lambda dtype: _drawn(dtype, False, True),
    ),
    "add_rms_norm": _rms(
        _SUM,
        bugs=_RMS_SUM_BUGS,
        drawn=lambda dtype: _drawn(dtype, True, True),
    ),
}
