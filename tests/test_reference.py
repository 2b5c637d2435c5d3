"""The references against PyTorch, against their definitions, and against finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from definitions import numbers
from ops import ROWS
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from transformer_fast import functional
from transformer_fast.measure.accuracy import unchecked
from transformer_fast.reference import (
    add_layer_norm,
    attention,
    dropout,
    feed_forward,
    layer_norm,
    linear,
)
from transformer_fast.reference.dropout import draw_seed, philox_numbers, threshold
from transformer_fast.specs import OPS
from transformer_fast.specs.attention import arrange
from transformer_fast.specs.spec import Draw
from transformer_fast.testing.oracle import as_results, is_floating

DOUBLE = torch.float64


def double(*values):
    return torch.tensor(values, dtype=DOUBLE)


def test_linear_by_hand():
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


#: Cases in which PyTorch promises something else, or nothing.
ODD = ("garbage", "empty", "nothing", "ends", "finfo", "callable", "lowest")


@pytest.mark.parametrize("op", OPS)
def test_pytorch_agrees(op):
    """What stands for PyTorch in benchmarks does the reference's work."""
    checked = 0
    for case in OPS[op].cases:
        arguments = case.build(DOUBLE, "cpu", torch.Generator().manual_seed(0))
        dropout_p = OPS[op].named(arguments).get("dropout_p", 0.0)
        if unchecked(dropout_p) or any(word in case.name for word in ODD):
            continue
        found, expected = (f(*arguments) for f in (OPS[op].pytorch, OPS[op].reference))
        for one, other in zip(as_results(found), as_results(expected), strict=True):
            torch.testing.assert_close(one, other, msg=lambda told, c=case: f"{c}: {told}")
        checked += 1
    assert checked >= 5


def test_no_inputs_give_the_bias():
    bias = torch.randn(4)
    y = linear(torch.empty(3, 0), torch.empty(4, 0), bias, None, None)
    assert torch.equal(y, bias.expand(3, 4))


@pytest.mark.parametrize(("rows", "outputs"), [(0, 4), (3, 0), (0, 0)])
def test_empty_linear(rows, outputs):
    y = linear(torch.empty(rows, 5), torch.empty(outputs, 5), None, "gelu", None)
    assert y.shape == (rows, outputs)


def test_nan_passes_relu():
    y = linear(torch.tensor([math.nan]), torch.ones(1, 1), None, "relu", None)
    assert y.isnan().all()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # mean 2.5, biased variance 1.25
        ((double(1, 2, 3, 4), (4,), None, None, 0.0), double(-3, -1, 1, 3) / math.sqrt(5)),
        ((double([[1, 2], [3, 4]]), (2, 2), None, None, 0.0), double([-3, -1], [1, 3]) / 5**0.5),
        ((double(1, 3), (2,), double(2, -4), double(10, 20), 0.0), double(8, 16)),
        # variance 1 and eps inside the root, so 1 / sqrt(1 + 3)
        ((double(-1, 1), (2,), None, None, 3.0), double(-0.5, 0.5)),
    ],
    ids=["plain", "dimensions", "weight and bias", "eps"],
)
def test_layer_norm_by_hand(arguments, expected):
    torch.testing.assert_close(layer_norm(*arguments), expected.view(arguments[0].shape))


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
def test_empty_layer_norm(shape, normalized):
    y = layer_norm(torch.empty(shape), normalized, None, None, 1e-5)
    assert y.shape == shape


def test_rows_are_independent():
    x = torch.randn(3, 8)
    x[1, 2] = math.nan
    y = layer_norm(x, (8,), None, None, 1e-5)
    assert y.isfinite().all(dim=1).tolist() == [True, False, True]


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


INF, NAN = math.inf, math.nan
LN3 = math.log(3.0)


def column(*values):
    """One batch element, one head, one value per position."""
    return torch.tensor(values, dtype=DOUBLE).reshape(1, 1, -1, 1)


