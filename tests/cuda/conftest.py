"""The CUDA C++ kernels run on the GPU where there is one and the library was built, and else on the SIMT
machine, compiled from the same sources for CPU tensors."""

from __future__ import annotations

import pytest
import simt_build
import torch

from transformer_fast import _native, dispatch
from transformer_fast.backends import cuda
from transformer_fast.functional import _operator

ON_GPU = _native.cuda_why_not is None and torch.cuda.is_available()


@pytest.fixture(scope="session")
def operators() -> str:
    """The device whose tensors the operators ``cuda_*`` take."""
    if ON_GPU:
        return "cuda"
    if _native.cuda_why_not is None:
        pytest.skip("the operators of the GPU are loaded, and there is no GPU")
    if simt_build.WHY_NOT is not None:
        pytest.skip(simt_build.WHY_NOT)
    torch.ops.load_library(str(simt_build.library()))
    cuda.define_operators()
    _operator.tell()
    return "cpu"


@pytest.fixture
def device(operators: str) -> str:
    """The same; the dispatcher knows of them while the test runs."""
    for kernel in cuda.kernels(operators, None):
        dispatch.register(kernel)
    return operators
