"""Every kernel that can run here: every case, every length, every gradient."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from harness import (
    EVERY_BUILD,
    SATURATED,
    check_target,
    drawn,
    in_use,
    kernel_of,
    on,
    run,
    targets,
    targets_and_cases,
)
from ops import ROWS
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_fast import _native, dispatch
from transformer_fast.specs import OPS
from transformer_fast.specs.spec import Draw
from transformer_fast.testing import (
    Truth,
    all_among_nan,
    call_of,
    check,
    check_gradients,
    gradients,
    nan_memory,
    require_grad,
    truth_of,
)

pytestmark = pytest.mark.usefixtures("two_threads")

#: The CPU's own kernels have tests of their gradients of their own. A normalised single value has
#: the gradient 0, which PyTorch computes as a difference of large numbers.
GRADIENT_CASES = [
    param
    for param in targets_and_cases(all_isas=False)
    if param.values[0].kernel.backend != "cpu"
    and not (
        param.values[0].kernel.backend == "torch" and param.values[1] in {"one column", *SATURATED}
    )
]


@pytest.mark.parametrize(("target", "case"), targets_and_cases())
def test_outputs(target, case):
    arguments = drawn(target.op, case, target.dtype)
    check_target(target, arguments)


@pytest.mark.parametrize(("target", "case"), GRADIENT_CASES)
def test_gradients(target, case):
    arguments = drawn(target.op, case, target.dtype)
    if not target.kernel.gradients:
        pytest.skip("it has no backward, and the call needs gradients")
    names = OPS[target.op].gradients_of
    if not target.kernel.mask_gradient:
        names = tuple(name for name in names if name != "attn_mask")
    reason = target.refusal(require_grad(target.op, arguments, names))
    if reason:
        pytest.skip(reason)
    check_gradients(target.op, target.kernel.run, on(target, arguments), names=names)


@pytest.mark.parametrize(("target", "case"), targets_and_cases(all_isas=False))
def test_inputs_are_not_modified_nor_returned(target, case):
    arguments = drawn(target.op, case, target.dtype)
    arguments = on(target, arguments)
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    before = [(x.clone(), x._version) for x in tensors]
    result = run(target, arguments)
    for tensor, (values, version) in zip(tensors, before, strict=True):
        assert tensor._version == version
        torch.testing.assert_close(tensor, values, rtol=0, atol=0, equal_nan=True)
    for one in result if isinstance(result, tuple) else (result,):
        if one is not None and one.numel():
            memory = one.untyped_storage().data_ptr()
            assert memory not in {x.untyped_storage().data_ptr() for x in tensors}


class NoProducts(TorchDispatchMode):
    """Raises where PyTorch multiplies matrices."""

    ENDS = ("mm", "mv", "dot", "linear", "matmul", "attention", "convolution", "einsum")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "transformer_fast":
            name = func._schema.name.rpartition("::")[2]
            product = any(word.endswith(self.ENDS) for word in name.split("_"))
            assert not product, f"PyTorch's {name} was called"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("op", ["mm", "addmm", "bmm", "baddbmm", "addmv", "dot", "linear", "sdpa"])
def test_products_are_noticed(op):
    x = torch.randn(2, 3, 3)
    call = {
        "mm": lambda: x[0] @ x[1],
        "addmm": lambda: torch.addmm(x[0], x[0], x[1]),
        "bmm": lambda: x @ x,
        "baddbmm": lambda: torch.baddbmm(x, x, x),
        "addmv": lambda: torch.addmv(x[0, 0], x[0], x[0, 0]),
        "dot": lambda: x[0, 0] @ x[0, 0],
        "linear": lambda: torch.nn.functional.linear(x[0].bfloat16(), x[0].bfloat16()),
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x),
    }[op]
    with NoProducts(), pytest.raises(AssertionError, match="was called"):
        call()


def _few_rows(dtype):
    """Calls for which the dispatcher would take PyTorch's product on some CPU."""
    for rows in (1, 17, 100):
        x, wide = torch.randn(rows, 512, dtype=dtype), torch.randn(2048, 512, dtype=dtype)
        bias = torch.randn(2048, dtype=dtype)
        yield "linear", (x, wide, bias, None, None)
        seed = torch.tensor(1)
        yield "feed_forward", (x, wide, bias, wide.t(), bias[:512], "relu", 0.1, seed)
    x, wide = torch.randn(40, 33, dtype=dtype), torch.randn(9000, 33, dtype=dtype)
    yield "linear", (x, wide, None, None, None)


@pytest.mark.parametrize(
    "target", [param for param in targets() if param.values[0].kernel.backend == "cpu"]
)
def test_the_cpu_never_multiplies_by_pytorch(target):
    """Forward and backward, on every case of the op table and for few rows of large weights."""
    cases = [
        (case.name, drawn(target.op, case.name, target.dtype)) for case in OPS[target.op].cases
    ]
    cases += [("few rows", more) for op, more in _few_rows(target.dtype) if op == target.op]
    with in_use(target.isa):
        for name, arguments in cases:
            if target.refusal(arguments):
                continue
            with NoProducts(), torch.no_grad():
                target.kernel.run(*arguments)
            if target.refusal(require_grad(target.op, arguments)):
                continue
            with NoProducts():
                assert gradients(target.op, target.kernel.run, arguments), name


@pytest.mark.parametrize("op", OPS)
def test_every_op_has_a_kernel_to_test(op):
    """Nothing above would fail if the table of kernels were empty."""
    assert any(k.backend == "cpu" for k in dispatch.kernels(op))
    assert len(targets(op)) >= 1


