"""Fixtures of the Triton tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from interpreted import DEVICE, WHY_NOT

from transformer_fast import call_cache, dispatch
from transformer_fast.backends import triton as triton_backend

if WHY_NOT is not None:
    collect_ignore_glob = ["test_triton_[!h]*.py"]
else:
    from transformer_fast.backends.triton import config, matmul


@pytest.fixture
def device() -> str:
    """Where the kernels run; the dispatcher knows of the interpreter while the test runs."""
    for kernel in triton_backend.kernels(interpreted=DEVICE == "cpu"):
        dispatch.register(kernel)
    call_cache.forget()  # tests change tiles by hand
    return DEVICE


@pytest.fixture
def small_tiles() -> Iterator[None]:
    """Tiles of 16 x 16 in the interpreter, so that small calls take many."""
    before = config.interpreter_tile
    config.interpreter_tile = (16, 16)
    yield
    config.interpreter_tile = before


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that products of matrices launch, one after the other."""
    found, launch = [], matmul.launch
    monkeypatch.setattr(matmul, "launch", lambda *a, **k: (found.append(a[0]), launch(*a, **k))[1])
    return found
