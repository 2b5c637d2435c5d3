"""The references, compared with PyTorch, finite differences and definitions; the op table."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from harness import DTYPES, drawn, same_bits
from ops import ROWS, kept, philox
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from transformer_fast import _native, functional
from transformer_fast.measure.accuracy import unchecked
from transformer_fast.reference import (
    attention,
    dropout,
    int8_linear,
    layer_norm,
    linear,
    quantize_weight,
)
from transformer_fast.reference.dropout import draw_seed, philox_numbers, threshold
from transformer_fast.specs import OPS
from transformer_fast.specs.attention import arrange
from transformer_fast.specs.spec import Draw
from transformer_fast.testing.oracle import as_results, is_floating
from transformer_fast.testing.parity import relative_error

DOUBLE = torch.float64
needs_native = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))


#: Words in the names of cases for which PyTorch specifies other results, or none.
ODD = ("garbage", "empty", "nothing", "ends", "finfo", "callable", "lowest")
#: `_int_mm` of PyTorch 2.13 returns garbage for a single input.
ODD_INT8 = (*ODD, "one input", "one hidden value")


@pytest.mark.parametrize("op", OPS)
def test_references_match_pytorch(op):
    """The function that represents PyTorch in benchmarks computes what the reference does."""
    checked = 0
    odd = ODD_INT8 if op.startswith("int8") else ODD
    for case in OPS[op].cases:
        arguments = case.build(DOUBLE, "cpu", torch.Generator().manual_seed(0))
        dropout_p = OPS[op].named(arguments).get("dropout_p", 0.0)
        if unchecked(dropout_p) or any(word in case.name for word in odd):
            continue
        found, expected = (f(*arguments) for f in (OPS[op].pytorch, OPS[op].reference))
        for one, other in zip(as_results(found), as_results(expected), strict=True):
            torch.testing.assert_close(one, other, msg=lambda message, c=case: f"{c}: {message}")
        checked += 1
    assert checked >= 5


def test_variance_does_not_cancel():
    # All numbers are exact in fp32, but squares of the shifted values would not be.
    small = torch.tensor([-3.0, -1.0, 1.0, 3.0])
    y = layer_norm(small + 2.0**20, (4,), None, None, 1e-5)
    assert torch.equal(y, layer_norm(small, (4,), None, None, 1e-5))


def in_dtype(arguments, dtype):
    """Returns the arguments with those of the first one's dtype in ``dtype``."""
    own = arguments[0].dtype
    return tuple(x.to(dtype) if is_floating(x) and x.dtype == own else x for x in arguments)


@pytest.mark.parametrize("op", OPS)
def test_references_compute_in_fp32(op):
    """fp32 is the unit of kernels' errors; low precision is computed in fp32."""
    at_once = not op.startswith(("add_", "linear", "feed_forward"))
    for case, (dtype, wide) in itertools.product(
        OPS[op].cases, ((torch.float32, DOUBLE), (torch.bfloat16, torch.float32))
    ):
        arguments = drawn(op, case.name, dtype)
        found, exact = (OPS[op].reference(*in_dtype(arguments, d)) for d in (dtype, wide))
        for one, other in zip(as_results(found), as_results(exact), strict=True):
            if one is not None and dtype == torch.float32:
                assert relative_error(one, other) < 1e-4, case
            elif one is not None and at_once:  # the other ops round intermediate results
                assert same_bits(one, other.to(one.dtype)), case


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
@pytest.mark.parametrize("lengths", [[2, 0], [-1, 3], [9, 1]])
def test_rows_beyond_query_lengths_have_no_effect(lengths, garbage):
    """Neither the rows beyond the lengths nor their incoming gradients have any effect."""
    q, k, v = (torch.randn(2, 2, n, 6) for n in (3, 5, 5))
    lengths = torch.tensor(lengths)
    beyond = (torch.arange(3) >= lengths[:, None])[:, None, :, None]

    def run(query, upstream, **given):
        leaves = [x.detach().requires_grad_() for x in (query, k, v)]
        results = attention(*arrange(*leaves, weights=True, **given))
        ups = [upstream[..., : r.shape[-1]].expand(r.shape) for r in results]
        return (*results, *torch.autograd.grad(results, leaves, ups))

    found = run(q.masked_fill(beyond, garbage), torch.ones(2, 1, 3, 9).masked_fill(beyond, garbage),
                query_lengths=lengths)  # fmt: skip
    upstream = torch.ones(2, 1, 3, 9).masked_fill(beyond, 0.0)
    for got, plain in zip(found, run(q, upstream), strict=True):
        want = plain.masked_fill(beyond, 0.0) if plain.shape[-2] == 3 else plain
        torch.testing.assert_close(got, want)


def _int8_map(rows, outputs, inputs, seed=0):
    """Returns input, quantized weight, its scale and bias."""
    generator = torch.Generator().manual_seed(seed)
    x, weight = (torch.randn(n, inputs, generator=generator) for n in (rows, outputs))
    return x, *quantize_weight(weight), torch.randn(outputs, generator=generator)


