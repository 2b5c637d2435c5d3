"""Gradients of linear maps and feed-forward networks, of every dtype.

Up to 48 rows of fp32 are read where they lie, more are packed first. Panels of half types hold rows
by twos, and so many rows that they do not fit are worked on in parts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import BUILDS, EVERY_BUILD, kernel_of

from transformer_fast import _native
from transformer_fast.specs import OPS
from transformer_fast.specs.spec import Draw
from transformer_fast.testing import check_gradients, nan_memory

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
HALF_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
TYPES = {torch.float32: "fp32", **HALF_TYPES}
#: What decides a kernel's way: few rows, odd ones, and more than a block has.
ROWS = {
    torch.float32: (1, 2, 5, 6, 7, 47, 48, 49, 64, 257),
    **dict.fromkeys(HALF_TYPES, (1, 23, 24, 31, 32, 33, 45, 256, 257)),
}
DTYPES = pytest.mark.parametrize("dtype", TYPES, ids=TYPES.values())
HALVES = pytest.mark.parametrize("dtype", HALF_TYPES, ids=HALF_TYPES.values())
EVERY_BUILD_AND_ROWS = pytest.mark.parametrize(
    ("dtype", "isa", "rows"), [(d, i, n) for d, i in BUILDS for n in ROWS[d]], indirect=["isa"]
)

pytestmark = pytest.mark.usefixtures("two_threads")
needs_native = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))


def check(op: str, *arguments: Any) -> None:
    with nan_memory():
        check_gradients(op, kernel_of(op).run, arguments)


def draw(dtype: torch.dtype) -> Draw:
    return Draw(dtype, "cpu", torch.Generator().manual_seed(0))


def network(d: Draw, rows: int) -> list[torch.Tensor]:
    """An input, and weights and biases of sizes that no panel has."""
    first = d.normal(rows, 70), d.weight(130, 70), d.normal(130)
    return [*first, d.weight(33, 130), d.normal(33)]


@EVERY_BUILD_AND_ROWS
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (70, 300), (129, 1), (1, 65)])
def test_linear(rows: int, inputs: int, outputs: int, dtype: torch.dtype, isa: str) -> None:
    d = draw(dtype)
    x, weight, bias = d.normal(rows, inputs), d.weight(outputs, inputs), d.normal(outputs)
    check("linear", x, weight, bias, ACTIVATIONS[rows % 4], None)
    wide = d.normal(rows, inputs + 9)[:, 4:-5]
    transposed = d.weight(inputs, outputs).t()
    check("linear", wide, transposed, None, None, d.normal(rows, outputs))


@EVERY_BUILD_AND_ROWS
def test_feed_forward(rows: int, dtype: torch.dtype, isa: str) -> None:
    d = draw(dtype)
    tensors = network(d, rows)
    for activation in ACTIVATIONS:
        for p in (0.0, 0.3):
            check("feed_forward", *tensors, activation, p, d.seed() if p else None)


def test_linear_in_parts(isa: str) -> None:
    d = draw(torch.bfloat16)
    x, weight = d.normal(600, 16500), d.weight(7, 16500)
    check("linear", x, weight, d.normal(7), None, None)


def test_feed_forward_in_parts() -> None:
    d = draw(torch.bfloat16)
    x, weight1, bias1 = d.normal(600, 9), d.weight(16500, 9), d.normal(16500)
    weight2, bias2 = d.weight(5, 16500), d.normal(5)
    check("feed_forward", x, weight1, bias1, weight2, bias2, "gelu", 0.4, d.seed())


def test_many_outputs() -> None:
    d = draw(torch.bfloat16)
    check("linear", d.normal(40, 33), d.weight(9000, 33), d.normal(9000), None, None)


@EVERY_BUILD
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize(
    "sizes", [(0, 8, 5), (5, 0, 3), (5, 4, 0), (300, 0, 3), (300, 4, 0), (0, 0, 0)], ids=str
)
def test_nothing_of_a_linear_map(
    sizes: tuple[int, int, int], activation: str | None, dtype: torch.dtype, isa: str
) -> None:
    rows, inputs, outputs = sizes
    d = draw(dtype)
    x, weight = d.normal(rows, inputs), d.normal(outputs, inputs)
    check("linear", x, weight, d.normal(outputs), activation, None)


@EVERY_BUILD
@pytest.mark.parametrize(
    "sizes", [(0, 8, 5, 4), (50, 0, 3, 4), (50, 4, 0, 4), (50, 4, 5, 0), (5, 4, 5, 0)], ids=str
)
def test_nothing_of_a_feed_forward_network(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, isa: str
) -> None:
    rows, inputs, hidden, outputs = sizes
    d = draw(dtype)
    x, weight1, bias1 = d.normal(rows, inputs), d.normal(hidden, inputs), d.normal(hidden)
    weight2, bias2 = d.normal(outputs, hidden), d.normal(outputs)
    check("feed_forward", x, weight1, bias1, weight2, bias2, "gelu", 0.0, None)


@EVERY_BUILD
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_comes_through(value: float, dtype: torch.dtype, isa: str) -> None:
    d = draw(dtype)
    x, weight1, weight2 = d.normal(50, 40), d.weight(60, 40), d.weight(40, 60)
    x[3, 5] = value
    tensors = [t.requires_grad_() for t in (x, weight1, weight2)]
    grad = d.normal(50, 40)
    ours = kernel_of("feed_forward").run(x, weight1, None, weight2, None, "relu", 0.0, None)
    plain = torch.relu(x @ weight1.t()) @ weight2.t()
    found = (torch.autograd.grad(result, tensors, grad) for result in (ours, plain))
    for got, expected in zip(*found, strict=True):
        assert torch.equal(got.isfinite(), expected.isfinite())


@HALVES
@pytest.mark.parametrize("rows", [9, 15, 64, 256, 257])
def test_panels_packed_as_they_are_multiplied(rows: int, dtype: torch.dtype, isa: str) -> None:
    """As by panels that were packed before, bit by bit: outputs and the input's gradient."""
    ops = torch.ops.transformer_fast
    generator = torch.Generator().manual_seed(rows)
    for n, k in ((128, 67), (131, 256), (520, 130)):
        x, weight, bias, grad = (
            torch.randn(shape, generator=generator).to(dtype)
            for shape in ((rows, k), (n, k), (n,), (rows, n))
        )
        wide = torch.nn.functional.pad(weight, (3, 5))[:, 3 : 3 + k]  # rows that are further apart
        packed = ops.cpu_pack_weight(weight, rows)
        turned = weight.t().contiguous()
        expected = ops.linear_packed.cpu(x, weight, packed, bias, None, 2)
        by_columns = ops.linear_packed.cpu(
            grad, turned, ops.cpu_pack_weight(turned, rows), None, None, 0
        )
        for w in (weight, wide):
            with nan_memory():
                assert torch.equal(ops.linear_packed.cpu(x, w, None, bias, None, 2), expected)
                found = ops.linear_backward.cpu(grad, x, w, None, 0, True, False, False)[0]
            assert torch.equal(found, by_columns)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_slopes_far_out(activation: str, float_isa: str) -> None:
    """1 to the right and 0 to the left, however far, and in between torch's in fp64."""
    far = torch.tensor([100.0, 1e4, 1e10, 7e12, 1e20, 1e38])
    x = torch.cat([far, -far, torch.linspace(-14, 14, 2001)])[:, None].requires_grad_()
    y = kernel_of("linear").run(x, torch.ones(1, 1), None, activation, None)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(slope[:6], torch.ones(6, 1))
    assert torch.equal(slope[6:12], torch.zeros(6, 1))
    true = x.detach().double().requires_grad_()
    exact = OPS["linear"].reference(true, torch.ones(1, 1).double(), None, activation, None)
    (wanted,) = torch.autograd.grad(exact.sum(), true)
    torch.testing.assert_close(slope[12:], wanted[12:].float(), rtol=0.0, atol=3e-7)
