"""Gradients of the references against finite differences, in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from transformer_fast.specs import OPS
from transformer_fast.specs.attention_cases import arrange
from transformer_fast.testing.oracle import as_results, is_floating

DOUBLE = torch.float64
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


def small(op):
    def draw(*shape):
        return torch.randn(shape, dtype=DOUBLE)

    seed = torch.tensor(9)
    qkv = draw(2, 2, 3, 2), draw(2, 2, 4, 2), draw(2, 2, 4, 3)
    mask = torch.rand(2, 1, 3, 4) < 0.6
    mask[0, 0, 1] = False  # a row that sees nothing
    lengths = torch.tensor([3, 0])
    return {
        "layer_norm": [(draw(3, 4), (4,), draw(4), draw(4), 1e-5)],
        "add_layer_norm": [
            (draw(3, 4), draw(3, 4), (4,), draw(4), draw(4), 1e-5, p, seed) for p in (0.0, 0.4)
        ],
        "attention": [
            arrange(*qkv, weights=True),
            arrange(*qkv, mask=mask, weights=True),
            arrange(*qkv, mask=draw(1, 2, 3, 4), causal=True),
            arrange(*qkv, lengths=lengths, scale=-0.7, dropout_p=0.3, seed=seed),
            arrange(draw(1, 4, 3, 2), *(draw(1, 2, 3, 2) for _ in range(2)), gqa=True),
        ],
        "linear": [
            (draw(3, 4), draw(2, 4), draw(2), name, draw(3, 2))
            for name in (None, "relu", "gelu", "gelu_tanh", "silu", torch.tanh)
        ],
        "feed_forward": [
            (draw(3, 2), draw(4, 2), draw(4), draw(2, 4), draw(2), name, p, seed)
            for name, p in (("relu", 0.0), ("gelu", 0.3), ("gelu_tanh", 0.0), ("silu", 0.5))
        ],
        "cross_entropy": [(draw(3, 4), torch.tensor([2, 1, 3]), 1, s) for s in (0.0, 0.2)],
        "linear_cross_entropy": [
            (draw(3, 2), draw(4, 2), bias, torch.tensor([2, 1, 3]), 1, 0.2)
            for bias in (None, draw(4))
        ],
    }[op]


@pytest.mark.parametrize("op", OPS)
def test_every_element_and_twice(op):
    for arguments in small(op):
        function, leaves = differentiable(op, arguments)
        assert gradcheck(function, leaves)
        assert gradgradcheck(function, leaves, fast_mode=True)
