"""Every kernel that can run here on every case of the op table, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from harness import check_target, drawn, on, run, targets, targets_and_cases, truth_of_case

from transformer_fast import dispatch
from transformer_fast.specs import OPS
from transformer_fast.testing import call_of, check_gradients, require_grad

pytestmark = pytest.mark.usefixtures("two_threads")

#: The CPU's own kernels have tests of their gradients of their own. A normalised single value has
#: the gradient 0, which PyTorch computes as a difference of large numbers.
GRADIENT_CASES = [
    param
    for param in targets_and_cases(all_isas=False)
    if param.values[0].kernel.backend != "cpu"
    and (param.values[0].kernel.backend, param.values[1]) != ("torch", "one column")
]


@pytest.mark.parametrize(("target", "case"), targets_and_cases())
def test_outputs(target, case):
    arguments = drawn(target.op, case, target.dtype)
    check_target(target, arguments, truth=truth_of_case(target.op, case, target.dtype))


@pytest.mark.parametrize(("target", "case"), GRADIENT_CASES)
def test_gradients(target, case):
    arguments = drawn(target.op, case, target.dtype)
    if not target.kernel.gradients:
        pytest.skip("the call needs gradients and it has no backward")
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
