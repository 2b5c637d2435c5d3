"""The op table's bench cases, forward and backward together."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from transformer_fast.measure.contest import Contest
from transformer_fast.measure.gradients import gradient_contest
from transformer_fast.specs import OPS, Case

from ..scope import Maker, Scope
from .ops import cases

#: fp64 gradients of more than this take too long and too much memory.
_MOST_FLOPS = 2e10


def _contest(scope: Scope, op: str, case: Case) -> Contest:
    return gradient_contest(op, case.name, scope.draw(op, case), scope.backends)


def suite(scope: Scope) -> Iterator[tuple[str, Maker]]:
    for op, case in cases(scope):
        if OPS[op].flops(case.build(scope.dtype, "meta", None)) <= _MOST_FLOPS:
            yield f"{op} {case}", functools.partial(_contest, scope, op, case)
