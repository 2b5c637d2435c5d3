"""Triton's requirements: if its kernels cannot run here, the first test skips with the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import python
from interpreted import WHY_NOT

pytestmark = pytest.mark.thorough


def test_triton_kernels_can_run_here():
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)


def test_importing_the_library_imports_neither_triton_nor_a_driver():
    code = (
        "import sys, torch, transformer_fast\n"
        "assert 'triton' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    python("-c", code)


_SPOILT = """
import torch

torch.cuda.is_initialized = lambda: True
torch.cuda.synchronize = lambda: None

def test_before(): pass

def test_illegal_access():
    def synchronize():
        raise RuntimeError("an illegal memory access was encountered")
    torch.cuda.synchronize = synchronize

def test_after(): pass
"""


@pytest.mark.exhaustive
def test_an_illegal_access_ends_the_test_process(tmp_path):
    (tmp_path / "test_spoilt.py").write_text(_SPOILT)
    shutil.copy(Path(__file__).parents[1] / "conftest.py", tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n1", tmp_path],
        capture_output=True, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert "1 failed" in done.stdout, done.stdout
    assert "crashed while running 'test_spoilt.py::test_illegal_access'" in done.stdout
    assert "test_after" not in done.stdout
