"""Whether the Triton tests can run here: without them this is the one that is skipped."""

from __future__ import annotations

import subprocess
import sys

import pytest
from interpreted import WHY_NOT


def test_the_kernels_can_run_here():
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)


def test_importing_the_library_imports_neither_triton_nor_a_driver():
    code = (
        "import sys, torch, transformer_fast\n"
        "assert 'triton' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