def test_int8_weights_match_hand_computed_examples():
    weight = torch.tensor([[127, -1.5, 0.5], [0, 0, 0], [-(2.0**-101), 0, 0]]) / 8
    values, scale = quantize_weight(weight)
    # -1.5 is rounded to even.
    assert values.tolist() == [[127, -2, 0], [0, 0, 0], [0, 0, 0]]
    assert scale.tolist() == [0.125, 0.0, 0.0]


@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-25])
def test_int8_values_differ_by_half_a_step_at_most(scale):
    """Compares each result with the bound that follows from the steps of its row and column."""
    x, weight, scales, _ = _int8_map(37, 29, 61)
    exact = torch.randn(29, 61, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)
    weight, scales = quantize_weight(exact)
    x = x.to(DOUBLE) * scale * torch.logspace(-3, 3, 37, dtype=DOUBLE)[:, None]
    step = (x.amax(-1).clamp(min=0) - x.amin(-1).clamp(max=0)) / 254
    kept = (weight * scales[:, None]).abs().sum(-1)
    bound = 0.5 * (step[:, None] * kept + x.abs().sum(-1)[:, None] * scales) * (1 + 1e-5)
    error = int8_linear(x, weight, scales, None, None, None) - x @ exact.t()
    assert (error.abs() <= bound).all()


def test_int8_rows_are_independent():
    """NaN and infinity give NaN in their rows only; tiny rows and rows of zeros give the bias. A
    range that exceeds float32 gives numbers."""
    # Not gelu, which on some CPUs is NaN at infinity.
    x, *rest, bias = _int8_map(9, 5, 12)
    alone = int8_linear(x, *rest, bias, "relu", None)
    garbage = x.clone()
    garbage[1, 3], garbage[2, 0], garbage[3, 1] = math.nan, math.inf, -math.inf
    garbage[4, :2] = torch.tensor([3e38, -3e38])
    garbage[5], garbage[6] = 0.0, x[6] * 2.0**-110
    found = int8_linear(garbage, *rest, bias, "relu", None)
    assert found[1:4].isnan().all()
    assert not found[4].isnan().any()
    assert same_bits(found[[0, 7, 8]], alone[[0, 7, 8]])
    for row in found[5:7]:
        assert same_bits(row, bias.relu())


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_matches_known_words(key, counter, words):
    """Test vectors of Random123, the implementation by the authors of Philox."""
    assert philox(key, np.array(counter, np.uint64)).tolist() == list(words)


@pytest.mark.parametrize("op", [op for op in OPS if "dropout_p" in OPS[op].arguments])
def test_dropout_applies_to_one_tensor_of_each_op(op, generator):
    """Dropped: a sum's first term, the hidden units, or the normalised attention weights."""
    spec = OPS[op]
    call = spec.named(spec.case("dropout").build(DOUBLE, "cpu", generator))
    found = as_results(spec.reference(*call.values()))
    drop = functools.partial(dropout, p=call["dropout_p"], seed=call["seed"])
    plain = {**call, "dropout_p": 0.0, "seed": None}
    if op == "attention":
        given = {**plain, "need_weights": True}
        expected = [drop(spec.reference(*given.values())[1]) @ call["value"]]
    elif op == "feed_forward":
        maps = [call[name] for name in spec.arguments[1:5]]
        hidden = drop(linear(call["input"], *maps[:2], call["activation"], None))
        expected = [linear(hidden, *maps[2:], None, None)]
    else:
        expected = spec.reference(*{**plain, "input": drop(call["input"])}.values())
    for one, other in zip(found, expected, strict=False):
        torch.testing.assert_close(one, other)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 0x299F31D0A4093822, 2**63 - 1])
@pytest.mark.parametrize("p", [0.0, 1e-300, 2**-16, 0.1, 0.3, 0.5, 1 - 2**-16, 1 - 2**-53, 1.0])
def test_dropout_matches_philox(p, seed):
    """The random number of row and column alone decides; some elements are kept, some dropped.

    A dropped element is 0 whatever its value was.
    """
    drawn = None if p in (0.0, 1.0) else torch.tensor(seed)
    for shape in ((37, 23), (2, 3, 4, 10), (400, 800), (10,), (0, 4), (4, 0)):
        factor = torch.from_numpy(kept(shape, p, seed))
        found = dropout(torch.ones(shape, dtype=DOUBLE), p, drawn)
        assert torch.equal(found, factor)
        assert torch.equal(dropout(factor * math.nan, p, drawn) == 0, factor == 0)
    if drawn is not None and seed == 0:
        numbers = philox_numbers(drawn, 400, 800)
        assert (numbers.min(), numbers.max()) == (0, 65535)
        assert torch.equal(numbers < threshold(p), dropout(torch.ones(400, 800), p, drawn) == 0)
    assert dropout(torch.ones(()), p, drawn).shape == ()


