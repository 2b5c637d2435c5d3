"""Gradients of the CPU kernels against the fp64 oracle, for every case of the op table, on every
instruction set."""

from __future__ import annotations

import pytest
import torch

from transformer_fast import _native, dispatch
from transformer_fast.specs import OPS
from transformer_fast.testing import (
    all_among_nan,
    call_of,
    check,
    check_gradients,
    gradients,
    nan_memory,
    require_grad,
)

ISAS = ("baseline", "avx2", "avx512")


def kernel_of(op: str) -> dispatch.Kernel:
    return next(k for k in dispatch.kernels(op) if k.backend == "cpu")


@pytest.fixture(params=ISAS)
def isa(request):
    native = _native.module
    if native is None:
        pytest.skip(_native.why_not)
    before = native.isa()
    try:
        native.set_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    native.set_isa(before)


def _cases():
    for op, spec in OPS.items():
        for case in spec.cases:
            yield pytest.param(op, case, id=f"{op}: {case.name}")


CASES = tuple(_cases())


def draw(op: str, case, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    arguments = case.build(torch.float32, "cpu", generator)
    reasons = dispatch.why_not(kernel_of(op), call_of(op, require_grad(op, arguments)))
    if reasons:
        pytest.skip("; ".join(reasons))
    return arguments


@pytest.mark.parametrize(("op", "case"), CASES)
def test_gradients(op, case, isa):
    arguments = draw(op, case)
    with nan_memory():
        check_gradients(op, kernel_of(op).run, all_among_nan(arguments))


@pytest.mark.parametrize(("op", "case"), CASES)
def test_training_forward(op, case, isa):
    """What the forward returns on the way to gradients is what it returns without."""
    arguments = draw(op, case)
    with nan_memory():
        result = kernel_of(op).run(*require_grad(op, arguments))
    check(op, result, arguments)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_each_gradient_alone(op, case):
    """Asking for one gradient only gives the same one."""
    arguments = draw(op, case)
    run = kernel_of(op).run
    together = gradients(op, run, arguments)
    for name, expected in together.items():
        with nan_memory():
            alone = gradients(op, run, arguments, (name,))[name]
        assert torch.equal(alone, expected), name


@pytest.mark.parametrize(("op", "case"), CASES)
def test_same_bits_with_one_thread(op, case):
    arguments = draw(op, case)
    run = kernel_of(op).run
    threads = torch.get_num_threads()
    first, second = gradients(op, run, arguments), gradients(op, run, arguments)
    try:
        torch.set_num_threads(1)
        single = gradients(op, run, arguments)
    finally:
        torch.set_num_threads(threads)
    for name in first:
        assert torch.equal(first[name], second[name]), name
        assert torch.equal(first[name], single[name]), name
