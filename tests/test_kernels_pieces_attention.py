"""Attention in bfloat16 pieces, as CPUs with AMX run fp32.

That many queries go this way as no case of the op table has.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_calls import draw, options, tensors
from harness import ISAS, Target, check_target, in_use, kernel_of, run

from transformer_fast import _native
from transformer_fast.specs.attention_cases import arrange
from transformer_fast.testing import OUTPUT_FACTOR, check, gradients, require_grad, truth_of
from transformer_fast.testing.oracle import oracle
from transformer_fast.testing.parity import compare

pytestmark = [
    pytest.mark.skipif("amx" not in ISAS, reason=_native.why_not or "this CPU has no AMX"),
    pytest.mark.usefixtures("two_threads", "amx"),
]

EPS, TINY = torch.finfo(torch.float32).eps, torch.finfo(torch.float32).tiny


def target(isa: str = "amx") -> Target:
    return Target(kernel_of("attention"), torch.float32, isa)


def output_of(arguments: tuple[Any, ...], isa: str = "amx") -> torch.Tensor:
    return run(target(isa), arguments)[0]


def with_tensors(arguments: tuple[Any, ...], *qkv: torch.Tensor) -> tuple[Any, ...]:
    return *qkv, *arguments[3:]


@pytest.mark.parametrize("which", range(3))
def test_channels_that_are_not_adjacent(which):
    """The backward works out the scores of the forward, whatever the strides."""
    query, key, value = tensors(49, 45)
    near = [30.0 * query, key[:, :, :1].expand(key.shape).contiguous(), value]
    far = list(near)
    far[which] = near[which].transpose(-1, -2).contiguous().transpose(-1, -2)
    found = [gradients("attention", target().kernel.run, arrange(*given)) for given in (near, far)]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_queries_decide_the_way():
    """Nothing here would be tested if products in pieces were never run."""
    for queries, alike in ((35, True), (36, False)):
        arguments = arrange(*tensors(queries, 70))
        ours, plain = output_of(arguments), output_of(arguments, "avx512")
        assert torch.equal(ours, plain) is alike
        gradients = []
        for isa in ("amx", "avx512"):
            with in_use(isa):
                called = require_grad("attention", arguments)
                trained = target().kernel.run(*called)[0]
                gradients.append(torch.autograd.grad(trained.sum(), called[:3]))
        for one, two in zip(*gradients, strict=True):
            assert torch.equal(one, two) is alike


SIZES = [
    (36, 36, 16, 16),
    (37, 130, 40, 40),
    (64, 64, 64, 64),
    (100, 515, 128, 128),
    (200, 77, 256, 256),
    (36, 70, 0, 16),
    (40, 1, 16, 5),
    (97, 129, 33, 70),
    (192, 300, 1, 1),
]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", options(1, 1))
def test_attention(sizes, name):
    queries, keys, *_ = sizes
    check_target(target(), arrange(*tensors(*sizes), **options(queries, keys)[name]))


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_grouped_heads(heads):
    d = draw()
    query, (_, key, value) = d.normal(2, 6, 50, 24), tensors(50, 140, 24, heads=heads)
    for causal in (False, True):
        check_target(target(), arrange(query, key, value, gqa=True, causal=causal, weights=True))


def test_strides():
    d = draw()
    query, key, value = d.normal(2, 70, 3, 4, 24).permute(2, 0, 3, 1, 4)
    check_target(target(), arrange(query, key, value, scale=-0.3))
    check_target(target(), arrange(query[..., 3:-4], key[..., 1:18], value[..., ::1]))
    check_target(target(), arrange(query, key[:, :, :69:3], value[:, :, 1::3], causal=True))


# Probabilities of 128 keys are kept; of those, 32 at a time are skipped where they are hidden.
HIDDEN = [(32, 64), (64, 96), (0, 32), (96, 160), (33, 95), (0, 128), (32, 300), (128, 256)]


@pytest.mark.parametrize(("begin", "end"), HIDDEN)
def test_hidden_in_the_middle(begin, end):
    qkv = tensors(100, 300)
    seen = torch.ones(1, 1, 100, 300, dtype=torch.bool)
    seen[..., begin:end] = False
    once = seen.clone()
    once[..., 31, begin + (end - begin) // 2] = True
    for mask in (seen, seen[:, :, :1], once):
        for given in (mask, torch.where(mask, 0.5, -math.inf), torch.where(mask, 0.0, -math.inf)):
            check_target(target(), arrange(*qkv, mask=given))
    # Whoever is in a block with a query that sees more gets the same bits.
    one, other = (output_of(arrange(*qkv, mask=mask)) for mask in (seen, once))
    rows = torch.arange(100) != 31
    assert torch.equal(one[:, :, rows], other[:, :, rows])


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 3e38, 1e-36])
def test_hidden_garbage_changes_no_bit(garbage):
    query, key, value = tensors(50, 300)
    hidden = torch.zeros(300, dtype=torch.bool)
    hidden[50:130] = hidden[290:] = True
    shown = torch.where(hidden, -math.inf, 0.25)
    late = torch.arange(300) >= 200
    for where, given in (
        (hidden, {"mask": ~hidden[None, None, None]}),
        (hidden, {"mask": shown.expand(2, 1, 50, 300)}),
        (late, {"lengths": torch.tensor([200, 7])}),
        (torch.arange(300) >= 50, {"causal": True}),
    ):
        given = {**given, "weights": True}
        clean = run(target(), arrange(query, key, value, **given))
        dirty = (x.masked_fill(where[:, None], garbage) for x in (key, value))
        for one, two in zip(clean, run(target(), arrange(query, *dirty, **given)), strict=True):
            assert torch.equal(one, two)


# References that do not hold -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e2, 1e4, -1e4, 1e7, 1e10, -1e13, 1e20])
def test_saturated_scores(size):
    d = draw()
    query, key = d.normal(1, 2, 70, 4).abs(), d.normal(1, 2, 140, 4).abs()
    value = d.normal(1, 2, 140, 20)
    masks = d.bools(1, 1, 70, 140), torch.zeros(1, 1, 1, 140)
    for given in ({}, {"causal": True}, *({"mask": m} for m in masks), {"weights": True}):
        arguments = arrange(query * size, key, value, scale=1.0, **given)
        check_target(target(), arguments)


@pytest.mark.parametrize("far", [5.0, 14.0, 30.0, 100.0, 2000.0])
@pytest.mark.parametrize("low", [0.0, -1e31])
def test_scores_that_grow(far, low):
    """The first keys' scores are what probabilities refer to."""
    query, key, value = tensors(100, 300)
    mask = (torch.arange(300) / 300 * far).expand(1, 1, 100, 300).clone()
    mask[..., 40::2, :40] += low
    arguments = arrange(query, key, value, mask=mask, weights=True)
    check_target(target(), arguments)
    # Others in the block keep their bits.
    plain = mask.clone()
    plain[..., ::2, :] = 0
    rest = run(target(), arrange(query, key, value, mask=plain, weights=True))
    some = mask.clone()
    some[..., 1::2, :] = 0
    for one, two in zip(rest, run(target(), arguments), strict=True):
        assert torch.equal(one[:, :, 1::2], two[:, :, 1::2])
    mixed = run(target(), arrange(query, key, value, mask=some, weights=True))
    untouched = run(target(), arrange(query, key, value, mask=mask * 0, weights=True))
    for one, two in zip(mixed, untouched, strict=True):
        assert torch.equal(one[:, :, 1::2], two[:, :, 1::2])


