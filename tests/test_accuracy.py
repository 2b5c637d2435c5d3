"""The ruler itself: its arithmetic, and that it fails what is wrong."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from transformer_fast import _native, reference, testing
from transformer_fast.reference.linear import activate
from transformer_fast.specs import OPS
from transformer_fast.testing.gradients import upstream
from transformer_fast.testing.parity import compare

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def arguments_of(op: str, case: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return OPS[op].case(case).build(dtype, "cpu", torch.Generator().manual_seed(0))


@pytest.mark.parametrize("op", OPS)
def test_another_order_of_sums_passes(op, generator):
    """fp64 arithmetic rounded at the end, and the reference on reversed sums, are both right."""
    for case in OPS[op].cases:
        arguments = case.build(torch.float32, "cpu", generator)
        rounded = tuple(None if x is None else x.float() for x in testing.oracle(op, arguments))
        parity = testing.check(op, rounded[0] if len(rounded) == 1 else rounded, arguments)
        assert parity.ratio <= 1.0


def test_truths_of_the_same_values_are_worked_out_once(monkeypatch):
    once = arguments_of("linear", "bias")
    for truth in (testing.truth_of, testing.truth_of_gradients):
        known = truth("linear", once)
        assert truth("linear", testing.all_among_nan(once)) is known
        changed = once[0].clone()
        changed.view(-1)[-1] += 1
        for other in (
            (changed, *once[1:]),
            (once[0].t().contiguous().t(), *once[1:]),
            (once[0][:-1], *once[1:]),
            (*once[:3], "relu", once[4]),
        ):
            assert truth("linear", other) is not known
        with monkeypatch.context() as patch:
            patch.setattr(reference, "linear", lambda *a, right=reference.linear: 2 * right(*a))
            assert truth("linear", once) is not known
        assert truth("linear", once) is known


def test_truths_of_single_elements_with_any_stride():
    one = torch.randn(1, 2)[:, ::2]
    assert one.stride(-1) == 2
    assert one.is_contiguous()
    testing.truth_of("linear", (one, one, None, None, None))


def test_remembered_truths_are_bounded(monkeypatch):
    module = importlib.import_module("transformer_fast.testing.oracle")
    monkeypatch.setattr(module, "MOST_REMEMBERED", 0)
    once = torch.randn(3, 5), torch.randn(2, 5), None, None, None
    assert testing.truth_of("linear", once) is not testing.truth_of("linear", once)


# Gradients ---------------------------------------------------------------------------------------


class WrongGradient(torch.autograd.Function):
    """The identity, whose gradient has a bug."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bug: str) -> Tensor:
        ctx.bug = bug
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        if ctx.bug == "doubled":
            grad = grad * 2
        elif ctx.bug == "zero":
            grad = torch.zeros_like(grad)
        elif ctx.bug == "NaN":
            grad.view(-1)[-1] = math.nan
        elif ctx.bug == "one element":
            grad.view(-1)[grad.numel() // 2] += 1e-4 * grad.abs().max()
        elif ctx.bug == "rounded to bf16":
            grad = grad.bfloat16().to(grad.dtype)
        return grad, None


@pytest.mark.parametrize("bug", ["doubled", "zero", "NaN", "one element", "rounded to bf16"])
@pytest.mark.parametrize(
    ("op", "case", "name"),
    [
        ("layer_norm", "rows of 64", "weight"),
        ("add_layer_norm", "rows of 64", "residual"),
        ("attention", "causal", "key"),
        ("attention", "float mask (B,H,T,S)", "attn_mask"),
        ("linear", "residual", "weight"),
        ("feed_forward", "gelu", "weight1"),
    ],
)
def test_wrong_gradient_fails(op, case, name, bug):
    spec, arguments = OPS[op], arguments_of(op, case)
    place = spec.arguments.index(name)

    def run(*called):
        wrong = WrongGradient.apply(called[place], bug)
        return spec.reference(*called[:place], wrong, *called[place + 1 :])

    with pytest.raises(AssertionError, match=rf"^{op}: grad of {name}\["):
        testing.check_gradients(op, run, arguments)


def test_gradients_by_hand():
    arguments = (torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), None, None, None)
    found = testing.gradients("linear", reference.linear, arguments)
    start = upstream(torch.empty(1, 1), 0)
    assert torch.equal(found["input"], start * torch.tensor([[3.0, 4.0]]))
    assert torch.equal(found["weight"], start * torch.tensor([[1.0, 2.0]]))
    assert found.keys() == {"input", "weight"}


