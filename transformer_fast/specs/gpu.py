"""Calls of the op table in sizes that say something about a GPU: what `prove` checks and times (of
`COMMON` also `compare`), and what ``python -m benchmarks.gpu`` reports.

They stand for their classes of `proof.shape_class`: of calls in other classes PyTorch's own take care.
What is checked is the call that is timed, so its fp64 reference has to fit into memory: of attention
a head at a time, unless it has dropout.
"""

from __future__ import annotations

from typing import NamedTuple

from . import OPS
from .spec import Case


class GpuCase(NamedTuple):
    op: str
    case: Case

    @property
    def name(self) -> str:
        return self.case.name

    @property
    def gradients(self) -> bool:
        return self.case.gradients


GPU_CASES = tuple(GpuCase(op, one) for op, spec in OPS.items() for one in spec.gpu_cases)

#: Of each op the classes of `proof.shape_class` that `compare` measures.
COMMON = {op: spec.gpu_classes for op, spec in OPS.items()}

_NAMES = {(one.op, one.name) for one in GPU_CASES}
#: Larger sizes, which ``python -m benchmarks.gpu`` times beside `GPU_CASES`.
BENCH_CASES = tuple(
    GpuCase(op, one)
    for op, spec in OPS.items()
    for one in spec.gpu_bench_cases
    if (op, one.name) not in _NAMES
)