def attend(*qkv, **options):
    return attention(*arrange(*qkv, **options))


# By hand: with keys (0, ln 3) and query 1 the weights are 1/4 and 3/4 ----------------------------

ONE_QUERY = column(1), column(0, LN3), column(1, 5)
ROOT_OF_FOUR = torch.tensor([0.0] * 4 + [LN3 / 2] * 4, dtype=DOUBLE).reshape(1, 1, 2, 4)
#: Query, keys and values, options, and the output.
BY_HAND = {
    "plain": (ONE_QUERY, {}, 4),
    "1 / root of the head size": (
        (torch.ones(1, 1, 1, 4, dtype=DOUBLE), ROOT_OF_FOUR, column(1, 5)), {}, 4
    ),
    "scale": ((column(1), column(0, 2 * LN3), column(1, 5)), {"scale": 0.5}, 4),
    "added": ((column(1), column(0, 0), column(1, 5)), {"mask": double([[[0.0, LN3]]])}, 4),
    "bool mask": (ONE_QUERY, {"mask": torch.tensor([[[[True, False]]]])}, 1),
    "float mask": (ONE_QUERY, {"mask": torch.tensor([[[[0.0, -INF]]]])}, 1),
    "key lengths": (ONE_QUERY, {"lengths": torch.tensor([1])}, 1),
    "no score overflows": ((column(1000), column(1, -1, 1), column(1, 2, 3)), {}, 2),
}  # fmt: skip
WEIGHTS = {4: [0.25, 0.75], 1: [1.0, 0.0], 2: [0.5, 0.0, 0.5]}


@pytest.mark.parametrize("name", BY_HAND)
def test_attention_by_hand(name):
    qkv, options, expected = BY_HAND[name]
    output, weights = attend(*qkv, **options, weights=True)
    torch.testing.assert_close(output, column(expected))
    torch.testing.assert_close(weights.flatten(), double(*WEIGHTS[expected]))


# Causal ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("queries", "keys"), [(2, 4), (4, 2), (3, 3), (1, 5), (5, 1)])
def test_causal_is_aligned_to_the_upper_left(queries, keys):
    query, key = torch.zeros(1, 1, queries, 2), torch.zeros(1, 1, keys, 2)
    _, weights = attend(query, key, torch.randn(1, 1, keys, 2), causal=True, weights=True)
    seen = torch.ones(queries, keys).tril()
    assert torch.equal(weights[0, 0], seen / seen.sum(dim=1, keepdim=True))


def test_mask_causal_and_lengths_all_hide():
    query, key, value = torch.zeros(2, 1, 4, 2), torch.zeros(2, 1, 4, 2), torch.randn(2, 1, 4, 2)
    mask = torch.tensor([True, False, True, True])[None, None, None]
    _, weights = attend(
        query, key, value, mask=mask, lengths=torch.tensor([3, 4]), causal=True, weights=True
    )
    assert (weights[0, 0] > 0).int().tolist() == [
        [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 1, 0],
    ]  # fmt: skip
    assert (weights[1, 0, 3] > 0).tolist() == [True, False, True, True]


# Rows that see nothing ---------------------------------------------------------------------------


def nothing_to_see(kind, batch=2, heads=3, queries=5, keys=4):
    if kind == "bool mask":
        return {"mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool)}
    if kind == "float mask":
        return {"mask": torch.full((1, 1, queries, keys), -INF)}
    return {"lengths": torch.zeros(batch, dtype=torch.int64)}


@pytest.mark.parametrize("kind", ["bool mask", "float mask", "key lengths"])
def test_a_row_that_sees_nothing_gives_zeros(kind):
    qkv = [torch.randn(2, 3, n, 6, requires_grad=True) for n in (5, 4, 4)]
    output, weights = attend(*qkv, weights=True, **nothing_to_see(kind))
    assert torch.equal(output, torch.zeros(2, 3, 5, 6))
    assert torch.equal(weights, torch.zeros(2, 3, 5, 4))
    for gradient in torch.autograd.grad((output.sum(), weights.sum()), qkv):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_only_that_row_gives_zeros():
    qkv = [torch.randn(1, 1, 3, 4, requires_grad=True) for _ in range(3)]
    mask = torch.tensor([[True, True, False], [False, False, False], [True, False, True]])
    output, _ = attend(*qkv, mask=mask[None, None])
    assert (output == 0).all(dim=-1).flatten().tolist() == [False, True, False]
    (gradient,) = torch.autograd.grad(output.square().sum(), qkv[0])
    assert (gradient == 0).all(dim=-1).flatten().tolist() == [False, True, False]
    assert gradient.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, DOUBLE])