def test_a_result_cut_off_from_autograd_is_told():
    arguments = arguments_of("linear", "bias")
    with pytest.raises(AssertionError, match="no result has a gradient"):
        testing.check_gradients("linear", lambda *a: reference.linear(*a).detach(), arguments)


# The arithmetic of the budget --------------------------------------------------------------------

TRUE = torch.tensor([1.0, -4.0, 2.0], dtype=torch.float64)
EPS = torch.finfo(torch.float32).eps


def test_limit_by_hand():
    expected = torch.tensor([1.0, -4.0 - 8 * EPS, 2.0])
    found = compare("x", torch.tensor([1.0, -4.0, 2.0 + 4 * EPS]), expected, TRUE, 2.0)
    assert found.reference_error == 8 * EPS
    assert found.error == 4 * EPS
    assert found.limit == 2 * 8 * EPS + EPS * 4
    assert found.ratio == 0.5
    assert found.ok
    assert found.where == "x[2] is 2.00000048, not 2"


def test_a_lucky_reference_counts_as_half_a_unit_of_rounding():
    found = compare("x", TRUE.float(), TRUE.float(), TRUE, 2.0)
    assert found.reference_error == 0.0
    assert found.limit == 2 * (EPS / 2 * 4) + EPS * 4
    assert found.ratio == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_not_finite_fails_first(bad):
    found = compare("x", torch.tensor([1.0, bad, 2.0]), TRUE.float(), TRUE, 1e9)
    assert not found.ok
    assert found.where == f"x[1] is {bad:g}, not -4"


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_where_the_oracle_is_not_finite_the_result_must_be_the_same(special):
    true = torch.tensor([1.0, special], dtype=torch.float64)
    right = torch.tensor([1.0, special])
    assert compare("x", right, right, true, 2.0).ok
    assert not compare("x", torch.tensor([1.0, 7.0]), right, true, 2.0).ok
    assert not compare("x", torch.tensor([2.0, special]), right, true, 2.0).ok


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (torch.zeros(3, 1), r"x is float32 \[3, 1\] on cpu instead of float32 \[3\] on cpu"),
        (torch.zeros(3).bfloat16(), r"x is bfloat16 \[3\]"),
        (torch.zeros(3, device="meta"), r"on meta instead of"),
        (None, "x is None instead of"),
    ],
)
def test_the_form_must_be_right_too(got, message):
    found = compare("x", got, TRUE.float(), TRUE, 2.0)
    assert not found.ok
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found.where)


def test_empty_and_missing_results_are_right():
    empty = torch.empty(0, 3)
    assert compare("x", empty, empty, empty.double(), 2.0).ok
    assert compare("x", None, None, None, 2.0).ok


# Hostile memory ----------------------------------------------------------------------------------


def test_fresh_memory_is_nan_and_is_ordinary_again():
    with testing.nan_memory():
        assert torch.empty(100).isnan().all()
        assert torch.randn(3).new_empty(50).isnan().all()
        assert torch.empty_like(torch.randn(9).bfloat16()).isnan().all()
        if _native.module is not None:
            for size in (5, 1 << 20):  # the C library's memory, and kept memory
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    like = torch.zeros(size, dtype=dtype)
                    assert torch.ops.transformer_fast.cpu_fresh(like).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.skipif(_native.module is None, reason=_native.why_not or "needs the native module")
def test_operators_memory_is_nan_until_the_outermost_block_ends():
    assert _native.module is not None
    with testing.nan_memory():
        with testing.nan_memory():
            pass
        assert torch.ops.transformer_fast.cpu_fresh(torch.zeros(5)).isnan().all()
    assert not _native.module.fill_fresh(False)


