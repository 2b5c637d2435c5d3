"""The op table's bench cases, forward, and forward and backward together."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase
from transformer_fast.measure.ops import op_case
from transformer_fast.specs import OPS, Case

from .. import peers
from ..scope import Maker, Scope

#: Beyond these a case is too long for a quick run.
_QUICK_FLOPS, _QUICK_BYTES = 3e9, 5e7
#: fp64 gradients of more than this take too long and too much memory.
_MOST_FLOPS = 2e10


def cases(scope: Scope) -> Iterator[tuple[str, Case]]:
    """The bench cases in the scope; of a quick run, the small ones."""
    for op in scope.ops:
        for case in OPS[op].bench_cases:
            arguments = case.build(scope.dtype, "meta", None)
            small = OPS[op].flops(arguments) <= _QUICK_FLOPS
            if not scope.quick or (small and OPS[op].bytes(arguments) <= _QUICK_BYTES):
                yield op, case


def _contest(scope: Scope, op: str, case: Case) -> BenchmarkCase:
    inputs = scope.draw(op, case)
    others = peers.candidates(scope.peers, "op", op, inputs[0][0])
    return op_case(op, case.name, inputs, scope.backends, others)


def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
    for op, case in cases(scope):
        yield f"{op} {case}", functools.partial(_contest, scope, op, case)


def spread(bias: Tensor) -> Tensor:
    """The bias with +5 and -5 in turn.

    Where a relu's argument is within rounding of 0 its derivative is a matter of luck, and with
    millions of arguments around 0 some always are. These are five deviations away from it.
    """
    return torch.full_like(bias, 5.0).where(torch.arange(len(bias)) % 2 == 0, -5.0)


def spread_biases(model: nn.Module) -> nn.Module:
    """The model, with `spread` biases under its relus."""
    for name, parameter in model.named_parameters():
        if name.endswith("linear1.bias"):
            parameter.data = spread(parameter.data)
    return model


def away_from_the_kink(op: str, arguments: Arguments) -> Arguments:
    """The same call, with `spread` biases under a relu."""
    named = OPS[op].named(arguments)
    if named.get("activation") == "relu":
        for name in ("bias", "bias1"):
            if isinstance(named.get(name), Tensor):
                named[name] = spread(named[name].cpu()).to(named[name])
    return tuple(named.values())


def _with_gradients(scope: Scope, op: str, case: Case) -> BenchmarkCase:
    inputs = [[away_from_the_kink(op, *calls)] for calls in scope.draw(op, case)]
    return op_case(op, case.name, inputs, scope.backends, gradients=True)


def backward(scope: Scope) -> Iterator[tuple[str, Maker]]:
    for op, case in cases(scope):
        if OPS[op].flops(case.build(scope.dtype, "meta", None)) <= _MOST_FLOPS:
            yield f"{op} {case}", functools.partial(_with_gradients, scope, op, case)
