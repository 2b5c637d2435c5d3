"""Fixtures of the Triton tests."""

from __future__ import annotations

from typing import Any

import pytest
from interpreted import WHY_NOT

if WHY_NOT is not None:
    collect_ignore_glob = ["test_triton_[!h]*.py"]
else:
    from transformer_fast.backends.triton import matmul


@pytest.fixture
def device(triton: str) -> str:
    return triton


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that products of matrices launch, one after the other."""
    found, launch = [], matmul.launch
    monkeypatch.setattr(matmul, "launch", lambda *a, **k: (found.append(a[0]), launch(*a, **k))[1])
    return found