def test_memory_is_ordinary_again_after_an_error():
    with pytest.raises(KeyError), testing.nan_memory():
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.randn(6, 8)[::2, 1:7:3],
        torch.randn(1, 5).expand(4, 5),
        torch.randn(2, 1, 3).expand(2, 4, 3),
        torch.randn(()),
        torch.randn(0, 3),
        torch.rand(5, 6) < 0.5,
        torch.arange(7),
    ],
    ids=lambda t: f"{t.dtype} {list(t.shape)} {list(t.stride())}",
)
@pytest.mark.parametrize("offset", [0, 1, 5])
def test_among_nan_keeps_values_and_strides(tensor, offset):
    placed = testing.among_nan(tensor, offset)
    assert torch.equal(placed, tensor)
    assert placed.stride() == tensor.stride()
    assert placed.data_ptr() % 64 == offset * tensor.element_size() % 64 or not tensor.numel()
    if tensor.is_floating_point():
        around = placed.as_strided((placed.untyped_storage().nbytes() // 4,), (1,), 0)
        distinct = tensor.numel() and 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            distinct *= size if stride else 1
        assert around.isfinite().sum() == distinct


# Planted bugs: each has the signature of the reference -------------------------------------------


def layer_norm_bug(bug: str):
    def run(x, shape, weight, bias, eps):
        dims = tuple(range(-len(shape), 0))
        x = x.clone()
        if bug == "tail column dropped from the statistics":
            mean = x[..., :-1].mean(dim=dims, keepdim=True)
        else:
            mean = x.mean(dim=dims, keepdim=True)
        centred = x - mean
        variance = (centred * centred).mean(dim=dims, keepdim=True)
        if bug == "variance by E[x^2] - E[x]^2":
            variance = (x * x).mean(dim=dims, keepdim=True) - mean * mean
        if bug == "unbiased variance":
            variance = x.var(dim=dims, keepdim=True)
        if bug == "eps outside the root":
            y = centred / (variance.sqrt() + eps)
        elif bug == "no eps":
            y = centred * torch.rsqrt(variance)
        elif bug == "reciprocal root to 12 bits":
            y = centred * torch.rsqrt(variance + eps) * (1 + 2.0**-13)
        else:
            y = centred * torch.rsqrt(variance + eps)
        if bug == "weight + 1":
            weight = weight + 1
        if weight is not None and bug != "missing weight":
            y = y * weight
        if bias is not None and bug != "missing bias":
            y = y + bias
        if bug == "last row not written":
            y[-1] = math.nan
        if bug == "last column zero":
            y[..., -1] = 0
        return y.to(x.dtype)

    return run


LAYER_NORM_BUGS = {
    "tail column dropped from the statistics": "rows of 64",
    "variance by E[x^2] - E[x]^2": "values far from zero",
    "unbiased variance": "rows of 64",
    "eps outside the root": "values of the size of eps",
    "no eps": "values of the size of eps",
    "reciprocal root to 12 bits": "rows of 64",
    "weight + 1": "rows of 64",
    "missing weight": "rows of 64",
    "missing bias": "rows of 64",
    "last row not written": "rows of 64",
    "last column zero": "prime columns",
}


def add_layer_norm_bug(bug: str):
    def run(x, residual, shape, weight, bias, eps, p, seed):
        y, total = reference.add_layer_norm(x, residual, shape, weight, bias, eps, p, seed)
        if bug == "sum is the input":
            total = x
        if bug == "norm of the input alone":
            y = reference.layer_norm(x, shape, weight, bias, eps)
        if bug == "dropout on the sum":
            total = reference.dropout(residual + x, p, seed)
        if bug == "dropout not rescaled":
            total = residual + reference.dropout(x, p, seed) * (1 - p)
        if bug == "another seed":
            y, total = reference.add_layer_norm(x, residual, shape, weight, bias, eps, p, seed + 1)
        return y, total

    return run


ADD_LAYER_NORM_BUGS = {
    "sum is the input": "rows of 64",
    "norm of the input alone": "rows of 64",
    "dropout on the sum": "dropout",
    "dropout not rescaled": "dropout",
    "another seed": "dropout",
}


def rms_norm_bug(bug: str):
    def run(x, shape, weight, eps):
        if bug == "the mean is subtracted":
            x = x - x.mean(dim=tuple(range(-len(shape), 0)), keepdim=True)
        if bug == "no eps":
            eps = 0.0
        if bug == "sum of squares":
            return reference.rms_norm(x, shape, weight, eps) / math.prod(shape) ** 0.5
        if bug == "missing weight":
            weight = None
        return reference.rms_norm(x, shape, weight, eps)

    return run


RMS_NORM_BUGS = {
    "the mean is subtracted": "rows of 64",
    "no eps": "values of the size of eps",
    "sum of squares": "rows of 64",
    "missing weight": "rows of 64",
}


def add_rms_norm_bug(bug: str):
    def run(x, residual, shape, weight, eps, p, seed):
        y, total = reference.add_rms_norm(x, residual, shape, weight, eps, p, seed)
        if bug == "norm of the input alone":
            y = reference.rms_norm(x, shape, weight, eps)
        if bug == "dropout on the sum":
            total = reference.dropout(residual + x, p, seed)
        return y, total

    return run


ADD_RMS_NORM_BUGS = {"norm of the input alone": "rows of 64", "dropout on the sum": "dropout"}


def attention_bug(bug: str):
    def run(q, k, v, mask, lengths, causal, scale, p, seed, gqa, need, ends):
        def right(q=q, k=k, v=v, mask=mask, lengths=lengths, causal=causal, scale=scale):
            return reference.attention(
                q, k, v, mask, lengths, causal, scale, p, seed, gqa, need, ends
            )

        if bug == "scale 1 / D":
            return right(scale=1 / q.shape[-1])
        if bug == "no scale":
            return right(scale=1.0)
        if bug == "scale off by 1e-4":
            return right(scale=(1 + 1e-4) / math.sqrt(q.shape[-1]))
        if bug == "last key dropped":
            return right(k=k[:, :, :-1], v=v[:, :, :-1])
        if bug == "flipped mask":
            return right(mask=~mask)
        if bug == "mask forgotten":
            return right(mask=None)
        if bug == "mask of the first head for all":
            return right(mask=mask[:, :1])
        if bug == "mask of the first batch element for all":
            return right(mask=mask[:1])
        if bug == "mask transposed":
            return right(mask=mask.flip(-1))
        if bug == "causal off by one, strict":
            t, s = q.shape[-2], k.shape[-2]
            return right(mask=torch.ones(1, 1, t, s, dtype=torch.bool).tril(-1), causal=False)
        if bug == "causal off by one, lax":
            t, s = q.shape[-2], k.shape[-2]
            return right(mask=torch.ones(1, 1, t, s, dtype=torch.bool).tril(1), causal=False)
        if bug == "causal at the lower right":
            t, s = q.shape[-2], k.shape[-2]
            return right(mask=torch.ones(1, 1, t, s, dtype=torch.bool).tril(s - t), causal=False)
        if bug == "causal forgotten":
            return right(causal=False)
        if bug == "key lengths off by one":
            return right(lengths=lengths - 1)
        if bug == "key lengths forgotten":
            return right(lengths=None)
        if bug == "heads interleaved":
            repeat = q.shape[1] // k.shape[1]
            return right(k=k.repeat(1, repeat, 1, 1), v=v.repeat(1, repeat, 1, 1))
        output, weights = right()
        if bug == "row that sees nothing gets the mean":
            nothing = (output == 0).all(dim=-1, keepdim=True)
            output = torch.where(nothing, v.mean(dim=-2, keepdim=True), output)
        if bug == "row that sees nothing gets NaN":
            nothing = (output == 0).all(dim=-1, keepdim=True)
            output = output.masked_fill(nothing, math.nan)
        if bug == "one element of one head":
            output = output.clone()
            output[-1, -1, -1, -1] += 1e-5
        if bug == "weights not normalised":
            weights = weights * weights.shape[-1]
        if bug == "weights left out":
            weights = None
        return output, weights

    return run


ATTENTION_BUGS = {
    "scale 1 / D": "plain",
    "no scale": "plain",
    "scale off by 1e-4": "plain",
    "last key dropped": "plain",
    "flipped mask": "bool mask (B,H,T,S)",
    "mask forgotten": "float mask, distance",
    "mask of the first head for all": "float mask, distance",
    "mask of the first batch element for all": "bool mask (B,H,T,S)",
    "mask transposed": "bool mask (T,S)",
    "causal off by one, strict": "causal",
    "causal off by one, lax": "causal",
    "causal at the lower right": "causal, more keys",
    "causal forgotten": "causal",
    "key lengths off by one": "key lengths",
    "key lengths forgotten": "key lengths",
    "heads interleaved": "fewer key heads",
    "row that sees nothing gets the mean": "bool mask, empty rows",
    "row that sees nothing gets NaN": "bool mask, empty rows",
    "one element of one head": "plain",
    "weights not normalised": "weights",
    "weights left out": "weights",
}


def linear_bug(bug: str):
    def run(x, weight, bias, activation, residual):
        if bug == "missing bias":
            return reference.linear(x, weight, None, activation, residual)
        if bug == "missing residual":
            return reference.linear(x, weight, bias, activation, None)
        if bug == "activation after the residual":
            return activate(reference.linear(x, weight, bias, None, residual), activation)
        if bug == "no activation":
            return reference.linear(x, weight, bias, None, residual)
        if bug == "gelu by tanh":
            return reference.linear(x, weight, bias, "gelu_tanh", residual)
        if bug == "last input dropped":
            return reference.linear(x[..., :-1], weight[:, :-1], bias, activation, residual)
        if bug == "sums in bf16":
            return reference.linear(
                x.bfloat16(), weight.bfloat16(), bias.bfloat16(), None, None
            ).to(x.dtype)
        y = reference.linear(x, weight, bias, activation, residual)
        if bug == "result transposed":
            return y.mT.contiguous()
        if bug == "result in fp64":
            return y.double()
        if bug == "last columns not written":
            y[..., -3:] = math.nan
        return y

    return run


LINEAR_BUGS = {
    "missing bias": "bias",
    "missing residual": "residual",
    "activation after the residual": "silu, residual, no bias",
    "no activation": "relu",
    "gelu by tanh": "gelu",
    "last input dropped": "primes",
    "sums in bf16": "long sums",
    "result transposed": "bias",
    "result in fp64": "bias",
    "last columns not written": "primes",
}


def feed_forward_bug(bug: str):
    def run(x, w1, b1, w2, b2, activation, p, seed):
        if bug == "missing first bias":
            b1 = None
        if bug == "missing second bias":
            b2 = None
        if bug == "no activation":
            activation = lambda hidden: hidden  # noqa: E731
        if bug == "gelu by tanh":
            activation = "gelu_tanh"
        if bug == "last hidden value dropped":
            w1, b1, w2 = w1[:-1], b1[:-1], w2[:, :-1]
        if bug == "dropout on the result":
            y = reference.feed_forward(x, w1, b1, w2, b2, activation, 0.0, None)
            return reference.dropout(y, p, seed)
        if bug == "dropout forgotten":
            p = 0.0
        return reference.feed_forward(x, w1, b1, w2, b2, activation, p, seed)

    return run


FEED_FORWARD_BUGS = {
    "missing first bias": "relu",
    "missing second bias": "relu",
    "no activation": "relu",
    "gelu by tanh": "gelu",
    "last hidden value dropped": "primes",
    "dropout on the result": "dropout",
    "dropout forgotten": "dropout",
}


def cross_entropy_bug(bug: str):
    def run(x, target, ignored, smoothing):
        if bug == "smoothing forgotten":
            smoothing = 0.0
        if bug == "smoothing over the other classes":
            smoothing = smoothing * x.shape[1] / (x.shape[1] - 1)
        if bug == "padding counts":
            target = target.masked_fill(target == ignored, 0)
        if bug == "next class":
            target = torch.where(target == ignored, target, (target + 1) % x.shape[1])
        if bug == "last class left out":
            x = torch.cat((x[:, :-1], torch.full_like(x[:, :1], -1e4)), dim=1)
        if bug == "1e-4":
            return reference.cross_entropy(x, target, ignored, smoothing) * (1 + 1e-4)
        return reference.cross_entropy(x, target, ignored, smoothing)

    return run


CROSS_ENTROPY_BUGS = {
    "smoothing forgotten": "smoothing",
    "smoothing over the other classes": "smoothing",
    "padding counts": "padding",
    "next class": "plain",
    "last class left out": "smoothing",
    "1e-4": "plain",
}


def linear_cross_entropy_bug(bug: str):
    def run(x, weight, bias, target, ignored, smoothing):
        if bug == "no bias":
            bias = None
        if bug == "padding counts":
            target = target.masked_fill(target == ignored, 0)
        if bug == "second part of the classes left out":
            weight, bias = weight[:4096], bias[:4096]
            target = target.clamp(max=4095)
        return reference.linear_cross_entropy(x, weight, bias, target, ignored, smoothing)

    return run


LINEAR_CROSS_ENTROPY_BUGS = {
    "no bias": "bias",
    "padding counts": "primes",
    "second part of the classes left out": "more classes than one part",
}

PLANTED = {
    "layer_norm": (layer_norm_bug, LAYER_NORM_BUGS),
    "add_layer_norm": (add_layer_norm_bug, ADD_LAYER_NORM_BUGS),
    "rms_norm": (rms_norm_bug, RMS_NORM_BUGS),
    "add_rms_norm": (add_rms_norm_bug, ADD_RMS_NORM_BUGS),
    "attention": (attention_bug, ATTENTION_BUGS),
    "linear": (linear_bug, LINEAR_BUGS),
    "feed_forward": (feed_forward_bug, FEED_FORWARD_BUGS),
    "cross_entropy": (cross_entropy_bug, CROSS_ENTROPY_BUGS),
    "linear_cross_entropy": (linear_cross_entropy_bug, LINEAR_CROSS_ENTROPY_BUGS),
}
ALL_BUGS = [
    pytest.param(op, bug, case, id=f"{op}-{bug}")
    for op, (_, bugs) in PLANTED.items()
    for bug, case in bugs.items()
]


def test_every_op_has_planted_bugs():
    assert PLANTED.keys() == OPS.keys()


@pytest.mark.parametrize(("op", "bug", "case"), ALL_BUGS)
def test_planted_bug_fails(op, bug, case):
    arguments = arguments_of(op, case)
    result = PLANTED[op][0](bug)(*arguments)
    assert not testing.measure(op, result, arguments).ok
    with pytest.raises(AssertionError, match=f"^{op}: "):
        testing.check(op, result, arguments)


# Bugs of the size of a half type's rounding, which it cannot show.
FINE = (
    *("1e-4", "12 bits", "one element", "gelu by tanh", "eps outside", "sums in bf16", "E[x^2]"),
    *("tail column", "unbiased"),
)
COARSE_BUGS = [bug for bug in ALL_BUGS if not any(word in str(bug.id) for word in FINE)]


@pytest.mark.parametrize(("op", "bug", "case"), COARSE_BUGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_planted_bug_fails_in_half_types(op, bug, case, dtype):
    arguments = arguments_of(op, case, dtype)
    assert not testing.measure(op, PLANTED[op][0](bug)(*arguments), arguments).ok


@pytest.mark.parametrize("op", OPS)
def test_without_a_bug_the_same_code_passes(op):
    run, bugs = PLANTED[op]
    for case in set(bugs.values()):
        arguments = arguments_of(op, case)
        testing.check(op, run("none")(*arguments), arguments)
