"""Outputs and gradients of the Triton kernels against the fp64 oracle, for the cases of the op table.

Off the GPU the interpreter runs them, which is slow, so there each case runs in one dtype, the dtypes
taking turns from case to case.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import SATURATED

from transformer_fast import dispatch
from transformer_fast.backends.triton import config, matmul
from transformer_fast.specs import OPS
from transformer_fast.testing import (
    all_among_nan,
    call_of,
    check,
    check_gradients,
    nan_memory,
    require_grad,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def calls():
    number = 0
    for op, spec in OPS.items():
        for case in spec.cases:
            number += 1
            dtypes = DTYPES if torch.cuda.is_available() else (DTYPES[number % len(DTYPES)],)
            for dtype in dtypes:
                name = f"{op}: {case.name}, {str(dtype).removeprefix('torch.')}"
                yield pytest.param(op, case, dtype, None, id=name)
                if op in ("linear", "feed_forward"):
                    yield pytest.param(op, case, dtype, 2**31, id=f"{name}, products of cuBLAS")


# Rows that hide everything, and infinities on purpose, make NumPy warn in the interpreter.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("op", "case", "dtype", "few_rows"), list(calls()))
def test_outputs_and_gradients(op, case, dtype, few_rows, device, monkeypatch):
    kernel = next(k for k in dispatch.kernels(op) if k.backend == "triton")
    generator = torch.Generator().manual_seed(0)
    arguments = all_among_nan(case.build(dtype, device, generator))
    reasons = dispatch.why_not(kernel, call_of(op, require_grad(op, arguments)))
    if reasons:
        pytest.skip("; ".join(reasons))
    seen: list[Any] = []
    monkeypatch.setattr(config, "few_rows", few_rows or 0)
    made = []
    launch = matmul.launch
    monkeypatch.setattr(matmul, "launch", lambda *a, **k: (made.append(a[0]), launch(*a, **k))[1])

    def run(*given: Any) -> Any:
        seen.append(kernel.run(*given))
        return seen[-1]

    with nan_memory():
        if op == "attention" and case.name in SATURATED and dtype != torch.float32:
            run(*require_grad(op, arguments))
        else:
            check_gradients(op, run, arguments)
    own = {matmul.matmul_kernel, matmul.matmul_descriptor_kernel}
    empty = any(isinstance(x, torch.Tensor) and x.numel() == 0 for x in arguments)
    if op in ("linear", "feed_forward") and not empty:
        assert own.isdisjoint(made) == (few_rows is not None)
    # The results on the way to the gradients; without gradients the same kernels run.
    check(op, seen[0], arguments)
