"""Gradients of attention on bfloat16 units: of bfloat16, and, on AMX tiles, of fp32 in pieces."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_calls import draw, options, tensors
from harness import ISAS, in_use

from transformer_fast import _native
from transformer_fast.backends import cpu
from transformer_fast.specs.attention_cases import arrange
from transformer_fast.testing import check_gradients, nan_memory

pytestmark = pytest.mark.usefixtures("two_threads")

WAYS = {
    "amx-fp32": ("amx", torch.float32),
    "amx-bf16": ("amx", torch.bfloat16),
    "avx512-bf16": ("avx512_bf16", torch.bfloat16),
}


def on_amx(test: Any) -> Any:
    """A test of what is of AMX alone."""
    skip = pytest.mark.skipif("amx" not in ISAS, reason=_native.why_not or "this CPU has no AMX")
    return skip(pytest.mark.usefixtures("amx")(test))


@pytest.fixture(params=WAYS)
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """A type of calls that have such units, and their instruction set in use."""
    isa, found = WAYS[request.param]
    if _native.module is None or isa not in ISAS:
        pytest.skip(_native.why_not or f"this CPU has no {isa}")
    with in_use(isa):
        yield found


def checked(arguments: tuple[Any, ...]) -> None:
    with nan_memory():
        check_gradients("attention", cpu.attention, arguments)


# A block is 96 queries, a panel 32 keys, a tile 512, 256 or 128 of them.
SIZES = [
    (36, 36, 16, 16),
    (37, 130, 40, 40),
    (97, 1030, 33, 70),
    (193, 300, 128, 128),
    (100, 270, 136, 160),
    (40, 1, 16, 5),
    (192, 64, 1, 1),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", options(1, 1))
def test_sizes(sizes, name, dtype):
    queries, keys, *_ = sizes
    checked(arrange(*tensors(*sizes, dtype=dtype), **options(queries, keys, dtype)[name]))


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads(heads, causal, dtype):
    query = draw(dtype).normal(2, 6, 50, 24)
    _, key, value = tensors(50, 140, 24, heads=heads, dtype=dtype)
    for weights in (False, True):
        checked(arrange(query, key, value, gqa=True, causal=causal, weights=weights))


@pytest.mark.parametrize(("begin", "end"), [(0, 32), (32, 64), (33, 95), (64, 300), (512, 600)])
def test_hidden_in_the_middle(begin, end, dtype):
    """Panels of keys that no query of a block sees, in the first, the last and every place."""
    qkv = tensors(100, 610, 16, dtype=dtype)
    seen = torch.ones(1, 1, 100, 610, dtype=torch.bool)
    seen[..., begin:end] = False
    once = seen.clone()
    once[..., 31, begin + (end - begin) // 2] = True
    for mask in (seen, seen[:, :, :1], once):
        checked(arrange(*qkv, mask=mask))


@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("alike", ["", "queries", "keys", "both"])
def test_masks_that_are_added(shape, alike, dtype):
    """Sums over all that a mask is broadcast over, with more keys than a tile has."""
    queries = 1 if alike in ("queries", "both") else 200
    keys = 1 if alike in ("keys", "both") else 530
    mask = draw(dtype).normal(*shape, queries, keys)
    lengths = torch.tensor([400, 530])
    qkv = tensors(200, 530, 16, dtype=dtype)
    checked(arrange(*qkv, mask=mask, lengths=lengths, causal=alike == ""))
    checked(arrange(*qkv, mask=mask, dropout_p=0.3, seed=draw().seed()))


def test_an_fp32_mask_of_bfloat16_calls(dtype):
    """Its gradient is of its own type and not rounded to bfloat16."""
    if dtype != torch.bfloat16:
        pytest.skip("a call of bfloat16")
    mask = draw().normal(1, 2, 50, 70).requires_grad_()
    query, key, value = tensors(50, 70, 16, dtype=torch.bfloat16)
    output, _ = cpu.attention(*arrange(query, key, value, mask=mask))
    (found,) = torch.autograd.grad(output.float().square().sum(), mask)
    assert found.dtype == torch.float32
    assert not torch.equal(found, found.bfloat16().float())


def with_gradient(arguments: tuple[Any, ...], upstream: torch.Tensor) -> list[torch.Tensor]:
    """Of query, key and value."""
    called = [x.clone().requires_grad_() for x in arguments[:3]]
    output, _ = cpu.attention(*called, *arguments[3:])
    return list(torch.autograd.grad(output, called, upstream))


def both_ways(arguments: tuple[Any, ...], upstream: torch.Tensor) -> list[list[torch.Tensor]]:
    """On the units in use and by fp32 multiply-adds."""
    return [with_gradient(arguments, upstream) for _ in units_and_fma()]


def units_and_fma() -> Iterator[str]:
    """The instruction set in use, then one without such units."""
    assert _native.module is not None
    units = _native.module.isa()
    yield units
    with in_use("avx512"):
        yield "avx512"


GARBAGE = [math.nan, math.inf, -math.inf, 3e38, 1e-36, 1e-42]


@pytest.mark.parametrize("value", GARBAGE)
@pytest.mark.parametrize("tensor", ["query", "key", "value", "upstream"])
def test_numbers_without_pieces(tensor, value, dtype):
    """One of them sends the call to the other kernel: what is finite there is finite here."""
    names = ("query", "key", "value")
    given = dict(zip(names, tensors(60, 150, 16, dtype=dtype), strict=True))
    given["upstream"] = draw(dtype).normal(2, 2, 60, 16)
    if value == 3e38 and tensor in names[:2]:
        pytest.skip("whether scores overflow depends on the order of sums")
    given[tensor][0, 1, 7, 5] = value
    arguments = arrange(*(given[name] for name in names), causal=True)
    ours, plain = both_ways(arguments, given["upstream"])
    for one, two in zip(ours, plain, strict=True):
        assert torch.equal(one.isfinite(), two.isfinite())
        size = two[two.isfinite()].abs().max()
        if size < 1e30:
            eps = torch.finfo(dtype).eps
            close = {"rtol": 1000 * eps, "atol": float(size) * 100 * eps}
            torch.testing.assert_close(one, two, equal_nan=True, **close)


@pytest.mark.parametrize("value", GARBAGE)
@pytest.mark.parametrize("tensor", ["query", "key", "value"])
def test_numbers_without_pieces_and_a_mask(tensor, value, dtype):
    """Its gradient begins anew by the other kernel."""
    if value == 3e38 and tensor != "value":
        pytest.skip("whether scores overflow depends on the order of sums")
    given = dict(zip(("query", "key", "value"), tensors(200, 600, 16, dtype=dtype), strict=True))
    given[tensor][1, 1, 150, 5] = value
    mask, upstream = draw(dtype).normal(1, 2, 200, 600), draw(dtype).normal(2, 2, 200, 16)
    found = []
    for _ in units_and_fma():
        added = mask.clone().requires_grad_()
        output, _ = cpu.attention(*arrange(*given.values(), mask=added))
        found.append(torch.autograd.grad(output, added, upstream)[0])
    assert torch.equal(found[0].isfinite(), found[1].isfinite())
    eps = torch.finfo(dtype).eps
    size = found[1][found[1].isfinite()].abs().max()
    if size < 1e30:
        close = {"rtol": 1000 * eps, "atol": float(size) * 100 * eps}
        torch.testing.assert_close(*found, equal_nan=True, **close)


@pytest.mark.parametrize("value", GARBAGE)
def test_hidden_garbage_changes_nothing_else(value, dtype):
    query, key, values = tensors(50, 300, 16, dtype=dtype)
    upstream = draw(dtype).normal(2, 2, 50, 16)
    hidden = torch.zeros(300, dtype=torch.bool)
    hidden[50:130] = hidden[290:] = True
    clean, dirty = (
        with_gradient(arrange(query, k, v, mask=~hidden[None, None, None]), upstream)
        for k, v in (
            (key, values),
            (key.masked_fill(hidden[:, None], value), values.masked_fill(hidden[:, None], value)),
        )
    )
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(clean, dirty, rtol=10 * eps, atol=10 * eps)


@on_amx
@pytest.mark.parametrize("size", [1e-20, 1e-33, 1e-37])
def test_tiny_gradients(size):
    """They are not lost where pieces would be."""
    arguments = arrange(*tensors(60, 150, 16))
    upstream = draw().normal(2, 2, 60, 16)
    ours, plain = with_gradient(arguments, upstream * size), with_gradient(arguments, upstream)
    for one, two in zip(ours, plain, strict=True):
        torch.testing.assert_close(one.double() / size, two.double(), rtol=1e-3, atol=2e-2)
        assert one.abs().max() > 0


@on_amx
@pytest.mark.parametrize("size", [1e2, 1e4, -1e4, 1e7, 1e9])
def test_saturated_scores(size):
    """Probabilities are those of the forward, so the largest is 1 and gradients stay finite."""
    d = draw()
    query, key = d.normal(1, 2, 70, 4).abs() * size, d.normal(1, 2, 140, 4).abs()
    value, upstream = d.normal(1, 2, 140, 20), d.normal(1, 2, 70, 20)
    for given in ({}, {"causal": True}, {"mask": torch.zeros(1, 1, 1, 140)}):
        arguments = arrange(query, key, value, scale=1.0, **given)
        _, _, found = with_gradient(arguments, upstream)
        # Probabilities of a query add up to 1.
        for got, true in zip(found.sum(2), upstream.sum(2), strict=True):
            torch.testing.assert_close(got, true, rtol=1e-4, atol=1e-4)


@on_amx
@pytest.mark.parametrize("far", [14.0, 100.0, 2000.0])
def test_scores_that_grow(far):
    """The first keys' scores are what the forward's probabilities refer to at first."""
    query, key, value = tensors(100, 300)
    mask = (torch.arange(300) / 300 * far).expand(1, 1, 100, 300).clone()
    checked(arrange(query, key, value, mask=mask))
    key += torch.arange(300)[:, None] / 50
    query[:, :, ::3] += 1.0
    for causal in (False, True):
        checked(arrange(query, key, value, causal=causal))


def test_the_same_bits_with_any_threads(threads, dtype):
    arguments = arrange(*tensors(200, 1100, dtype=dtype), causal=True)
    upstream = draw(dtype).normal(2, 2, 200, 40)
    found = []
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        found.append(with_gradient(arguments, upstream))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert torch.equal(one, two)


def test_the_same_bits_of_a_mask_with_any_threads(threads, dtype):
    mask = draw(dtype).normal(1, 2, 200, 600).requires_grad_()
    arguments = arrange(*tensors(200, 600, dtype=dtype), mask=mask)
    found = []
    for count in (1, 2, 3, 2):
        torch.set_num_threads(count)
        output, _ = cpu.attention(*arguments)
        found.append(torch.autograd.grad(output.float().square().sum(), mask)[0])
    for other in found[1:]:
        assert torch.equal(found[0], other)
