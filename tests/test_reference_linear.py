"""The references of linear and feed_forward: examples by hand, torch's ops."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from transformer_fast.reference import dropout, feed_forward, linear
from transformer_fast.specs import OPS

DOUBLE = torch.float64
TORCH_ACTIVATIONS = {
    None: lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.GELU(),
    "gelu_tanh": torch.nn.GELU("tanh"),
    "silu": torch.nn.SiLU(),
}


def double(*values):
    return torch.tensor(values, dtype=DOUBLE)


def test_by_hand():
    y = linear(double(1, 2), double([3, 4], [5, 6], [-7, 1]), double(10, 20, 30), None, None)
    assert torch.equal(y, double(21, 37, 25))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, (1, -1)),
        ("relu", (1, 0)),
        # x Phi(x), Phi(1) = 0.8413447460685429
        ("gelu", (0.8413447460685429, -0.15865525393145707)),
        # x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
        ("gelu_tanh", (0.8411919906082768, -0.15880800939172324)),
        # x / (1 + exp(-x))
        ("silu", (0.7310585786300049, -0.2689414213699951)),
        (torch.square, (1, 1)),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_activations_by_hand(name, expected):
    y = linear(double(1), double([1], [-1]), None, name, None)
    torch.testing.assert_close(y, double(*expected))


def test_residual_comes_after_the_activation():
    y = linear(double(1), double([-5]), double(2), "relu", double(7))
    assert torch.equal(y, double(7))


def test_feed_forward_by_hand():
    weight1, bias1 = double([1, 1], [1, -1], [-1, 0]), double(0, 0, 1)
    weight2, bias2 = double([1, 10, 100], [2, 0, -1]), double(0.5, 0)
    # hidden relu(5, -1, -1) = (5, 0, 0)
    y = feed_forward(double(2, 3), weight1, bias1, weight2, bias2, "relu", 0.0, None)
    assert torch.equal(y, double(5.5, 10))


@pytest.mark.parametrize("case", OPS["linear"].cases, ids=str)
def test_linear_agrees_with_torch(case, generator):
    x, weight, bias, activation, residual = case.build(DOUBLE, "cpu", generator)
    expected = TORCH_ACTIVATIONS.get(activation, activation)(F.linear(x, weight, bias))
    expected = expected if residual is None else expected + residual
    torch.testing.assert_close(linear(x, weight, bias, activation, residual), expected)


@pytest.mark.parametrize("case", OPS["feed_forward"].cases, ids=str)
def test_feed_forward_agrees_with_torch(case, generator):
    x, w1, b1, w2, b2, activation, p, seed = case.build(DOUBLE, "cpu", generator)
    hidden = TORCH_ACTIVATIONS.get(activation, activation)(F.linear(x, w1, b1))
    expected = F.linear(dropout(hidden, p, seed), w2, b2)
    torch.testing.assert_close(feed_forward(x, w1, b1, w2, b2, activation, p, seed), expected)


def test_no_inputs_give_the_bias():
    bias = torch.randn(4)
    y = linear(torch.empty(3, 0), torch.empty(4, 0), bias, None, None)
    assert torch.equal(y, bias.expand(3, 4))


@pytest.mark.parametrize(("rows", "outputs"), [(0, 4), (3, 0), (0, 0)])
def test_empty(rows, outputs):
    y = linear(torch.empty(rows, 5), torch.empty(outputs, 5), None, "gelu", None)
    assert y.shape == (rows, outputs)


def test_nan_passes_relu():
    y = linear(torch.tensor([math.nan]), torch.ones(1, 1), None, "relu", None)
    assert y.isnan().all()