def test_the_lowest_number_is_finite(dtype):
    # Such a row attends to everything equally; it is not one that sees nothing.
    mask = torch.full((1, 1, 1, 4), torch.finfo(dtype).min, dtype=dtype)
    value = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=dtype).reshape(1, 1, 4, 1)
    zeros = torch.zeros(1, 1, 4, 1, dtype=dtype)
    output, weights = attend(zeros, zeros, value, mask=mask, weights=True)
    assert (output == 3).all()
    assert (weights == 0.25).all()


@pytest.mark.parametrize("lengths", [[-7, 0], [4, 5], [2, 99]])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
def test_key_lengths_at_and_beyond_the_ends(lengths, dtype):
    qkv = [torch.randn(2, 1, n, 4) for n in (3, 4, 4)]
    _, weights = attend(*qkv, lengths=torch.tensor(lengths, dtype=dtype), weights=True)
    for row, length in zip(weights, lengths, strict=True):
        assert (row > 0).sum(dim=-1).unique().tolist() == [max(0, min(4, length))]


@pytest.mark.parametrize("garbage", [NAN, INF])
@pytest.mark.parametrize("lengths", [[2, 0], [-1, 3], [9, 1]])
def test_beyond_query_lengths_there_is_nothing(lengths, garbage):
    """Neither what stands there nor the gradients of what comes out have any effect."""
    q, k, v = (torch.randn(2, 2, n, 6) for n in (3, 5, 5))
    lengths = torch.tensor(lengths)
    beyond = (torch.arange(3) >= lengths[:, None])[:, None, :, None]

    def run(query, upstream, **given):
        leaves = [x.detach().requires_grad_() for x in (query, k, v)]
        results = attend(*leaves, weights=True, **given)
        ups = [upstream[..., : r.shape[-1]].expand(r.shape) for r in results]
        return (*results, *torch.autograd.grad(results, leaves, ups))

    found = run(q.masked_fill(beyond, garbage), torch.ones(2, 1, 3, 9).masked_fill(beyond, garbage),
                query_lengths=lengths)  # fmt: skip
    upstream = torch.ones(2, 1, 3, 9).masked_fill(beyond, 0.0)
    for got, plain in zip(found, run(q, upstream), strict=True):
        want = plain.masked_fill(beyond, 0.0) if plain.shape[-2] == 3 else plain
        torch.testing.assert_close(got, want)


# Garbage at hidden places ------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e38])
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_garbage_hidden_from_all_changes_nothing(garbage, where):
    query, key, value = (torch.randn(2, 2, n, 6) for n in (3, 5, 5))
    lengths = torch.tensor([3, 0])
    hidden = (torch.arange(5) >= lengths[:, None])[:, None, :, None]
    clean, _ = attend(query, key, value, lengths=lengths)
    dirty = [
        x.masked_fill(hidden, garbage) if where in (name, "both") else x
        for name, x in (("key", key), ("value", value))
    ]
    leaves = [x.detach().requires_grad_() for x in (query, *dirty)]
    output, weights = attend(*leaves, lengths=lengths, weights=True)
    torch.testing.assert_close(output, clean)
    assert weights.isfinite().all()
    for gradient in torch.autograd.grad(output.sum(), leaves):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("garbage", [NAN, INF])
