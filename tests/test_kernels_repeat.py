"""Results do not depend on threads, on earlier calls, or on what another thread does meanwhile."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import (
    Target,
    check_threads,
    drawn,
    in_threads,
    in_use,
    on,
    run,
    same_bits,
    targets,
    targets_and_cases,
)
from ops import ROWS

from transformer_fast.specs import OPS
from transformer_fast.specs.spec import Draw
from transformer_fast.testing import check
from transformer_fast.testing.oracle import as_results

pytestmark = pytest.mark.usefixtures("two_threads")

NATIVE = [p for p in targets() if p.values[0].kernel.backend == "cpu"]


def large(target: Target, filling: bool = False) -> list[tuple[Any, ...]]:
    """Calls with work for several threads; ``filling``: those that leave NaN in all scratch memory."""
    row = ROWS[target.op]
    make = (filling and row.filling) or row.large
    return make(Draw(target.dtype, "cpu", torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("target", NATIVE)
def test_thread_counts_agree(target, threads):
    for arguments in large(target):
        check_threads(lambda: run(target, arguments), (1, 2, 3, 4, 1))  # noqa: B023


@pytest.mark.parametrize(("target", "case"), targets_and_cases(all_isas=False))
def test_two_runs_agree(target, case):
    arguments = on(target, drawn(target.op, case, target.dtype))
    first, second = (run(target, arguments) for _ in range(2))
    assert same_bits(first, second)


@pytest.mark.parametrize("target", NATIVE)
def test_garbage_of_an_earlier_call_is_not_read(target):
    """Scratch memory is kept between calls; here it is full of NaN from a larger one."""
    calls = [c for c in large(target) if not target.refusal(c)]
    filling = [c for c in large(target, filling=True) if not target.refusal(c)]
    small = [drawn(target.op, c.name, target.dtype) for c in OPS[target.op].cases]
    small = [arguments for arguments in small if not target.refusal(arguments)]
    clean = [run(target, arguments) for arguments in (*small, *calls)]
    for arguments, before in zip((*small, *calls), clean, strict=True):
        for call in filling:
            run(target, tuple(_all_nan(x) for x in call))
        assert same_bits(run(target, arguments), before)


def _all_nan(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.full_like(value, math.nan)
    return value


@pytest.mark.parametrize("target", NATIVE)
def test_a_result_is_not_overwritten_by_the_next_call(target):
    for arguments in large(target):
        first = run(target, arguments)
        kept = [None if x is None else x.clone() for x in as_results(first)]
        run(target, tuple(_all_nan(x) for x in arguments))
        assert same_bits(first, tuple(kept))


@pytest.mark.parametrize("target", [p for p in NATIVE if p.values[0].isa in (None, "avx2")])
def test_python_threads_do_not_disturb_each_other(target):
    calls = large(target)
    with in_use(target.isa), torch.no_grad():
        expected = [target.kernel.run(*call) for call in calls]
        wrong: list[int] = []

        def work(offset: int) -> None:
            for turn in range(12):
                place = (turn + offset) % len(calls)
                with torch.no_grad():
                    if not same_bits(target.kernel.run(*calls[place]), expected[place]):
                        wrong.append(place)

        in_threads(work, 3)
    assert wrong == []


def lazily_negative(x: torch.Tensor) -> torch.Tensor:
    """Equal to x, with the sign yet to be applied."""
    return torch._neg_view(-x)


@pytest.mark.parametrize("target", targets(all_isas=False))
def test_lazily_negated_views(target):
    arguments = drawn(target.op, OPS[target.op].cases[0].name, target.dtype)
    expected = run(target, on(target, arguments))
    floating = [isinstance(x, torch.Tensor) and x.is_floating_point() for x in arguments]
    for place in (p for p, is_floating in enumerate(floating) if is_floating):
        called = list(arguments)
        called[place] = lazily_negative(arguments[place])
        assert called[place].is_neg()
        assert same_bits(run(target, on(target, tuple(called))), expected)


@pytest.mark.parametrize("target", targets(all_isas=False))
def test_inference_mode_and_parameters(target):
    arguments = on(target, drawn(target.op, OPS[target.op].cases[0].name, target.dtype))

    def wrapped():
        return tuple(
            torch.nn.Parameter(x.clone(), requires_grad=False)
            if isinstance(x, torch.Tensor) and x.is_floating_point()
            else x
            for x in arguments
        )

    parameters = wrapped()
    first = run(target, parameters)
    with torch.inference_mode():
        assert same_bits(run(target, parameters), first)
        # Those have no version counter.
        assert same_bits(run(target, wrapped()), run(target, arguments))
    assert same_bits(run(target, parameters), first)
    check(target.op, first, arguments)


CHANGES = {
    "in place": lambda w: w.mul_(2),
    "through .data": lambda w: w.data.mul_(2),
    "copied": lambda w: w.copy_(w * 2),
    "assigned to .data": lambda w: setattr(w, "data", w.detach() * 2),
    "through NumPy": lambda w: w.detach().numpy().__imul__(2),
}


def weights_of(target: Target) -> list[str]:
    return [n for n in OPS[target.op].gradients_of if n.startswith("weight")]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("target", [p for p in targets(all_isas=False) if weights_of(p.values[0])])
def test_a_changed_weight_is_seen(target, change):
    """Whatever a kernel keeps of a parameter must not outlive the parameter's values."""
    if change == "through NumPy" and target.dtype == torch.bfloat16:
        pytest.skip("NumPy has no bfloat16")
    spec = OPS[target.op]
    arguments = drawn(target.op, spec.cases[0].name, target.dtype)
    for name in weights_of(target):
        place = spec.arguments.index(name)
        parameter = torch.nn.Parameter(on(target, arguments)[place].clone())
        called = list(on(target, arguments))
        called[place] = parameter
        first = run(target, tuple(called))
        with torch.no_grad():
            CHANGES[change](parameter)
        second = run(target, tuple(called))
        called[place] = torch.nn.Parameter(parameter.detach().clone())
        assert same_bits(second, run(target, tuple(called)))
        assert not same_bits(second, first)
