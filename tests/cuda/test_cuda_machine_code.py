"""Machine code of the CUDA kernels: registers, spills and the width of memory accesses, for each
architecture of the library.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from transformer_fast import _native


def _cuobjdump() -> str | None:
    """Returns the path of the tool from the CUDA toolkit or from Triton's wheel."""
    triton = importlib.util.find_spec("triton")
    beside = Path(triton.origin or ".").parent / "backends/nvidia/bin" if triton else None
    return shutil.which("cuobjdump") or shutil.which("cuobjdump", path=str(beside))


TOOL = _cuobjdump()
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(not _native.CUDA_LIBRARY.is_file(), reason="no nvcc built the CUDA kernels"),
    pytest.mark.skipif(TOOL is None, reason="there is no cuobjdump"),
]


def dump(*options: str) -> str:
    command = [str(TOOL), *options, str(_native.CUDA_LIBRARY)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@functools.cache
def kernels() -> dict[str, str]:
    """Returns the machine code for sm_80 by kernel name."""
    found = re.split(r"Function : ", dump("-sass", "-arch", "sm_80"))[1:]
    return {kernel.split("\n", 1)[0]: kernel for kernel in found}


def _vectors_of_backward(name: str) -> int | None:
    """Returns the vectors of a row in a thread's registers, in LayerNorm's backward; else None."""
    found = re.search(r"layer_norm_backward_kernel.*RowTileILi\d+ELi(\d+)ELi(\d+)E", name)
    if found is None or int(found[1]) == 0 or int(found[2]) == 1:
        return None
    return int(found[1]) // int(found[2])


def test_no_kernel_spills_registers():
    found = re.findall(
        r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", dump("-res-usage")
    )
    assert len(found) >= 100
    for name, registers, stack, local in found:
        assert int(local) == 0, name
        # The call of a 64-bit division takes 16 bytes, outside the hot path.
        assert int(stack) <= 16, name
        if "attention" in name:  # two blocks of 128 threads per SM, no spills
            assert (int(stack), int(registers) <= 255) == (0, True), name
        if re.search(r"attention_kernelI\w+Lb1E", name):  # plain; memory limits the blocks per SM
            assert int(registers) <= (255 if "Li128E" in name else 168), name
        if "attention_decode" in name and "Li1ELb1E" in name:  # six blocks per SM
            assert int(registers) <= 80, name
        if (vectors := _vectors_of_backward(name)) and vectors <= 2:  # 512 threads per block
            assert (int(stack), int(registers) <= 128) == (0, True), name
        block = int((re.search(r"RowTileILi(\d+)", name) or [0, 32])[1])
        assert int(registers) * max(block, 128) <= 65536, name


def test_vectorized_kernels_access_16_bytes_at_a_time():
    seen = set()
    for name, kernel in kernels().items():
        vector = re.search(r"layer_norm_kernelI.*RowTileILi\d+ELi\d+ELi(\d+)", name)
        vector = vector or re.search(r"epilogue\w*_kernelI\w+?Li(\d+)E", name)
        if vector is None:
            continue
        seen.add(name)
        wide = int(vector[1]) > 1
        assert ("LDG.E.128" in kernel) == wide, name
        assert ("STG.E.128" in kernel) == wide, name
    assert sum("epilogue" in name for name in seen) == 12


def test_attention_copies_16_bytes_and_uses_tensor_cores():
    found = 0
    for name, kernel in kernels().items():
        tile = re.search(r"AttentionTileI(\S+?)Li(\d+)ELi(\d+)E", name)
        if tile is None:
            continue
        found += 1
        half, head, rows = tile[1] != "f", int(tile[2]), int(tile[3])
        assert "LDGSTS.E.BYPASS.128" in kernel, name
        # Products of a warp's 16 rows: two in forward, three and four in the kernels of backward.
        products = 2 if "backward" not in name else 3 if "query" in name else 4
        multiplied = len(re.findall(r"HMMA\.16816\.F32", kernel))
        assert multiplied == (products * (head // 16) * (rows // 8) if half else 0), name
        assert ("LDSM.16.M88.4" in kernel) == ("LDSM.16.MT88.4" in kernel) == half, name
    assert found == 32
