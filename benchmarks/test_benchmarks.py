"""``pytest benchmarks``: the op table's bench cases under pytest-benchmark.

For its tools (histograms, ``--benchmark-compare``, ``--benchmark-json``). Candidates run one after
the other here, so their ratios are less sure than those of ``python -m benchmarks``. Big cases are
left out unless ``TRANSFORMER_FAST_BENCH_ALL=1``.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch

from transformer_fast.measure.ops import op_case
from transformer_fast.specs import Case

from .scope import Scope
from .suites.ops import cases

_SCOPE = Scope(quick=os.environ.get("TRANSFORMER_FAST_BENCH_ALL", "0") in ("", "0"))
_CONTENDERS = ("cpu", "triton", "cuda", "torch", "reference")


_PARAMETERS = [
    pytest.param(op, case, name, id=f"{op}-{case}-{name}")
    for op, case in cases(_SCOPE)
    for name in _CONTENDERS
]


@pytest.mark.parametrize(("op", "case", "name"), _PARAMETERS)
@torch.no_grad()
def test_op(benchmark: Any, op: str, case: Case, name: str) -> None:
    inputs = _SCOPE.draw(op, case)
    benchmark_case = op_case(op, case.name, inputs, (name,))
    candidate = next(c for c in benchmark_case.candidates if c.name == name)
    if candidate.run is None:
        pytest.skip(candidate.reason or "no reason told")
    arguments = inputs[0][0]
    parity = benchmark_case.checker(candidate.run(*arguments), arguments)
    assert parity.ok, str(parity)
    fresh = itertools.cycle(inputs)
    benchmark.group = f"{op} {case}"
    benchmark.pedantic(
        candidate.run, setup=lambda: (next(fresh)[0], {}), rounds=11, warmup_rounds=1
    )
