"""Memory errors and races of the CUDA kernels on the SIMT machine, planted bugs, and a comparison
of the machine's instructions with a GPU's.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
import simt_build
import torch

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(simt_build.WHY_NOT is not None, reason=str(simt_build.WHY_NOT)),
]
ALL, ADDRESS, THREAD = "address,undefined", "address", "thread"


MAINS = ("simt_main.cpp", "simt_attention.cpp")


def run(folder, sanitizer, changes=None, main="simt_main.cpp"):
    program = simt_build.program(folder, main, sanitizer, changes)
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    # ThreadSanitizer requires addresses without randomisation.
    command = ["setarch", "-R", str(program)] if sanitizer == THREAD else [str(program)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("sanitizer", [ALL, THREAD])
@pytest.mark.parametrize("main", MAINS)
def test_sanitizers_report_nothing(main, sanitizer, tmp_path):
    done = run(tmp_path, sanitizer, main=main)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", ""), done.stderr


#: Bug -> (sanitizer, file, text, replacement, a part of the report)
PLANTED = {
    # Results stay right: on the machine each warp has read its scratch by then.
    "scratch used again too soon": (
        THREAD, "device.cuh",
        "combine(x, scratch[w]);\n    __syncthreads();", "combine(x, scratch[w]);",
        "data race",
    ),
    "a tail that is not masked": (
        ADDRESS, "layer_norm.cuh",
        "if (column < columns) f(i, column);", "f(i, column);",
        "AddressSanitizer",
    ),
    "shared memory that is too small": (
        ADDRESS, "column_sums.cuh",
        "8 * kWarp * sizeof(float), stream", "7 * kWarp * sizeof(float), stream",
        "AddressSanitizer",
    ),
    "a barrier that not all threads reach": (
        ADDRESS, "column_sums.cuh",
        "  scratch[part * kWarp + lane] = sum;\n  __syncthreads();",
        "  scratch[part * kWarp + lane] = sum;\n  if (part > 0) __syncthreads();",
        "deadlock",
    ),
    "shares that were never written": (
        ADDRESS, "layer_norm.cuh",
        "      bias_shares[column] = of_bias;\n", "",
        "grad_bias[0] is NaN",
    ),
    # Results stay right: on the machine each warp has read its tiles by then.
    "a tile that is filled while others read it": (
        THREAD, "attention.cuh",
        "    __syncthreads();  // all threads have read the tiles that the next step overwrites\n", "",
        "data race",
    ),
    "a wait for too few copies": (
        ADDRESS, "attention.cuh",
        "cp_async_wait<1>", "cp_async_wait<2>",
        "is NaN",
    ),
    "blocks that count on their order": (
        ADDRESS, "layer_norm.cuh",
        "    args.mean[row] = mean;\n",
        "    const int64_t one = blockIdx.x > 0 ? row - Tile::rows : row;\n"
        "    args.mean[row] = one == row || args.mean[one] == args.mean[one] ? mean : NAN;\n",
        "mean[",
    ),
    "more blocks down than there can be": (
        ADDRESS, "epilogue.cuh",
        "most < 65535 ? most : 65535", "most + 65535",
        "launch: ",
    ),
    "rows that are not swizzled": (
        ADDRESS, "attention.cuh",
        "(row / kSpan & kMask)", "(row / kSpan & kMask & 0)",
        "share banks",
    ),
    "a tail of keys that is not masked": (
        ADDRESS, "attention.cuh",
        "(key >= end) | (query", "(query",
        "AddressSanitizer",
    ),
    "hidden values that are multiplied by 0": (
        ADDRESS, "attention.cuh",
        "again = rows_not_finite(sums);", "again = 0;",
        "output[0] is NaN",
    ),
}  # fmt: skip


def test_machine_instructions_match_their_definition(tmp_path):
    done = run(tmp_path, ALL, main="instructions.cu")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", ""), done


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


@pytest.mark.skipif(nvcc() is None, reason="there is no nvcc")
def test_gpu_instructions_match_their_definition(tmp_path):
    """Compiles the instructions for this machine's GPU and runs them; without a GPU, only compiles
    them for the oldest one.
    """
    seen = torch.cuda.is_available()
    number = "".join(map(str, torch.cuda.get_device_capability())) if seen else "80"
    program = tmp_path / "instructions"
    source = str(simt_build.HERE / "instructions.cu")
    options = ["-std=c++20", f"-arch=sm_{number}", f"-I{simt_build.SOURCES.parent}"]
    command = [str(nvcc()), *options, "-o", str(program), source]
    made = subprocess.run(command, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    if not seen:
        pytest.skip("it compiles; there is no GPU to run it on")
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "done\n"), done


@pytest.mark.sampled(100, 10)  # each program takes a compiler many seconds
@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_caught(name, tmp_path):
    sanitizer, file, before, after, said = PLANTED[name]
    done = run(tmp_path, sanitizer, {file: {before: after}}, MAINS["attention" in file])
    assert done.returncode != 0
    assert said in done.stderr, done.stderr
