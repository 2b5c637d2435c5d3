"""Test data of cross_entropy and linear_cross_entropy; see `Row`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from transformer_fast.specs.cross_entropy import _linear_loss, _loss

from . import LARGE, MIDDLE, SMALL, VALUES, Array, Drawing, Drawn, Grads, Row, at, size_of, wrong
from .linear import defined as product


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


def _defined(
    x: Array, target: Any, ignored: int, smoothing: float
) -> tuple[Array, Callable[..., Grads]]:
    """The returned function takes the gradient of the losses, and the rounding unit of log p and p."""
    shape = x.shape
    x, target = x.reshape(-1, shape[-1]), target.reshape(-1)
    rows, classes = x.shape
    losses, probable = np.zeros(rows), np.full((rows, classes), -np.inf)
    wanted = np.zeros((rows, classes))
    for row in range(rows):
        if target[row] == ignored:
            continue
        line, place = x[row], int(target[row])
        with np.errstate(invalid="ignore"):
            top = line.max()
            log_p = line - top - np.log(np.exp(line - top).sum())
            losses[row] = -log_p[place]
            if smoothing:
                losses[row] = (1 - smoothing) * -log_p[place] - smoothing * log_p.mean()
            probable[row], wanted[row] = log_p, smoothing / classes
        wanted[row, place] += 1 - smoothing

    def back(dl: Array, unit: float = 0.0) -> Grads:
        p = np.exp(probable)
        with np.errstate(invalid="ignore"):
            off = np.where(p > 0.0, p * unit * np.maximum(1.0, -probable), 0.0)
        return {"input": ((p + off - wanted) * dl.reshape(-1, 1)).reshape(shape)}

    return losses.reshape(shape[:-1]), back


def _linear_defined(
    x: Array, weight: Array, bias: Array | None, target: Any, ignored: int, smoothing: float
) -> tuple[Array, Callable[[Array], Grads]]:
    logits, back_of_linear = product(x, weight, bias)
    losses, back_of_loss = _defined(logits, target, ignored, smoothing)

    def back(dl: Array, unit: float = 0.0) -> Grads:
        return back_of_linear(back_of_loss(dl, unit)["input"])  # type: ignore[arg-type]

    return losses, back


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


def _in_order(orders: Any, x: Tensor, target: Tensor, ignored: int, smoothing: float) -> Tensor:
    classes = orders.order(x.shape[1])
    target = _renamed(target, ignored, classes)
    result: Tensor = orders.reference(x[:, classes], target, -100, smoothing)
    return result


def _linear_in_order(
    orders: Any, x: Tensor, w: Tensor, b: Any, target: Tensor, ignored: int, smoothing: float
) -> Tensor:
    rows, of_k, classes = (orders.order(n) for n in (*x.shape, w.shape[0]))
    target = _renamed(target, ignored, classes)[rows]
    losses: Tensor = orders.reference(
        *(x[rows][:, of_k], w[classes][:, of_k], at(b, classes), target, -100, smoothing)
    )
    return losses[rows.argsort()]


def _renamed(target: Tensor, ignored: int, classes: Tensor) -> Tensor:
    place = classes.argsort()[target.clamp(0, len(classes) - 1)]
    return torch.where(target == ignored, -100, place)


def _logit_terms(arguments: tuple[Any, ...]) -> float:
    """Returns the largest sum of |p - t| |W| over classes, or of |p - t| |x| over rows.

    If logits are nearly equal and the smoothing is 1, these differences nearly vanish.
    """
    x, weight = (size_of(given.double()) for given in arguments[:2])
    return max(2.0 * weight, len(arguments[0]) * x)


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
        defined=_defined,
        in_order=_in_order,
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
        defined=_linear_defined,
        in_order=_linear_in_order,
        sample="bias",
        gradient_terms=_logit_terms,
    ),
}