def test_growing_keys_without_a_mask():
    query, key, value = tensors(100, 300, 16)
    query[:, :, ::3] += 1.0
    key += torch.arange(300)[:, None] / 50
    for causal in (False, True):
        check_target(target(), arrange(query, key, value, causal=causal, weights=True))
    # Rows that are done again, among others.
    output = output_of(arrange(query, key, value))
    query[:, :, ::3] = 0.1
    assert torch.equal(output[:, :, 1::3], output_of(arrange(query, key, value))[:, :, 1::3])


def test_one_visible_key():
    """Its value comes out to the last bit."""
    query, key, value = tensors(80, 200)
    places = torch.randint(0, 200, (80,), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(80, 200, dtype=torch.bool)
    mask[torch.arange(80), places] = True
    for given in (mask, torch.where(mask, 1.5, -math.inf)):
        output = output_of(arrange(query * 50, key, value, mask=given[None, None]))
        assert torch.equal(output, value[:, :, places])
    check_target(target(), arrange(query, key, value, lengths=torch.tensor([1, 1])))


def test_scores_below_any_reference():
    """Masks that add the lowest finite number hide nothing where all keys have it."""
    qkv = tensors(50, 140)
    lowest = torch.finfo(torch.float32).min
    mask = torch.full((1, 1, 50, 140), lowest)
    check_target(target(), arrange(*qkv, mask=mask, weights=True))
    mask[..., ::2, 100:] = 0.0
    check_target(target(), arrange(*qkv, mask=mask, weights=True))
    mask[..., 5, :] = -math.inf
    check_target(target(), arrange(*qkv, mask=mask, weights=True))


# What pieces cannot say ---------------------------------------------------------------------------

GIVEN = {
    "plain": {},
    "causal": {"causal": True},
    "mask": {"mask": draw().bools(1, 1, 40, 150)},
    "weights": {"weights": True},
}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", GIVEN)
def test_wild_values(value, name):
    """One of them, or a row, or a channel."""
    for tensor in range(3):
        for place in ((0, 0, 5, 3), (0, 1, 5), (0, 1, slice(None), 5)):
            qkv = tensors(40, 150, 16)
            qkv[tensor][place] = value
            check_target(target(), arrange(*qkv, **GIVEN[name]))


@pytest.mark.parametrize("value", [3e38, -3e38, 1e36])
@pytest.mark.parametrize("name", GIVEN)
def test_large_values(value, name):
    """A value near the largest number; scores too large for fp32 are as in fp32."""
    query, key, values = tensors(40, 150, 16)
    values[0, 0, 5, 3] = value
    check_target(target(), arrange(query, key, values, **GIVEN[name]))
    query, key, values = tensors(40, 150, 16)
    query[0, 1, 5, 3] = value
    arguments = arrange(query, key, values, scale=0.01, **GIVEN[name])
    truth = truth_of("attention", arguments)
    true = {
        name: None if t is None else torch.where(truth.expected[name].isfinite(), t, math.nan)
        for name, t in truth.true.items()
    }
    check_target(target(), arguments, truth=replace(truth, true=true))


@pytest.mark.parametrize("size", [1e-30, 1e-34, 1e-36, 1e-42])
@pytest.mark.parametrize("name", GIVEN)
def test_tiny_values(size, name):
    """Where fp32 runs out of bits, errors are no larger than the smallest normal number."""
    for tensor in range(3):
        qkv = list(tensors(40, 150, 16))
        qkv[tensor] = qkv[tensor] * size
        arguments = arrange(*qkv, **GIVEN[name])
        true, expected = oracle("attention", arguments)[0], output_of(arguments, "avx512")
        got = output_of(arguments)
        parity = compare("output", got, expected, true, OUTPUT_FACTOR, least_size=TINY / EPS)
        assert parity.ok, parity
    # One of them among others.
    query, key, value = tensors(40, 150, 16)
    value[:, :, 33] *= size
    value[:, :, :, 3] *= size
    check_target(target(), arrange(query, key, value, **GIVEN[name]))


# Bits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in options(1, 1) if "dropout" not in n])
def test_a_row_does_not_depend_on_the_others(name):
    query, key, value = tensors(200, 300)
    given = options(200, 300)[name]
    arguments = arrange(query, key, value, **given)
    whole = run(target(), arguments)
    for begin, end in ((0, 36), (0, 97), (50, 150)):
        if given.get("causal") and begin:
            continue
        part = dict(given)
        if "mask" in given and given["mask"].shape[2] > 1:
            part["mask"] = given["mask"][:, :, begin:end]
        found = run(target(), arrange(query[:, :, begin:end], key, value, **part))
        for one, two in zip(whole, found, strict=True):
            assert one is two is None or torch.equal(one[:, :, begin:end], two)
    for garbage in (math.nan, math.inf, 1e-40, 1e4):
        dirty = query.clone()
        dirty[:, :, ::2] = garbage
        output = output_of(with_tensors(arguments, dirty, key, value))
        assert torch.equal(output[:, :, 1::2], whole[0][:, :, 1::2]), garbage


@pytest.mark.parametrize("heads", [1, 5])
def test_the_same_bits_with_any_threads(heads, threads):
    for name, given in options(400, 300).items():
        if heads != 2 and "mask" in given and given["mask"].shape[1] > 1:
            given = {**given, "mask": given["mask"][:, :1]}
        arguments = arrange(*tensors(400, 300, 24, heads=heads), **given)
        results = []
        for count in (1, 2, 3, 2):
            torch.set_num_threads(count)
            results.append(run(target(), arguments))
        for other in results[1:]:
            for one, two in zip(results[0], other, strict=True):
                assert one is two is None or torch.equal(one, two), name


# How exact ----------------------------------------------------------------------------------------


def test_as_exact_as_torch():
    """Closer to the truth than torch's attention in fp32."""
    shares = []
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for sizes in ((36, 36, 16), (64, 100, 40), (100, 100, 64), (200, 300, 128), (77, 33, 256)):
        for causal in (False, True):
            query, key, value = tensors(*sizes)
            arguments = arrange(query, key, value, causal=causal)
            got = run(target(), arguments)
            check("attention", got, arguments)
            true = oracle("attention", arguments)[0]
            others = got[0], sdpa(query, key, value, is_causal=causal)
            errors = [(x.double() - true).square().mean().sqrt().item() for x in others]
            shares.append(errors[0] / errors[1])
    assert max(shares) < 1.0, shares
    assert statistics.median(shares) < 0.75, shares
