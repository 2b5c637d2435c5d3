"""The CUDA C++ kernels run on the GPU where there is one and the library was built, and else on the SIMT
machine, compiled from the same sources for CPU tensors."""

from __future__ import annotations

import pytest


@pytest.fixture
def device(cuda: str) -> str:
    return cuda