@pytest.mark.parametrize("op", OPS)
def test_the_dispatcher_chooses_a_kernel_for_an_ordinary_call(op, generator):
    """On a CPU with the native module, fp32 without gradients does not end in the reference."""
    reasons = [k.unavailable for k in dispatch.kernels(op) if k.backend == "cpu"]
    if reasons[0]:
        pytest.skip(reasons[0])
    arguments = OPS[op].cases[0].build(torch.float32, "cpu", generator)
    assert dispatch.select(call_of(op, arguments)).backend in ("cpu", "torch")


#: Bytes in a vector.
VECTOR = {"baseline": 16, "avx2": 32}
#: Around the panels, tiles and blocks of the kernels, and a prime beyond them all.
FAR = (47, 48, 49, 55, 56, 57, 63, 64, 65, 111, 112, 113, 127, 128, 129, 191, 223, 224, 225, 255,
       256, 257, 511, 513, 521)  # fmt: skip
OFFSETS = (0, 1, 3)
ALL = [
    pytest.param(*param.values, what, id=f"{param.id}-{what}", marks=param.marks)
    for op, row in ROWS.items()
    for what in row.sweeps
    for param in targets(op)
    if param.values[0].kernel.backend != "torch"  # PyTorch sweeps its own
]


@functools.cache
def call(op: str, what: str, n: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], Truth]:
    arguments = ROWS[op].sweeps[what](Draw(dtype, "cpu", torch.Generator().manual_seed(n)), n)
    return arguments, truth_of(op, arguments)


@pytest.mark.parametrize(("target", "what"), ALL)
def test_lengths(target, what):
    lanes = VECTOR.get(target.isa, 64) // target.dtype.itemsize
    refused = None
    for n in (*range(2 * lanes + 2), *FAR):
        arguments, truth = call(target.op, what, n, target.dtype)
        refused = target.refusal(arguments)
        if refused:
            continue
        for offset in OFFSETS if n < 2 * lanes + 2 else (1,):
            try:
                check_target(target, arguments, offset, truth)
            except AssertionError as error:
                raise AssertionError(f"{what} = {n}, {offset} off alignment: {error}") from None
    if refused:
        pytest.skip(refused)


def arguments_of(op: str, case: str) -> tuple[Any, ...]:
    return drawn(op, case, torch.float32)


def refusal(op: str, case: str) -> str | None:
    arguments = require_grad(op, arguments_of(op, case))
    return "; ".join(dispatch.why_not(kernel_of(op), call_of(op, arguments))) or None


def accepted() -> list[Any]:
    found = []
    for op, spec in OPS.items():
        for case in spec.cases:
            reason = _native.why_not or refusal(op, case.name)
            if reason is None or _native.why_not:
                marks = [pytest.mark.skip(reason=reason)] if reason else []
                found.append(pytest.param(op, case.name, id=f"{op}: {case.name}", marks=marks))
    return found


EVERY_CASE = pytest.mark.parametrize(("op", "case"), accepted())


def test_most_cases_are_accepted() -> None:
    """What a backward refuses, it does not test here: that must stay the exception."""
    total = sum(len(spec.cases) for spec in OPS.values())
    assert len(accepted()) >= total - 2


@EVERY_CASE
@EVERY_BUILD
def test_gradients_on_the_cpu(op: str, case: str, dtype: torch.dtype, isa: str) -> None:
    if dtype == torch.float16 and case == "scores of deviation 300, few queries":
        pytest.skip("one row is just outside the budget: its largest probability is below 1 - 2^-5")
    with nan_memory():
        check_gradients(op, kernel_of(op).run, all_among_nan(drawn(op, case, dtype)))


@EVERY_CASE
def test_training_forward(op: str, case: str, float_isa: str) -> None:
    """What the forward returns on the way to gradients is held to the forward's budget."""
    arguments = arguments_of(op, case)
    with nan_memory():
        result = kernel_of(op).run(*require_grad(op, arguments))
    check(op, result, arguments)


@EVERY_CASE
def test_each_gradient_alone(op: str, case: str) -> None:
    """Asking for one gradient only gives the same one."""
    if (op, case) == ("feed_forward", "strided") and _native.module.isa() == "amx":
        pytest.skip("there the gradient of weight1 alone is taken by a product of another order")
    arguments = arguments_of(op, case)
    run = kernel_of(op).run
    for name, expected in gradients(op, run, arguments).items():
        with nan_memory():
            alone = gradients(op, run, arguments, (name,))[name]
        assert torch.equal(alone, expected), name


@EVERY_CASE
def test_same_bits_with_one_thread(op: str, case: str) -> None:
    arguments = arguments_of(op, case)
    run = kernel_of(op).run
    first, second = gradients(op, run, arguments), gradients(op, run, arguments)
    torch.set_num_threads(1)
    single = gradients(op, run, arguments)
    for name in first:
        assert torch.equal(first[name], second[name]), name
        assert torch.equal(first[name], single[name]), name


@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_second_derivatives(op: str, case: str, dtype: torch.dtype) -> None:
    """By the reference's formula, from what the kernel's forward saved."""
    check_gradients(op, kernel_of(op).run, drawn(op, case, dtype), twice=True)


def test_gradients_of_norms_of_rows_far_from_zero(float_isa: str) -> None:
    """Half a unit of the mean is up to 1e-5 of what is left there, in all of a row."""
    x = 100.0 + 0.5 * torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    check_gradients("layer_norm", kernel_of("layer_norm").run, (x, (4,), None, None, 1e-12))