def test_seeds_are_drawn_from_pytorchs_generator():
    torch.manual_seed(8)
    first, second = draw_seed(torch.device("cpu")), draw_seed(torch.device("cpu"))
    torch.manual_seed(8)
    assert torch.equal(draw_seed(torch.device("cpu")), first)
    assert first != second
    assert first.dtype == torch.int64
    assert first >= 0


# Through the public functions ---------------------------------------------------------------------

DRAWS = {
    "add_layer_norm": lambda x: functional.add_layer_norm(x, x, (16,), dropout_p=0.5)[0],
    "feed_forward": lambda x: functional.feed_forward(
        x, torch.eye(16), None, torch.eye(16), None, dropout_p=0.5
    ),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
}


@pytest.mark.parametrize("op", DRAWS)
def test_manual_seed_repeats_dropout(op):
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
def test_checkpointing_repeats_dropout(op, reentrant):
    gradients = []
    for run in (DRAWS[op], lambda t: checkpoint(DRAWS[op], t, use_reentrant=reentrant)):
        x = torch.linspace(-1, 1, 12 * 16).reshape(12, 16).requires_grad_()
        torch.manual_seed(6)
        run(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_calls_without_dropout_draw_no_random_numbers():
    x = torch.randn(12, 16)
    before = torch.get_rng_state()
    functional.add_layer_norm(x, x, (16,))
    functional.feed_forward(x, torch.eye(16), None, torch.eye(16), None)
    functional.scaled_dot_product_attention(x, x, x)
    assert torch.equal(torch.get_rng_state(), before)


def differentiable(op, arguments):
    """Returns a function of the arguments with gradients, and those arguments."""
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

    # gradcheck requires inputs whose elements do not share memory.
    leaves = [arguments[p].detach().clone(memory_format=torch.contiguous_format) for p in places]
    return function, [leaf.requires_grad_() for leaf in leaves]


@pytest.mark.parametrize("op", OPS)
def test_gradcheck_and_gradgradcheck(op, generator):
    for arguments in ROWS[op].small(Draw(DOUBLE, "cpu", generator)):
        function, leaves = differentiable(op, arguments)
        assert gradcheck(function, leaves)
        assert gradgradcheck(function, leaves, fast_mode=True)


# The op table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_case_names_are_unique(op):
    names = [case.name for case in (*OPS[op].cases, *OPS[op].bench_cases)]
    assert len(names) == len(set(names))
    with pytest.raises(KeyError, match="has no case 'nothing'"):
        OPS[op].case("nothing")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_cases_have_enough_elements_for_error_ratios(op, dtype, generator):
    for case in OPS[op].cases:
        arguments = case.build(dtype, "cpu", generator)
        result = OPS[op].reference(*arguments)
        first = result[0] if isinstance(result, tuple) else result
        assert first.numel() >= 250, case.name
        wide = torch.promote_types(dtype, torch.float32)
        assert first.dtype == (wide if "losses" in OPS[op].results else dtype), case.name


def test_flops_and_bytes_match_hand_computed_numbers():
    def made(op, case):
        return OPS[op], drawn(op, case, torch.float32)

    spec, arguments = made("linear", "bias")  # 19 x 48 x 40
    assert spec.flops(arguments) == 2 * 19 * 48 * 40
    assert spec.bytes(arguments) == 4 * (19 * 48 + 40 * 48 + 40 + 19 * 40)
    spec, arguments = made("feed_forward", "no bias")  # 19 x 32 x 96 x 32
    assert spec.flops(arguments) == 2 * 19 * 32 * 96 * 2
    assert spec.bytes(arguments) == 4 * (19 * 32 * 2 + 32 * 96 * 2)
    spec, arguments = made("attention", "causal")  # 2, 2, 31, 31, 16
    assert spec.flops(arguments) == 4 * 2 * 2 * 31 * 31 * 16
    assert spec.useful_flops(arguments) == pytest.approx(4 * 2 * 2 * (31 * 32 / 2) * 16)
    assert spec.bytes(arguments) == 4 * (4 * 2 * 2 * 31 * 16)
    spec, arguments = made("attention", "key lengths")
    visible = arguments[4].sum().item() * 2 * 17
    assert spec.useful_flops(arguments) == pytest.approx(4 * visible * 16)
    spec, arguments = made("add_layer_norm", "rows of 64")
    assert spec.bytes(arguments) == 4 * (4 * 9 * 64 + 2 * 64)
    assert spec.useful_flops(arguments) == spec.flops(arguments) == 9 * 64 * 8


def test_bytes_of_expanded_tensors_are_those_stored():
    spec = OPS["linear"]
    arguments = drawn("linear", "expanded", torch.float32)
    assert spec.bytes(arguments) == 4 * (32 + 40 * 32 + 1 + 40 + 12 * 40)