def test_garbage_seen_by_some_reaches_only_them(garbage):
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
    clean, _ = attend(query, key, value, causal=True)
    key[:, :, 3], value[:, :, 3] = garbage, garbage
    output, weights = attend(query, key, value, causal=True, weights=True)
    torch.testing.assert_close(output[:, :, :3], clean[:, :, :3])
    assert output[:, :, 3:].isnan().all()
    assert weights[:, :, :3].isfinite().all()


def test_garbage_hidden_from_some_leaves_their_gradients_finite():
    query, key, value = (torch.randn(1, 1, 4, 3) for _ in range(3))
    value[:, :, 3] = NAN
    leaves = [x.requires_grad_() for x in (query, key, value)]
    output, _ = attend(*leaves, causal=True)
    gradients = torch.autograd.grad(output[:, :, :3].sum(), leaves)
    assert gradients[0][:, :, :3].isfinite().all()
    assert gradients[2][:, :, :3].isfinite().all()


def test_garbage_in_queries_stays_in_its_row():
    query, key, value = (torch.randn(1, 1, 4, 3) for _ in range(3))
    query[:, :, 1] = NAN
    output, _ = attend(query, key, value)
    assert output.isfinite().all(dim=-1).flatten().tolist() == [True, False, True, True]


def test_a_garbage_query_that_sees_nothing_gives_zeros():
    query, key, value = (torch.randn(1, 1, 2, 3) for _ in range(3))
    query[:, :, 1] = NAN
    mask = torch.tensor([[True, True], [False, False]])[None, None]
    output, _ = attend(query, key, value, mask=mask)
    assert torch.equal(output[:, :, 1], torch.zeros(1, 1, 3))


# Empty -------------------------------------------------------------------------------------------


