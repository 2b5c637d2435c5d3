"""Memory and races of the CUDA kernels on the SIMT machine, and bugs that have to be caught there."""

from __future__ import annotations

import os
import subprocess

import pytest
import simt_build

pytestmark = pytest.mark.skipif(simt_build.WHY_NOT is not None, reason=str(simt_build.WHY_NOT))
ADDRESS, THREAD = "address,undefined", "thread"


def run(folder, sanitizer, changes=None):
    program = simt_build.program(folder, "simt_main.cpp", sanitizer, changes)
    environment = {
        **os.environ,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1",
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    # ThreadSanitizer wants the addresses where it expects them.
    command = ["setarch", "-R", str(program)] if sanitizer == THREAD else [str(program)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", [ADDRESS, THREAD])
def test_nothing_is_reported(sanitizer, tmp_path):
    done = run(tmp_path, sanitizer)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", ""), done.stderr


#: What is wrong -> (sanitizer, file, text, what it becomes, what is said of it).
PLANTED = {
    # Numbers stay right, since each warp of the machine has read its scratch by then.
    "scratch used again too soon": (
        THREAD, "device.cuh",
        "combine(x, scratch[w]);\n    __syncthreads();", "combine(x, scratch[w]);",
        "data race",
    ),
    "scratch read too soon": (
        THREAD, "device.cuh",
        "scratch[warp] = x;\n    __syncthreads();", "scratch[warp] = x;",
        "data race",
    ),
    "a tail that is not masked": (
        ADDRESS, "layer_norm.cuh",
        "if (column < columns) f(i, column);", "f(i, column);",
        "AddressSanitizer",
    ),
    "shared memory that is too small": (
        ADDRESS, "layer_norm.cuh",
        "8 * kWarp * sizeof(float), stream", "7 * kWarp * sizeof(float), stream",
        "AddressSanitizer",
    ),
    "a barrier that not all threads reach": (
        ADDRESS, "layer_norm.cuh",
        "  scratch[part * kWarp + lane] = sum;\n  __syncthreads();",
        "  scratch[part * kWarp + lane] = sum;\n  if (part > 0) __syncthreads();",
        "deadlock",
    ),
    "shares that were never written": (
        ADDRESS, "layer_norm.cuh",
        "      bias_shares[column] = of_bias;\n", "",
        "grad_bias[0] is NaN",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_caught(name, tmp_path):
    sanitizer, file, before, after, said = PLANTED[name]
    done = run(tmp_path, sanitizer, {file: {before: after}})
    assert done.returncode != 0
    assert said in done.stderr, done.stderr
