"""What Triton compiles for sm_80, run by the emulator, is within the error budget; see `emulated`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import emulated
import pytest

SOURCE = Path(emulated.__file__).read_text(encoding="utf-8")
#: The names of the cases, read without importing kernels: this process has the interpreter on.
CASES = [
    ast.literal_eval(name)
    for name in re.findall(r'^    yield \(?\s*("[^"]+")', SOURCE, re.MULTILINE)
]
KERNELS = {
    "attention_forward_kernel", "attention_backward_query_kernel", "attention_backward_key_kernel",
    "attention_bias_kernel", "attention_weights_kernel", "attention_decode_kernel",
    "attention_merge_kernel", "mask_code_kernel", "tile_list_kernel", "layer_norm_forward_kernel",
    "layer_norm_backward_kernel", "column_sum_kernel", "matmul_kernel", "epilogue_kernel",
    "cross_entropy_forward_kernel", "cross_entropy_backward_kernel",
}  # fmt: skip

ran: dict[str, set[str]] = {}


@pytest.fixture(scope="module")
def emulator() -> Iterator[emulated.Emulator]:
    one = emulated.Emulator()
    yield one
    one.close()


@pytest.mark.parametrize("case", CASES)
def test_compiled_code(emulator, case):
    answer = emulator.ask(case)
    assert answer["ok"], answer["told"]
    instructions = {name.split(": ")[1].split(".")[0] for name in answer["ran"]}
    kernels = {name.split(":")[0] for name in answer["ran"]}
    for wanted in emulated.HIT.get(case, ()):
        assert wanted in kernels | instructions


#: Case, kernel, what is changed in its PTX (an expression and what takes its place), what is told.
BUGS = [
    ("attention", "attention_forward", r"max\.f32", "min.f32", "output"),
    ("attention", "attention_forward", r"\.trans\.shared", ".shared", "output"),
    ("attention", "attention_forward", r"(mma\.[^{]*{[^}]*}, {) (%r\d+), (%r\d+)", r"\1 \3, \2", "out"),
    ("attention", "attention_backward_key", r"wait_group\s+\d+;", "wait_group 9;", "under way"),
    ("attention", "attention_backward_query", r"bar\.sync\s+0;", "", "two warps"),
    ("attention", "attention_forward", r"ex2\.approx", "rcp.approx", "output"),
    ("attention causal strided lengths", "attention_forward", r"min\.s64", "max.s64", "output"),
    ("attention query lengths", "attention_backward_key", r"min\.s64", "max.s64", "grad of value"),
    ("attention sequences causal groups", "attention_forward", r"max\.s64", "min.s64", "output"),
    ("layer_norm", "layer_norm_forward", r"@%p\d+ (st\.global)", r"\1", "beyond the tensors"),
    ("layer_norm", "layer_norm_forward", r"(ld\.global\.v4\.b32 [^;]*\+ )0 \]", r"\g<1>8 ]", "alignment"),
    ("layer_norm fp32 far from 0", "layer_norm_forward", r"div\.rn\.f32", "div.full.f32", "output"),
    ("add_layer_norm dropout", "layer_norm_forward", r"mul\.hi\.u32", "mul.lo.u32", "sum["),
    ("linear few rows", "epilogue", r"@%p\d+ (st\.global)", r"\1", "beyond the tensors"),
    ("feed_forward few rows dropout", "epilogue", r"mul\.hi\.u32", "mul.lo.u32", "output"),
    ("cross_entropy", "cross_entropy_forward", r"add\.f64", "sub.f64", "grad of input"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "kernel", "was", "becomes", "told"), BUGS)
def test_planted_bugs_are_caught(emulator, case, kernel, was, becomes, told):
    answer = emulator.ask(case, (f"{kernel}_kernel", was, becomes))
    assert not answer["ok"], answer["told"]
    assert told in answer["told"]


def test_every_kernel_has_a_case():
    wanted = {name for names in emulated.HIT.values() for name in names if name.endswith("_kernel")}
    assert wanted == KERNELS
