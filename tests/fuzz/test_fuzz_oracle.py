"""The oracle of the fuzz tests: known random words, derivatives by differences, planted bugs."""

from __future__ import annotations

import dataclasses
from typing import Any

import definitions
import numpy as np
import pytest
import torch
from calls import Drawn
from fuzz_checks import Orders, Wrong, _defined, check_kernels, check_reference
from harness import kernel_of
from hypothesis import HealthCheck, Phase, given, settings
from ops import ROWS
from ops.linear import activation

from transformer_fast.specs import OPS
from transformer_fast.specs.spec import Draw
from transformer_fast.testing import gradients
from transformer_fast.testing.oracle import as_results


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (2**32 - 1, 2**32 - 1),
            (2**32 - 1,) * 4,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_words(key: Any, counter: Any, words: Any) -> None:
    """Test vectors of Random123, the authors' own implementation."""
    assert definitions.philox(key, np.array(counter, np.uint64)).tolist() == list(words)


def _call(op: str) -> tuple[Any, ...]:
    return ROWS[op].small(Draw(torch.float64, "cpu", torch.Generator().manual_seed(7)))[-1]


@pytest.mark.parametrize("act", ["relu", "gelu", "gelu_tanh", "silu"])
def test_slopes_of_activations(act: str) -> None:
    z = np.linspace(-6.0, 6.0, 50)  # 0 is not among them
    step = 1e-6
    high, low = (activation(act, z + d)[0] for d in (step, -step))
    np.testing.assert_allclose(activation(act, z)[1], (high - low) / (2 * step), atol=1e-8)


@pytest.mark.parametrize("op", OPS)
def test_gradients_are_derivatives(op: str) -> None:
    arguments = _call(op)
    results, back = _defined(op, arguments)
    generator = np.random.default_rng(0)
    starts = [generator.standard_normal(x.shape) for x in results]
    found = back(*starts)
    for name in OPS[op].gradients_of:
        place = OPS[op].arguments.index(name)
        value = arguments[place]
        way = torch.from_numpy(generator.standard_normal(value.shape))
        along = []
        for step in (1e-6, -1e-6):
            moved = list(arguments)
            moved[place] = value + step * way
            results, _ = _defined(op, tuple(moved))
            along.append(sum((s * x).sum() for s, x in zip(starts, results, strict=True)))
        difference = (along[0] - along[1]) / 2e-6
        np.testing.assert_allclose((found[name] * way.numpy()).sum(), difference, rtol=1e-6)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy * (1 + 64 * torch.finfo(dy.dtype).eps)


BUGS = {
    "a zero row": lambda y: torch.cat((y[:-1], torch.zeros_like(y[-1:]))),
    "not written": lambda y: torch.cat((y[:-1], torch.full_like(y[-1:], torch.nan))),
    "rounded to fewer bits": lambda y: y * (1 + 16 * torch.finfo(y.dtype).eps),
    "in the gradients": _WrongGradient.apply,
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("op", OPS)
def test_a_planted_bug_is_found(op: str, bug: str) -> None:
    """In a few dozen calls, whatever the op."""
    kernel = kernel_of(op, "reference")

    def run(*arguments: Any) -> Any:
        result = kernel.run(*arguments)
        one, *rest = result if isinstance(result, tuple) else (result,)
        one = BUGS[bug](one) if one.dim() and one.shape[0] else one
        return (one, *rest) if rest else one

    wrong = dataclasses.replace(kernel, run=run)

    @settings(max_examples=40, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(ROWS[op].drawn(torch.float32))
    def check(drawn: Drawn) -> None:
        names = drawn.names if bug == "in the gradients" else ()
        check_kernels(op, drawn.arguments, names, drawn.offset, [(wrong, None)])

    with pytest.raises(Wrong):
        check()


@pytest.mark.parametrize("op", OPS)
def test_other_orders_are_the_same_op(op: str) -> None:
    arguments = _call(op)
    expected = gradients(op, OPS[op].reference, arguments)
    for seed in range(3):
        results = zip(
            as_results(Orders(op, seed)(*arguments)),
            as_results(OPS[op].reference(*arguments)),
            strict=True,
        )
        for got, result in results:
            torch.testing.assert_close(got, result, rtol=0, atol=1e-14)
        found = gradients(op, Orders(op, seed), arguments)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_a_wrong_reference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The yardstick of the budget is checked, too."""
    from transformer_fast import reference

    right = reference.linear
    monkeypatch.setattr(reference, "linear", lambda *given: right(*given) * (1 + 1e-6))
    with pytest.raises(Wrong, match="not the definition"):
        check_reference("linear", (torch.ones(3, 4), torch.ones(5, 4), None, None, None), ())
