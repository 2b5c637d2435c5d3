"""The op table's bench cases, forward and backward together."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from transformer_fast.measure.benchmark_case import Arguments, BenchmarkCase
from transformer_fast.measure.ops import op_case
from transformer_fast.specs import OPS, Case

from ..scope import Maker, Scope
from .ops import cases

#: fp64 gradients of more than this take too long and too much memory.
_MOST_FLOPS = 2e10


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


def _contest(scope: Scope, op: str, case: Case) -> BenchmarkCase:
    inputs = [
        [away_from_the_kink(op, arguments) for arguments in calls] for calls in scope.draw(op, case)
    ]
    return op_case(op, case.name, inputs, scope.backends, gradients=True)


def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
    for op, case in cases(scope):
        if OPS[op].flops(case.build(scope.dtype, "meta", None)) <= _MOST_FLOPS:
            yield f"{op} {case}", functools.partial(_contest, scope, op, case)