def test_no_keys_give_zeros():
    output, weights = attend(
        torch.randn(2, 3, 4, 5), torch.empty(2, 3, 0, 5), torch.empty(2, 3, 0, 6), weights=True
    )
    assert torch.equal(output, torch.zeros(2, 3, 4, 6))
    assert weights.shape == (2, 3, 4, 0)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4, 5), (2, 0, 3, 4, 5), (2, 2, 0, 4, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty_inputs_give_empty_results(sizes, causal):
    batch, heads, queries, keys, size = sizes
    qkv = [torch.empty(batch, heads, n, size) for n in (queries, keys, keys)]
    output, weights = attend(*qkv, causal=causal, weights=True)
    assert output.shape == (batch, heads, queries, size)
    assert weights.shape == (batch, heads, queries, keys)


def test_head_size_zero_attends_equally():
    value = torch.randn(1, 1, 4, 3)
    output, _ = attend(torch.empty(1, 1, 2, 0), torch.empty(1, 1, 4, 0), value)
    torch.testing.assert_close(output, value.mean(dim=-2, keepdim=True).expand(1, 1, 2, 3))


# Dtypes, heads, dropout --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_is_computed_in_fp32_and_rounded_once(dtype):
    qkv = [torch.randn(2, 2, n, 16).to(dtype) for n in (9, 11, 11)]
    mask = torch.randn(1, 2, 9, 11).to(dtype)
    got = attend(*qkv, mask=mask, weights=True)
    exact = attend(*(x.float() for x in qkv), mask=mask.float(), weights=True)
    for one, other in zip(got, exact, strict=True):
        assert torch.equal(one, other.to(dtype))


def test_fewer_key_heads_are_repeated_in_place():
    query, key, value = (torch.randn(2, h, 5, 4) for h in (6, 2, 2))
    got, _ = attend(query, key, value, gqa=True)
    for head in range(6):
        one, _ = attend(query[:, [head]], key[:, [head // 3]], value[:, [head // 3]])
        torch.testing.assert_close(got[:, [head]], one)


def test_weights_are_those_that_multiply_the_values():
    query, key, value = (torch.randn(2, 2, n, 4) for n in (5, 7, 7))
    seed = torch.tensor(99)
    _, before = attend(query, key, value, weights=True)
    output, after = attend(query, key, value, dropout_p=0.5, seed=seed, weights=True)
    # Row (b * H + h) * T + t, column s.
    expected = dropout(before.reshape(20, 7), 0.5, seed).reshape(2, 2, 5, 7)
    torch.testing.assert_close(after, expected)
    torch.testing.assert_close(output, after @ value)


def test_weights_only_when_asked_for():
    qkv = [torch.randn(1, 1, 2, 3) for _ in range(3)]
    assert attend(*qkv)[1] is None
    _, weights = attend(*qkv, weights=True)
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(1, 1, 2))


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 0x299F31D0A4093822, 2**63 - 1])
def test_numbers_follow_the_counter_layout(seed):
    found = philox_numbers(torch.tensor(seed), 37, 23)
    assert found.tolist() == numbers(seed, np.arange(37), 23).tolist()


def test_kept_elements_are_those_at_or_above_the_threshold():
    seed, p = torch.tensor(77), 0.3
    numbers = philox_numbers(seed, 50, 41)
    y = dropout(torch.ones(50, 41), p, seed)
    assert torch.equal(y != 0, numbers >= 19661)  # 0.3 * 2^16 = 19660.8
    assert torch.equal(y.unique(), torch.tensor([0.0, 1 / 0.7]))


@pytest.mark.parametrize(
    ("p", "bound"),
    [(1e-300, 1), (2**-16, 1), (0.1, 6554), (0.5, 32768), (1 - 2**-16, 65535), (1 - 2**-53, 65535)],
)
def test_neither_all_nor_nothing_is_dropped_by_rounding(p, bound):
    assert threshold(p) == bound
    numbers = philox_numbers(torch.tensor(0), 1000, 800)
    assert (numbers.min(), numbers.max()) == (0, 65535)  # so both ends are met below
    y = dropout(torch.ones(1000, 800), p, torch.tensor(0))
    assert torch.equal(y == 0, numbers < bound)


def test_leading_dimensions_are_rows():
    seed = torch.tensor(5)
    flat = dropout(torch.ones(24, 10), 0.5, seed)
    assert torch.equal(dropout(torch.ones(2, 3, 4, 10), 0.5, seed).reshape(24, 10), flat)
    assert torch.equal(dropout(torch.ones(10), 0.5, seed), flat[0])


def test_a_shorter_row_has_the_same_beginning():
    seed = torch.tensor(5)
    wide, narrow = (dropout(torch.ones(9, n), 0.5, seed) for n in (17, 6))
    assert torch.equal(wide[:, :6], narrow)


@pytest.mark.parametrize("p", [0.02, 0.1, 0.5, 0.9])
def test_rate(p):
    n = 400 * 250
    y = dropout(torch.ones(400, 250, dtype=torch.float64), p, torch.tensor(123456789))
    dropped = (y == 0).sum().item()
    assert abs(dropped - n * p) < 5 * math.sqrt(n * p * (1 - p))  # five standard deviations
    assert abs(y.mean().item() - 1) < 5 * math.sqrt(p / (1 - p) / n)


def test_neighbours_are_independent():
    kept = dropout(torch.ones(500, 200), 0.5, torch.tensor(3)) != 0
    for one, other in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1])):
        n = one.numel()
        assert abs((one == other).sum().item() - n / 2) < 5 * math.sqrt(n) / 2


def test_seeds_differ():
    one, other = (dropout(torch.ones(100, 100), 0.5, torch.tensor(s)) for s in (1, 2))
    assert 4000 < (one != other).sum().item() < 6000


def test_nothing_dropped_is_the_input():
    x = torch.randn(3)
    assert dropout(x, 0.0, None) is x


def test_everything_dropped_is_zero():
    assert torch.equal(dropout(torch.full((3, 4), math.inf), 1.0, None), torch.zeros(3, 4))


