"""Planted bugs, op by op, that the ruler must fail."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from transformer_fast import reference, testing
from transformer_fast.reference.linear import activate
from transformer_fast.specs import OPS


def arguments_of(op: str, case: str, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    return OPS[op].case(case).build(dtype, "cpu", torch.Generator().manual_seed(0))


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
