"""Cases of the op table in GPU-sized shapes.

`prove` checks and times them, and ``python -m benchmarks.gpu`` reports them. Each case represents its
class of `proof.shape_class`; calls of classes without a case run PyTorch's kernels. The checked call is
the timed one, so its fp64 reference has to fit into memory. The reference of attention runs head by
head, unless the case has dropout.
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

_NAMES = {(one.op, one.name) for one in GPU_CASES}
#: Larger sizes, which ``python -m benchmarks.gpu`` times beside `GPU_CASES`.
BENCH_CASES = tuple(
    GpuCase(op, one)
    for op, spec in OPS.items()
    for one in spec.gpu_bench_cases
    if (op, one.name) not in _NAMES
)
