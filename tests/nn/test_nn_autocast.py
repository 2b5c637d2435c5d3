"""Under CPU autocast every module gives torch.nn's dtype, and errs as little."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from harness import Operators
from module_cases import CASES, PLAIN
from module_checks import cast, check_budget, fast_path, tensors, to_ours
from torch import Tensor

from transformer_fast import dispatch, functional

HALVES = [torch.bfloat16, torch.float16]


def run(
    module: torch.nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype, grad: bool, **kw: Any
) -> list[Tensor]:
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype):
        return tensors(module(*inputs, **kw))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_dtypes_and_numbers(name: str, half: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs, inputs = CASES[name].make(torch.nn), CASES[name].inputs()
    ours, exact = to_ours(theirs), copy.deepcopy(theirs).double()
    for dtype, training, grad in itertools.product(
        [torch.float32, *HALVES], [True, False], [True, False]
    ):
        given = tuple(x.to(dtype) for x in inputs)
        oracle = [t.detach() for t in tensors(exact(*cast(given, torch.float64)))]
        expected = run(theirs.train(training), given, half, grad)
        got = run(ours.train(training), given, half, grad)
        case = f"{dtype}, {'train' if training else 'eval'}, {'grad' if grad else 'no_grad'}"
        assert [t.dtype for t in got] == [t.dtype for t in expected], case
        # Results that are fp32 come from roundings to the half type too.
        check_budget(got, expected, oracle, unit=torch.finfo(half).eps / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_that_are_half_types_already(dtype: torch.dtype) -> None:
    """Torch's operator takes inputs of other dtypes, since autocast makes them the weights'."""
    theirs = CASES["encoder layer"].make(torch.nn).bfloat16().eval()
    ours, x = to_ours(theirs), torch.randn(3, 4, 32, dtype=dtype)
    got, expected = (run(m, (x,), torch.bfloat16, False)[0] for m in (ours, theirs))
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=0, atol=4 * 2**-8 * expected.abs().max().item())


@pytest.mark.parametrize("why", ["hook", "switched off", "needs gradients", "CUDA's autocast"])
def test_where_torch_composes_the_layer(why: str) -> None:
    theirs = CASES["encoder layer"].make(torch.nn).eval()
    if why == "hook":
        theirs.linear1.register_forward_hook(lambda *_: None)
    with fast_path(why != "switched off"):
        torch.set_autocast_enabled("cuda", why == "CUDA's autocast")
        try:
            for module in (theirs, to_ours(theirs)):
                x = torch.randn(3, 4, 32)
                (y,) = run(module, (x,), torch.bfloat16, why == "needs gradients")
                assert y.dtype == torch.float32
        finally:
            torch.set_autocast_enabled("cuda", False)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", ["encoder", "encoder, pre-norm"])
def test_padding(name: str) -> None:
    """Torch's stack makes a nested tensor of it where it can, which raises under autocast."""
    theirs = CASES[name].make(torch.nn).eval()
    ours, x = to_ours(theirs), torch.randn(3, 4, 32)
    padding = torch.arange(4) >= torch.tensor([[4], [2], [3]])
    (got,) = run(ours, (x,), torch.bfloat16, False, src_key_padding_mask=padding)
    exact = copy.deepcopy(theirs).double()
    with fast_path(False):
        oracle = exact(x.double(), src_key_padding_mask=padding)
        (expected,) = run(theirs, (x,), torch.bfloat16, True, src_key_padding_mask=padding)
    assert got.dtype == torch.bfloat16
    check_budget(got[~padding], expected.to(got.dtype)[~padding], oracle[~padding])


@pytest.mark.parametrize("op", ["linear", "feed_forward"])
def test_without_kernels_parameters_are_cast_once_in_a_region(
    monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """As on a GPU on which no kernel is proven: PyTorch keeps casts until autocast's region ends."""
    kernels = dispatch.kernels(op)
    pytorchs = tuple(k for k in kernels if k.backend in ("torch", "reference"))
    monkeypatch.setitem(dispatch._state.usable, op, (kernels, {"cpu": pytorchs}))
    x, w1, w2 = torch.randn(3, 8), torch.randn(16, 8), torch.randn(8, 16)
    weights = [t.requires_grad_() for t in (w1, torch.randn(16), w2, torch.randn(8))]
    call = getattr(functional, op)
    weights = weights[:2] if op == "linear" else weights
    for residual in [None, torch.randn(3, 16)] if op == "linear" else [None]:
        options = {} if residual is None else {"residual": residual}
        with torch.autocast("cpu", torch.bfloat16), Operators() as found:
            first = call(x, *weights, **options)
            once = found.casts
            second = call(x, *weights, **options)
        # Of the second call only what is no parameter, and with it a step of autograd.
        assert found.casts - once == once - len(weights)
        assert first.dtype == second.dtype == torch.bfloat16
        first.float().sum().backward()
        assert all(w.grad is not None and w.grad.dtype == torch.float32 for w in weights)
