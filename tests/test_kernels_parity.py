"""Every kernel that can run here on every case of the op table, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from harness import (
    SATURATED,
    check_target,
    drawn,
    in_use,
    on,
    run,
    targets,
    targets_and_cases,
)
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_fast import dispatch
from transformer_fast.specs import OPS
from transformer_fast.testing import call_of, check_gradients, gradients, require_grad

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
