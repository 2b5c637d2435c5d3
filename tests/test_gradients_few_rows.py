"""Gradients of linear maps and feed-forward networks around the number of rows that decides their
way: up to 48 are read where they lie, more are packed first.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import kernels

from transformer_fast import _native
from transformer_fast.specs import OPS
from transformer_fast.specs.spec import Draw
from transformer_fast.testing import check_gradients

ROWS = (1, 2, 5, 6, 7, 47, 48, 49, 64)
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")

pytestmark = pytest.mark.usefixtures("two_threads")


def check(op: str, *arguments: Any) -> None:
    (kernel,) = (k for k in kernels(op) if k.backend == "cpu")
    check_gradients(op, kernel.run, arguments)


def draw() -> Draw:
    return Draw(torch.float32, "cpu", torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (70, 300), (129, 1), (1, 65)])
@pytest.mark.parametrize("rows", ROWS)
def test_linear(rows: int, inputs: int, outputs: int, float_isa: str) -> None:
    d = draw()
    x, weight, bias = d.normal(rows, inputs), d.weight(outputs, inputs), d.normal(outputs)
    check("linear", x, weight, bias, ACTIVATIONS[rows % 4], None)
    wide = d.normal(rows, inputs + 9)[:, 4:-5]
    transposed = d.weight(inputs, outputs).t()
    check("linear", wide, transposed, None, None, d.normal(rows, outputs))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", ROWS)
def test_feed_forward(rows: int, activation: str, float_isa: str) -> None:
    d = draw()
    x, weight1, bias1 = d.normal(rows, 70), d.weight(130, 70), d.normal(130)
    weight2, bias2 = d.weight(33, 130), d.normal(33)
    for p in (0.0, 0.3):
        seed = d.seed() if p else None
        check("feed_forward", x, weight1, bias1, weight2, bias2, activation, p, seed)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [7, 300])
@pytest.mark.parametrize("wanted", range(5))
def test_each_gradient_alone(wanted: int, rows: int, activation: str) -> None:
    """Asking for one gradient only gives the same one."""
    if _native.module is None:
        pytest.skip(_native.why_not or "needs the native module")
    d = draw()
    tensors = [
        d.normal(rows, 70),
        d.weight(130, 70),
        d.normal(130),
        d.weight(33, 130),
        d.normal(33),
    ]
    (kernel,) = (k for k in kernels("feed_forward") if k.backend == "cpu")

    def found(*which: int) -> list[torch.Tensor]:
        inputs = [t.clone().requires_grad_(i in which) for i, t in enumerate(tensors)]
        result = kernel.run(*inputs, activation, 0.0, None)
        return list(torch.autograd.grad(result.sum(), [inputs[i] for i in which]))

    assert torch.equal(found(wanted)[0], found(*range(5))[wanted])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_slopes_far_out(activation: str, float_isa: str) -> None:
    """1 to the right and 0 to the left, however far, and in between torch's in fp64."""
    (kernel,) = (k for k in kernels("linear") if k.backend == "cpu")
    far = torch.tensor([100.0, 1e4, 1e10, 7e12, 1e20, 1e38])
    x = torch.cat([far, -far, torch.linspace(-14, 14, 2001)])[:, None].requires_grad_()
    y = kernel.run(x, torch.ones(1, 1), None, activation, None)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(slope[:6], torch.ones(6, 1))
    assert torch.equal(slope[6:12], torch.zeros(6, 1))
    true = x.detach().double().requires_grad_()
    exact = OPS["linear"].reference(true, torch.ones(1, 1).double(), None, activation, None)
    (wanted,) = torch.autograd.grad(exact.sum(), true)
    torch.testing.assert_close(slope[12:], wanted[12:].float(), rtol=0.0, atol=3e-7)
