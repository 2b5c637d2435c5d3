"""Every length from 0 past two vectors, and around tiles, at several misalignments."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import check_target, targets

from transformer_fast.specs import OPS
from transformer_fast.specs.attention_cases import arrange
from transformer_fast.specs.spec import Draw
from transformer_fast.testing import Truth, truth_of

pytestmark = pytest.mark.usefixtures("two_threads")

#: Bytes in a vector.
VECTOR = {"baseline": 16, "avx2": 32}
#: Around the panels, tiles and blocks of the kernels, and a prime beyond them all.
FAR = (47, 48, 49, 55, 56, 57, 63, 64, 65, 111, 112, 113, 127, 128, 129, 191, 223, 224, 225, 255,
       256, 257, 511, 513, 521)  # fmt: skip
OFFSETS = (0, 1, 3)


def _some(n: int, least: int = 300) -> int:
    """How many rows of n make enough elements for a fair ratio."""
    return least // max(1, n) + 1


def _layer_norm(draw: Draw, rows: int, columns: int) -> tuple[Any, ...]:
    affine = draw.normal(columns), draw.normal(columns)
    return draw.normal(rows, columns), (columns,), *affine, 1e-5


def _add_layer_norm(draw: Draw, rows: int, columns: int) -> tuple[Any, ...]:
    x, *rest = _layer_norm(draw, rows, columns)
    return x, draw.normal(rows, columns), *rest, 0.0, None


def _linear(draw: Draw, rows: int, inputs: int, outputs: int) -> tuple[Any, ...]:
    x, residual = draw.normal(rows, inputs), draw.normal(rows, outputs)
    return x, draw.weight(outputs, inputs), draw.normal(outputs), "relu", residual


def _feed_forward(draw: Draw, rows: int, model: int, hidden: int, out: int) -> tuple[Any, ...]:
    first = draw.weight(hidden, model), draw.normal(hidden)
    second = draw.weight(out, hidden), draw.normal(out)
    return draw.normal(rows, model), *first, *second, "relu", 0.0, None


def _attention(
    draw: Draw, heads: int, queries: int, keys: int, size: int, value_size: int, **rest: Any
) -> tuple[Any, ...]:
    query, key = draw.normal(1, heads, queries, size), draw.normal(1, heads, keys, size)
    return arrange(query, key, draw.normal(1, heads, keys, value_size), **rest)


def _without_bias(arguments: tuple[Any, ...], place: int) -> tuple[Any, ...]:
    return *arguments[:place], *arguments[place + 1 :]


def _cross_entropy(draw: Draw, rows: int, classes: int) -> tuple[Any, ...]:
    return draw.normal(rows, classes), draw.integers(rows, end=classes), 1, 0.1


def _linear_cross_entropy(draw: Draw, rows: int, inputs: int, classes: int) -> tuple[Any, ...]:
    x, weight, bias = draw.normal(rows, inputs), draw.weight(classes, inputs), draw.normal(classes)
    return x, weight, bias, draw.integers(rows, end=classes), 1, 0.1


#: What is swept: the arguments of an op when one of its sizes is n.
SWEEPS: dict[tuple[str, str], Any] = {
    ("layer_norm", "columns"): lambda d, n: _layer_norm(d, _some(n), n),
    ("layer_norm", "rows"): lambda d, n: _layer_norm(d, n, 37),
    ("add_layer_norm", "columns"): lambda d, n: _add_layer_norm(d, _some(n), n),
    ("add_layer_norm", "rows"): lambda d, n: _add_layer_norm(d, n, 37),
    ("rms_norm", "columns"): lambda d, n: _without_bias(_layer_norm(d, _some(n), n), 3),
    ("rms_norm", "rows"): lambda d, n: _without_bias(_layer_norm(d, n, 37), 3),
    ("add_rms_norm", "columns"): lambda d, n: _without_bias(_add_layer_norm(d, _some(n), n), 4),
    ("add_rms_norm", "rows"): lambda d, n: _without_bias(_add_layer_norm(d, n, 37), 4),
    ("linear", "rows"): lambda d, n: _linear(d, n, 19, _some(n)),
    ("linear", "inputs"): lambda d, n: _linear(d, 9, n, 35),
    ("linear", "outputs"): lambda d, n: _linear(d, _some(n), 19, n),
    ("feed_forward", "rows"): lambda d, n: _feed_forward(d, n, 18, 35, _some(n)),
    ("feed_forward", "model size"): lambda d, n: _feed_forward(d, 9, n, 35, 34),
    ("feed_forward", "hidden size"): lambda d, n: _feed_forward(d, 9, 18, n, 34),
    ("feed_forward", "outputs"): lambda d, n: _feed_forward(d, _some(n), 18, 35, n),
    ("cross_entropy", "classes"): lambda d, n: _cross_entropy(d, 300, n + 1),
    ("cross_entropy", "rows"): lambda d, n: _cross_entropy(d, n, 37),
    ("linear_cross_entropy", "inputs"): lambda d, n: _linear_cross_entropy(d, 300, n, 35),
    ("linear_cross_entropy", "classes"): lambda d, n: _linear_cross_entropy(d, 300, 18, n + 1),
    ("linear_cross_entropy", "rows"): lambda d, n: _linear_cross_entropy(d, n, 18, 35),
    ("attention", "queries"): lambda d, n: _attention(d, 2, n, 21, 9, _some(n)),
    ("attention", "keys"): lambda d, n: _attention(d, 2, 15, n, 9, 11),
    ("attention", "keys, causal"): lambda d, n: _attention(d, 2, 15, n, 9, 11, causal=True),
    ("attention", "head size"): lambda d, n: _attention(d, 2, 15, 21, n, 11),
    ("attention", "value size"): lambda d, n: _attention(d, 2, _some(n), 21, 9, n),
    ("attention", "queries and keys, causal"): lambda d, n: _attention(
        d, 1, n, n, 9, _some(n), causal=True
    ),
    ("attention", "keys, weights"): lambda d, n: _attention(d, 2, 15, n, 9, 11, weights=True),
    ("attention", "key lengths"): lambda d, n: _attention(
        d, 2, 15, 521, 9, 11, lengths=torch.tensor([n])
    ),
    ("attention", "key mask"): lambda d, n: _attention(
        d, 2, 15, n, 9, 11, mask=d.bools(1, 1, 1, n, true=0.7)
    ),
}
ALL = [
    pytest.param(*param.values, what, id=f"{param.id}-{what}", marks=param.marks)
    for op, what in SWEEPS
    for param in targets(op)
    if param.values[0].kernel.backend != "torch"  # PyTorch sweeps its own
]


@functools.cache
def call(op: str, what: str, n: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], Truth]:
    arguments = SWEEPS[op, what](Draw(dtype, "cpu", torch.Generator().manual_seed(n)), n)
    return arguments, truth_of(op, arguments)


@pytest.mark.parametrize(("target", "what"), ALL)
def test_lengths(target, what):
    lanes = VECTOR.get(target.isa, 64) // target.dtype.itemsize
    refused = None
    for n in (*range(2 * lanes + 2), *FAR):
        arguments, truth = call(target.op, what, n, target.dtype)
        refused = target.refusal(arguments)
        if refused:
            continue
        for offset in OFFSETS if n < 2 * lanes + 2 else (1,):
            try:
                check_target(target, arguments, offset, truth)
            except AssertionError as error:
                raise AssertionError(f"{what} = {n}, {offset} off alignment: {error}") from None
    if refused:
        pytest.skip(refused)


def test_every_op_is_swept():
    assert {op for op, _ in SWEEPS} == OPS.keys()