@pytest.mark.parametrize("p", [0.4, 1.0])
def test_nan_is_dropped_like_anything(p):
    y = dropout(torch.full((30, 30), math.nan), p, torch.tensor(4))
    assert torch.equal(y == 0, ~y.isnan())
    assert (y == 0).any()


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), ()])
def test_empty_and_scalar(shape):
    assert dropout(torch.ones(shape), 0.5, torch.tensor(1)).shape == shape


def test_seed_comes_from_torchs_generator():
    torch.manual_seed(8)
    first, second = draw_seed(torch.device("cpu")), draw_seed(torch.device("cpu"))
    torch.manual_seed(8)
    assert torch.equal(draw_seed(torch.device("cpu")), first)
    assert first != second
    assert first.dtype == torch.int64
    assert first >= 0


# Through the public functions --------------------------------------------------------------------

DRAWS = {
    "add_layer_norm": lambda x: functional.add_layer_norm(x, x, (16,), dropout_p=0.5)[0],
    "feed_forward": lambda x: functional.feed_forward(
        x, torch.eye(16), None, torch.eye(16), None, dropout_p=0.5
    ),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
}


@pytest.mark.parametrize("op", DRAWS)
def test_manual_seed_replays(op):
    x = torch.randn(12, 16)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(DRAWS[op](x))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert not torch.equal(DRAWS[op](x), DRAWS[op](x))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("op", DRAWS)
def test_checkpointing_replays(op, reentrant):
    gradients = []
    for run in (DRAWS[op], lambda t: checkpoint(DRAWS[op], t, use_reentrant=reentrant)):
        x = torch.linspace(-1, 1, 12 * 16).reshape(12, 16).requires_grad_()
        torch.manual_seed(6)
        run(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_without_dropout_no_random_number_is_drawn():
    x = torch.randn(12, 16)
    before = torch.get_rng_state()
    functional.add_layer_norm(x, x, (16,))
    functional.feed_forward(x, torch.eye(16), None, torch.eye(16), None)
    functional.scaled_dot_product_attention(x, x, x)
    assert torch.equal(torch.get_rng_state(), before)


#: Garbage has no finite differences.
ALL_CASES = [
    pytest.param(op, case, id=f"{op}-{case}")
    for op in OPS
    for case in OPS[op].cases
    if "garbage" not in case.name
]


def differentiable(op, arguments):
    """A function of the arguments that have gradients, and those arguments."""
    spec = OPS[op]
    places = [
        place
        for place, (name, value) in enumerate(zip(spec.arguments, arguments, strict=False))
        if name in spec.gradients_of and is_floating(value)
    ]

    def function(*leaves):
        called = list(arguments)
        for place, leaf in zip(places, leaves, strict=True):
            called[place] = leaf
        results = as_results(spec.reference(*called))
        return tuple(r for r in results if r is not None and r.requires_grad)

    # gradcheck wants inputs whose elements do not share memory.
    leaves = [arguments[p].detach().clone(memory_format=torch.contiguous_format) for p in places]
    return function, [leaf.requires_grad_() for leaf in leaves]


@pytest.mark.parametrize(("op", "case"), ALL_CASES)
def test_along_a_random_direction(op, case, generator):
    arguments = case.build(DOUBLE, "cpu", generator)
    if case.name in ("float mask, -inf", "float mask, finfo.min"):
        # No step can be taken from these numbers; other cases have the mask's gradient.
        hides = arguments[3] < -1e6
        arguments = (*arguments[:3], ~hides, *arguments[4:])
    function, leaves = differentiable(op, arguments)
    assert gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("op", OPS)
def test_every_element_and_twice(op, generator):
    for arguments in ROWS[op].small(Draw(DOUBLE, "cpu", generator)):
        function, leaves = differentiable(op, arguments)
        assert gradcheck(function, leaves)
        assert gradgradcheck(function, leaves, fast_mode=True)
