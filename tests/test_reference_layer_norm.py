"""The reference of layer_norm and add_layer_norm: examples by hand, decisions, torch's op."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from transformer_fast.reference import add_layer_norm, layer_norm
from transformer_fast.specs import OPS

DOUBLE = torch.float64


def double(*values):
    return torch.tensor(values, dtype=DOUBLE)


def test_by_hand():
    # mean 2.5, biased variance 1.25
    y = layer_norm(double(1, 2, 3, 4), (4,), None, None, 0.0)
    torch.testing.assert_close(y, double(-3, -1, 1, 3) / math.sqrt(5))


def test_weight_and_bias_by_hand():
    y = layer_norm(double(1, 3), (2,), double(2, -4), double(10, 20), 0.0)
    torch.testing.assert_close(y, double(8, 16))


def test_eps_is_inside_the_root():
    # variance 1, so 1 / sqrt(1 + 3)
    y = layer_norm(double(-1, 1), (2,), None, None, 3.0)
    torch.testing.assert_close(y, double(-0.5, 0.5))


def test_several_dimensions_share_their_statistics():
    y = layer_norm(double(1, 2, 3, 4).reshape(1, 2, 2), (2, 2), None, None, 0.0)
    torch.testing.assert_close(y, double(-3, -1, 1, 3).reshape(1, 2, 2) / math.sqrt(5))


def test_constant_row_gives_the_bias():
    y = layer_norm(torch.full((2, 5), 7.0), (5,), torch.ones(5), torch.arange(5.0), 1e-5)
    assert torch.equal(y, torch.arange(5.0).expand(2, 5))


def test_variance_does_not_cancel():
    # Every number here is exact in fp32, but squares of the shifted values would not be.
    small = torch.tensor([-3.0, -1.0, 1.0, 3.0])
    y = layer_norm(small + 2.0**20, (4,), None, None, 1e-5)
    assert torch.equal(y, layer_norm(small, (4,), None, None, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_is_computed_in_fp32(dtype):
    x = (300 * torch.randn(6, 40)).to(dtype)  # squares overflow fp16
    weight, bias = torch.randn(40).to(dtype), torch.randn(40).to(dtype)
    y = layer_norm(x, (40,), weight, bias, 1e-5)
    exact = layer_norm(x.float(), (40,), weight.float(), bias.float(), 1e-5)
    assert torch.equal(y, exact.to(dtype))


@pytest.mark.parametrize(("shape", "normalized"), [((0, 4), (4,)), ((3, 0), (0,)), ((0,), (0,))])
def test_empty(shape, normalized):
    y = layer_norm(torch.empty(shape), normalized, None, None, 1e-5)
    assert y.shape == shape


def test_rows_are_independent():
    x = torch.randn(3, 8)
    x[1, 2] = math.nan
    y = layer_norm(x, (8,), None, None, 1e-5)
    assert y.isfinite().all(dim=1).tolist() == [True, False, True]


@pytest.mark.parametrize("case", OPS["layer_norm"].cases, ids=str)
def test_agrees_with_torch(case, generator):
    arguments = case.build(DOUBLE, "cpu", generator)
    torch.testing.assert_close(layer_norm(*arguments), F.layer_norm(*arguments))


@pytest.mark.parametrize("case", OPS["add_layer_norm"].cases, ids=str)
def test_add_layer_norm_is_dropout_sum_norm(case, generator):
    x, residual, shape, weight, bias, eps, p, seed = case.build(DOUBLE, "cpu", generator)
    y, total = add_layer_norm(x, residual, shape, weight, bias, eps, p, seed)
    if p == 0.0:
        assert torch.equal(total, residual + x)
    dropped = total == residual
    kept = x / (1 - p) if p < 1 else torch.zeros_like(x)
    torch.testing.assert_close(total, torch.where(dropped, residual, residual + kept))
    torch.testing.assert_close(y, F.layer_norm(total, shape, weight, bias, eps))


def test_add_layer_norm_by_hand():
    y, total = add_layer_norm(
        double(1, 5), double(2, 2), (2,), double(3, 3), double(1, 1), 0.0, 0.0, None
    )
    assert torch.equal(total, double(3, 7))
    torch.testing.assert_close(y, double(-2, 4))


def test_everything_dropped_leaves_the_residual():
    x = torch.full((2, 4), math.nan)
    residual = torch.randn(2, 4)
    _, total = add_layer_norm(x, residual, (4,), None, None, 1e-5, 1.0, None)
    assert torch.equal(total, residual)
