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


def alone(op: str, tensors: list[torch.Tensor], rest: tuple[Any, ...], wanted: int) -> None:
    """Asking for one gradient only gives the same one."""
    kernel = kernel_of(op)

    def found(*which: int) -> list[torch.Tensor]:
        inputs = [t.clone().requires_grad_(i in which) for i, t in enumerate(tensors)]
        with nan_memory():
            result = kernel.run(*inputs, *rest)
            return list(torch.autograd.grad(result.float().sum(), [inputs[i] for i in which]))

    assert torch.equal(found(wanted)[0], found(*range(len(tensors)))[wanted])


@needs_native
@DTYPES
@pytest.mark.parametrize("rows", [7, 77, 300])
@pytest.mark.parametrize("wanted", range(5))
def test_each_gradient_of_feed_forward_alone(wanted: int, rows: int, dtype: torch.dtype) -> None:
    d = draw(dtype)
    tensors = network(d, rows)
    for activation in ACTIVATIONS:
        for p in (0.0, 0.3):
            alone("feed_forward", tensors, (activation, p, d.seed() if p else None), wanted)


@needs_native
@DTYPES
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("wanted", range(3))
def test_each_gradient_of_linear_alone(
    wanted: int, activation: str | None, dtype: torch.dtype
) -> None:
    alone("linear", network(draw(dtype), 300)[:3], (activation, None), wanted)


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
@pytest.mark.parametrize("rows", [20, 60])
def test_upstream_gradients_of_any_layout(rows: int, dtype: torch.dtype, isa: str) -> None:
    d = draw(dtype)
    x, weight1, weight2 = d.normal(2, rows, 24), d.weight(40, 24), d.weight(24, 40)
    tensors = [t.requires_grad_() for t in (x, weight1, weight2)]
    results = [
        kernel_of("linear").run(x, weight1[:24], None, None, None),
        kernel_of("linear").run(x, weight1[:24], None, "relu", None),
        kernel_of("feed_forward").run(x, weight1, None, weight2, None, "relu", 0.0, None),
    ]
    upstream = d.normal(2, rows, 24)
    for grad in (
        upstream[:1].expand(2, rows, 24),
        upstream[:, :, :1].expand(2, rows, 24),
        upstream.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([upstream, upstream], -1)[..., 0],
    ):
        for result in results:
            found = [
                torch.autograd.grad(result, tensors, given, retain_graph=True, allow_unused=True)
                for given in (grad, grad.contiguous())
            ]
            for one, two in zip(*found, strict=True):
                assert (one is None and two is None) or torch.equal(one, two)


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


@needs_native
@DTYPES
def test_same_bits_with_one_thread(dtype: torch.dtype) -> None:
    d = draw(dtype)
    tensors = [d.normal(1000, 70), d.weight(700, 70), d.normal(700), d.weight(333, 700)]
    tensors = [t.requires_grad_() for t in tensors]

    def found() -> list[torch.Tensor]:
        result = kernel_of("feed_forward").run(*tensors, None, "silu", 0.2, torch.tensor(7))
        return [result, *torch.autograd.grad(result.float().sum(), tensors)]

    first, second = found(), found()
    torch.set_num_threads(1)
    for a, b, c in zip(first, second, found(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


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
