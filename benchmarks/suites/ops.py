"""The op table's bench cases, forward."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from transformer_fast.measure.benchmark_case import BenchmarkCase
from transformer_fast.measure.ops import op_case
from transformer_fast.specs import OPS, Case

from .. import peers
from ..scope import Maker, Scope

#: Beyond these a case is too long for a quick run.
_QUICK_FLOPS, _QUICK_BYTES = 3e9, 5e7


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
