"""Test data of cross_entropy and linear_cross_entropy; see `Row`."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from transformer_fast.specs.cross_entropy import _linear_loss, _loss

from . import LARGE, MIDDLE, SMALL, VALUES, Drawing, Drawn, Row, wrong


def _counted(call: Any) -> Tensor:
    return call.target.masked_fill(call.target == call.ignore_index, 0)


def _next(call: Any) -> Tensor:
    ignored = call.target == call.ignore_index
    return torch.where(ignored, call.target, (call.target + 1) % call.input.shape[1])


_wrong = functools.partial(wrong, "cross_entropy")
_BUGS = {
    "smoothing forgotten": ("smoothing", _wrong(label_smoothing=0.0)),
    "smoothing over the other classes": (
        "smoothing",
        _wrong(label_smoothing=lambda c: c.label_smoothing / (1 - 1 / c.input.shape[1])),
    ),
    "padding counts": ("padding", _wrong(target=_counted)),
    "next class": ("plain", _wrong(target=_next)),
    "last class left out": (
        "smoothing",
        _wrong(input=lambda c: torch.cat((c.input[:, :-1], c.input[:, :1] * 0.0 - 1e4), dim=1)),
    ),
    "1e-4": ("plain", _wrong(lambda call, losses: losses * (1 + 1e-4))),
}
_linear_wrong = functools.partial(wrong, "linear_cross_entropy")
_LINEAR_BUGS = {
    "no bias": ("bias", _linear_wrong(bias=None)),
    "padding counts": ("primes", _linear_wrong(target=_counted)),
    "second part of the classes left out": (
        "more classes than one part",
        _linear_wrong(
            weight=lambda call: call.weight[:4096],
            bias=lambda call: call.bias[:4096],
            target=lambda call: call.target.clamp(max=4095),
        ),
    ),
}


@st.composite
def _drawn(draw: Any, dtype: torch.dtype, with_linear: bool) -> Drawn:
    numbers = Drawing(draw, dtype)
    rows = numbers.size((0, *SMALL), (31, 33, 64, 100))
    classes = numbers.size(SMALL, MIDDLE, LARGE, (1000, 1025))
    ignored = draw(st.sampled_from((-100, 0, 1)))
    smoothing = draw(st.sampled_from((0.0, 0.0, 0.1, 1.0)))
    target = numbers.integers(rows, end=classes)
    if draw(st.booleans()):
        target = torch.where(numbers.bools(rows, true=0.3), ignored, target)
    grads = draw(st.booleans()) and rows > 0
    kind = numbers.kind({**VALUES, "scores": 3, "hidden": 1})
    if with_linear:
        k = numbers.size(SMALL, MIDDLE)
        x = numbers.of_kind(kind if kind in VALUES and kind != "large" else "normal", rows, k)
        weight = numbers.normal(classes, k, scale=draw(st.sampled_from((0.2, 1.0, 3.0))))
        bias = numbers.normal(classes) if draw(st.booleans()) else None
        x, weight = numbers.laid_out(x), numbers.laid_out(weight)
        given: tuple[Any, ...] = (x, weight, bias, target, ignored, smoothing)
        return Drawn(given, ("input", "weight", "bias") if grads else (), draw(st.integers(0, 3)))
    if kind == "scores":
        x = numbers.normal(rows, classes, scale=draw(st.sampled_from((30.0, 100.0, 300.0, 5e3))))
    elif kind == "hidden":
        # Some classes have probability 0; the target never has.
        x = numbers.normal(rows, classes)
        x = torch.where(numbers.bools(rows, classes, true=0.3), -math.inf, x)
        real = target.clamp(0, classes - 1)
        x.scatter_(1, real[:, None], 0.5)
        smoothing = 0.0
    else:
        x = numbers.of_kind(kind, rows, classes)
    if draw(st.booleans()) and rows:
        x = torch.where((target == ignored)[:, None], numbers.one_of(math.nan, math.inf), x)
    x = numbers.laid_out(x)
    if x.stride()[-1:] == (0,):
        x = x.contiguous()
    given = (x, target, ignored, smoothing)
    return Drawn(given, ("input",) if grads else (), draw(st.integers(0, 3)))


def _swept(draw: Any, rows: int, classes: int) -> tuple[Any, ...]:
    return draw.normal(rows, classes), draw.integers(rows, end=classes), 1, 0.1


def _small(draw: Any) -> list[tuple[Any, ...]]:
    return [(draw.normal(3, 4), torch.tensor([2, 1, 3]), 1, s) for s in (0.0, 0.2)]


def _linear_small(draw: Any) -> list[tuple[Any, ...]]:
    made = [_linear_loss(3, 2, 4, bias=bias)(draw) for bias in (False, True)]
    return [(*tensors[:3], torch.tensor([2, 1, 3]), 1, 0.2) for tensors in made]


def _large(draw: Any) -> list[tuple[Any, ...]]:
    return [_linear_loss(n, 90, 130, bias=False, smoothing=0.0)(draw) for n in (40, 700)]


ROWS = {
    "cross_entropy": Row(
        bugs=_BUGS,
        sweeps={
            "classes": lambda draw, n: _swept(draw, 300, n + 1),
            "rows": lambda draw, n: _swept(draw, n, 37),
        },
        small=_small,
        large=lambda draw: [_loss(700, 130, smoothing=0.1, ignored=0.2)(draw)],
        drawn=lambda dtype: _drawn(dtype, False),
        sample="padding",
    ),
    "linear_cross_entropy": Row(
        bugs=_LINEAR_BUGS,
        sweeps={
            "inputs": lambda draw, n: _linear_loss(300, n, 35)(draw),
            "classes": lambda draw, n: _linear_loss(300, 18, n + 1)(draw),
            "rows": lambda draw, n: _linear_loss(n, 18, 35)(draw),
        },
        small=_linear_small,
        large=_large,
        drawn=lambda dtype: _drawn(dtype, True),
        sample="bias",
    ),
}
