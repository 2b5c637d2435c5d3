"""Attention where exponentials, sums and reciprocals come near the ends of fp32's range."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import check_target, run, targets

from transformer_fast import dispatch
from transformer_fast.specs import OPS
from transformer_fast.specs.attention_cases import arrange
from transformer_fast.testing import check, check_gradients
from transformer_fast.testing.oracle import promote

TARGETS = [p for p in targets("attention") if p.values[0].kernel.backend == "cpu"]
FLOAT32 = [p for p in TARGETS if p.values[0].dtype == torch.float32]
FLOAT16 = [p for p in TARGETS if p.values[0].dtype == torch.float16]
HALF = [p for p in TARGETS if p.values[0].dtype != torch.float32]

pytestmark = pytest.mark.usefixtures("two_threads")


def kernel(*arguments: Any) -> Any:
    return next(k for k in dispatch.kernels("attention") if k.backend == "cpu").run(*arguments)


def accepted(target, arguments):
    if target.refusal(arguments):
        pytest.skip(target.refusal(arguments))
    return arguments


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_every_distance_between_the_first_keys_and_the_largest(target, weights):
    """The sum of a row, referred to its first keys, takes every size around the type's end."""
    distance = torch.linspace(85.0, 92.0, 120)[:, None]
    below = torch.where(torch.arange(70) < 40, -distance, 0.0)[None, None]
    query, key, value = torch.zeros(1, 1, 120, 16), torch.zeros(1, 1, 70, 16), torch.randn(70, 16)
    tensors = [x.to(target.dtype) for x in (query, key, value[None, None])]
    check_target(target, accepted(target, arrange(*tensors, mask=below, weights=weights)))


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "seed": torch.tensor(7)}], ids=len)
@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("target", HALF)
def test_a_key_that_has_all_of_a_row_gives_its_value(target, queries, options, generator):
    """Whatever power of e it is, referred to the first keys of the row: weights are rounded to
    multiply the values, and sum up to 1 all the same."""
    mask = torch.zeros(1, 1, queries, 75)
    mask[..., 60] = torch.linspace(30.0, 50.0, queries)
    query = torch.zeros(1, 2, queries, 16)
    key, value = torch.zeros(1, 2, 75, 16), torch.zeros(1, 2, 75, 16)
    value[:, :, 60] = torch.randn(1, 2, 16, generator=generator)
    tensors = [x.to(target.dtype) for x in (query, key, value, mask)]
    arguments = arrange(*tensors[:3], mask=tensors[3], **options)
    (output, _) = run(target, accepted(target, arguments))
    kept, _ = OPS["attention"].reference(*promote(arguments))
    torch.testing.assert_close(output, kept.to(target.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("queries", [2, 20])
@pytest.mark.parametrize("power", [28, 34, 60])
@pytest.mark.parametrize("target", FLOAT32)
def test_scores_beyond_the_precision_of_their_exponents(target, queries, power, generator):
    """Integers times a power of two: every product and sum is exact, so are the probabilities."""
    query, key = (torch.randint(-9, 10, (1, 2, n, 16), generator=generator) for n in (queries, 75))
    key = key * 2.0 ** (power // 2)
    value = torch.randn(1, 2, 75, 16, generator=generator)
    # 0.3 is rounded, and so are the products with it.
    for scale in (0.25, 0.3):
        query_times = query * 2.0 ** (power - power // 2)
        check_target(target, accepted(target, arrange(query_times, key, value, scale=scale)))


@pytest.mark.parametrize("power", [20, 28, 34])
def test_gradients_of_scores_beyond_the_precision_of_their_exponents(power, float_isa, generator):
    query, key = (torch.randint(-9, 10, (1, 2, n, 16), generator=generator) for n in (20, 75))
    value = torch.randn(1, 2, 75, 16, generator=generator)
    check_gradients("attention", kernel, arrange(query.float(), key * 2.0**power, value))


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("target", FLOAT32)
def test_huge_values_behind_the_lowest_number(target, queries, generator):
    """finfo.min is no -inf, but e to it is 0: neither as a weight nor as a factor is it more."""
    value = torch.randn(1, 1, 300, 16, generator=generator)
    value[:, :, :270] = 8.5e37
    mask = torch.zeros(1, 1, 1, 300)
    mask[..., :270] = torch.finfo(torch.float32).min
    query, key = (torch.randn(1, 1, n, 16, generator=generator) for n in (queries, 300))
    for weights in (False, True):
        arguments = arrange(query, key, value, mask=mask, weights=weights)
        # Measured without the huge values, beside which the budget would be huge.
        seen = arrange(query, key[:, :, 270:], value[:, :, 270:], weights=weights)
        result = run(target, accepted(target, arguments))
        output, found = result if isinstance(result, tuple) else (result, None)
        if weights:
            assert torch.count_nonzero(found[..., :270]) == 0
            found = found[..., 270:]
        check("attention", (output, found), seen)


@pytest.mark.parametrize("target", FLOAT16)
def test_denormal_queries(target, generator):
    """All of a query below 2^-14, and keys so large that its scores are not."""
    query = torch.randn(1, 2, 20, 16, generator=generator).half() * 2.0**-15
    assert query.abs().max() < 2.0**-13
    key, value = (torch.randn(1, 2, 75, 16, generator=generator) for _ in range(2))
    arguments = arrange(query, (key * 2.0**13).half(), value.half(), scale=4.0)
    check_target(target, accepted(target, arguments))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"dropout_p": 0.3}], ids=str)
@pytest.mark.parametrize("keys", [40, 300])
def test_gradients_where_one_key_has_almost_all(keys, options, float_isa, generator):
    """Queries meet their own keys at scores around 200: dP - delta is a difference of equal terms."""
    key, value = (torch.randn(1, 2, keys, 16, generator=generator) for _ in range(2))
    if "dropout_p" in options:
        options = {**options, "seed": torch.tensor(7)}
    for score in (8.0, 12.0, 200.0):
        query = key / key.norm(dim=-1, keepdim=True) ** 2 * (score * math.sqrt(16))
        check_gradients("attention", kernel, arrange(query, key, value, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("queries", [17, 256])
def test_equal_values_far_from_zero_leave_scores_no_slope(queries, dtype, isa, generator):
    """dP is dO V, as exact as the sums of fp32: only they are left where it is the same for all keys.

    Integers, so that O is V; scores so large that the forward keeps their maximum and sum apart.
    """

    def integers(least, most, *size):
        return torch.randint(least, most + 1, size, generator=generator).to(dtype)

    query, key = 64 * integers(-3, 3, 1, 2, queries, 16), integers(-3, 3, 1, 2, 256, 16)
    value = integers(60, 120, 1, 2, 1, 16).expand(1, 2, 256, 16).contiguous()
    grad = integers(-9, 9, 1, 2, queries, 16)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    output, _ = kernel(*arrange(*inputs))
    torch.testing.assert_close(output, value[:, :, :1].expand_as(output), rtol=0, atol=0)
    dquery, dkey = torch.autograd.grad(output, (query, key), grad)
    # The largest sum of |dO V|, times a unit of rounding for dP and one for delta.
    rounding = (grad.abs().double() @ value.double().mT).max() * 2 * torch.finfo(torch.float32).eps
    assert dquery.abs().max() <= rounding * key.abs().max() / math.sqrt(16)
    assert dkey.abs().max() <= rounding * query.abs().max() / math.sqrt(16) * queries


@pytest.mark.parametrize("queries", [1, 2, 4])
def test_gradients_of_few_queries_with_large_scores(queries, float_isa, generator):
    """The backward's scores are those of the forward, though inference has a shorter way there."""
    query = 1e4 * torch.randn(4, 1, queries, 16, generator=generator)
    key, value = (torch.randn(4, 1, 90, 16, generator=generator) for _ in range(2))
    check_gradients("attention", kernel, arrange(query, key, value))


def test_gradients_of_returned_weights_where_one_key_has_almost_all(float_isa, generator):
    key, value = (torch.randn(1, 2, 60, 16, generator=generator) for _ in range(2))
    for score in (10.0, 200.0):
        query = key / key.norm(dim=-1, keepdim=True) ** 2 * (score * math.sqrt(16))
        check_gradients("attention", kernel, arrange(query, key, value, weights=True))
