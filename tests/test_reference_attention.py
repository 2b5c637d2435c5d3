"""The reference of attention: examples by hand, every decision it takes, torch's op."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from transformer_fast.reference import attention
from transformer_fast.reference.dropout import dropout
from transformer_fast.specs import OPS
from transformer_fast.specs.attention_cases import arrange

DOUBLE = torch.float64
INF, NAN = math.inf, math.nan
LN3 = math.log(3.0)


def column(*values):
    """One batch element, one head, one value per position."""
    return torch.tensor(values, dtype=DOUBLE).reshape(1, 1, -1, 1)


def attend(*qkv, **options):
    return attention(*arrange(*qkv, **options))


# By hand: with keys (0, ln 3) and query 1 the weights are 1/4 and 3/4 ----------------------------

ONE_QUERY = column(1), column(0, LN3), column(1, 5)


def test_by_hand():
    output, weights = attend(*ONE_QUERY, weights=True)
    torch.testing.assert_close(output, column(4))
    torch.testing.assert_close(weights, torch.tensor([[[[0.25, 0.75]]]], dtype=DOUBLE))


def test_scale_is_one_over_the_root_of_the_head_size():
    query, key = torch.ones(1, 1, 1, 4, dtype=DOUBLE), torch.zeros(1, 1, 2, 4, dtype=DOUBLE)
    key[..., 1, :] = LN3 / 2  # the product is 2 ln 3, the root of 4 is 2
    output, _ = attend(query, key, column(1, 5))
    torch.testing.assert_close(output, column(4))


def test_scale_given():
    output, _ = attend(column(1), column(0, 2 * LN3), column(1, 5), scale=0.5)
    torch.testing.assert_close(output, column(4))


def test_float_mask_is_added():
    mask = torch.tensor([[[[0.0, LN3]]]], dtype=DOUBLE)
    output, _ = attend(column(1), column(0, 0), column(1, 5), mask=mask)
    torch.testing.assert_close(output, column(4))


@pytest.mark.parametrize("mask", [[True, False], [0.0, -INF]], ids=["bool", "float"])
def test_mask_hides(mask):
    output, weights = attend(*ONE_QUERY, mask=torch.tensor([[[mask]]]), weights=True)
    assert torch.equal(output, column(1))
    assert weights.flatten().tolist() == [1.0, 0.0]


def test_key_lengths_hide():
    output, _ = attend(*ONE_QUERY, lengths=torch.tensor([1]))
    assert torch.equal(output, column(1))


def test_no_score_overflows():
    output, _ = attend(column(1000), column(1, -1, 1), column(1, 2, 3))
    torch.testing.assert_close(output, column(2))


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


# torch -------------------------------------------------------------------------------------------


def torch_has_it(arguments):
    """Whether torch's op takes the call and promises the same as we do."""
    _, key, _, mask, lengths, causal, _, p, _, _, weights, ends = arguments
    rows_are_seen = mask is None or mask.dtype != torch.bool or bool(mask.any(dim=-1).all())
    plain = (
        lengths is ends is None and p == 0.0 and not weights and not (mask is not None and causal)
    )
    return plain and rows_are_seen and bool(key.isfinite().all())


def built(case):
    return case.build(DOUBLE, "cpu", torch.Generator().manual_seed(0))


CASES_OF_TORCH = [case for case in OPS["attention"].cases if torch_has_it(built(case))]


@pytest.mark.parametrize("case", CASES_OF_TORCH, ids=str)
def test_agrees_with_torch(case):
    arguments = built(case)
    query, key, value, mask, _, causal, scale, _, _, gqa, *_ = arguments
    expected = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=gqa
    )
    torch.testing.assert_close(attention(*arguments)[0], expected)


def test_most_cases_are_compared_with_torch():
    assert len(CASES_OF_TORCH) >= len(OPS["attention"].cases) / 2
