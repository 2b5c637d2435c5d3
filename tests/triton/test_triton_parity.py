"""Outputs and gradients of the Triton kernels against the fp64 oracle, for the cases of the op table.

Off the GPU the interpreter runs them, which is slow, so there each case runs in one dtype, the dtypes
taking turns from case to case.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from harness import DTYPES, SATURATED, check_trained, kernel_of

from transformer_fast import call_cache, functional, use_backend
from transformer_fast.backends.triton import config, matmul, plans
from transformer_fast.specs import OPS
from transformer_fast.testing import all_among_nan


def calls():
    number = 0
    for op, spec in OPS.items():
        for case in spec.cases:
            number += 1
            dtypes = DTYPES if torch.cuda.is_available() else (DTYPES[number % len(DTYPES)],)
            for dtype in dtypes:
                name = f"{op}: {case.name}, {str(dtype).removeprefix('torch.')}"
                yield pytest.param(op, case, dtype, None, id=name)
                if op in ("linear", "feed_forward"):
                    yield pytest.param(op, case, dtype, 2**31, id=f"{name}, products of cuBLAS")


def few_rows_of_many_classes(op: str, arguments: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """Of many classes some rows: a program takes few, and the interpreter takes 0.1 s for each."""
    if device == "cuda" or "cross_entropy" not in op:
        return arguments
    joint, target = op == "linear_cross_entropy", OPS[op].arguments.index("target")
    classes = arguments[1].shape[0] if joint else arguments[0].shape[1]
    rows = 2**18 // classes
    return tuple(x[:rows] if i in (0, target) else x for i, x in enumerate(arguments))


# Rows that hide everything, and infinities on purpose, make NumPy warn in the interpreter.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("op", "case", "dtype", "few_rows"), list(calls()))
def test_outputs_and_gradients(op, case, dtype, few_rows, device, launched, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    arguments = all_among_nan(
        few_rows_of_many_classes(op, case.build(dtype, device, generator), device)
    )
    monkeypatch.setattr(config, "few_rows", few_rows or 0)
    saturated = op == "attention" and case.name in SATURATED and dtype != torch.float32
    check_trained(kernel_of(op, "triton"), arguments, gradients=not saturated)
    own = {matmul.matmul_kernel, matmul.matmul_descriptor_kernel}
    empty = any(isinstance(x, torch.Tensor) and x.numel() == 0 for x in arguments)
    if op in ("linear", "feed_forward") and not empty:
        assert own.isdisjoint(launched) == (few_rows is not None)


def public_calls(device):
    def normal(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16).to(device)

    q, w, v = (lambda: normal(2, 2, 20, 16)), (lambda: normal(16, 16)), (lambda: normal(16))
    x = lambda: normal(3, 5, 16)  # noqa: E731
    y = functional.scaled_dot_product_attention
    mask = torch.rand(2, 1, 20, 20).to(device) > 0.5
    lengths = torch.tensor([20, 3], device=device)
    yield y, (q, q, q), {}
    yield y, (q, q, q), {"is_causal": True, "key_lengths": lengths, "dropout_p": 0.3}
    yield y, (q, q, q, lambda: mask.clone()), {"need_weights": True}
    yield y, (q, q, q), {"query_lengths": lengths, "is_causal": True}
    r = lambda: normal(23, 2, 16)  # noqa: E731
    starts = torch.tensor([0, 20, 20, 23], device=device)
    yield functional.varlen_attn, (r, r, r, starts.clone, starts.clone), {"max_q": 20, "max_k": 21}
    yield functional.layer_norm, (x, lambda: (16,), v, v), {}
    yield functional.add_layer_norm, (x, x, lambda: (16,), v, v), {"dropout_p": 0.2}
    yield functional.linear, (x, w, v), {"activation": "gelu", "residual": normal(3, 5, 16)}
    yield functional.feed_forward, (x, w, v, w, v), {"dropout_p": 0.2}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("number", range(9))
@pytest.mark.parametrize("wants", [False, True])
def test_remembered_public_calls_give_the_same_bits(number, wants, device, monkeypatch):
    torch.manual_seed(1)
    function, makers, options = list(public_calls(device))[number]
    calls = [[make() for make in makers] for _ in range(5)]
    if wants:
        for x in itertools.chain(*calls):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_()

    def all_bits():
        found = []
        for seed, arguments in enumerate(calls):
            torch.manual_seed(seed)
            y = function(*arguments, **options)
            found += y if isinstance(y, tuple) else [y]
            assert all(one.requires_grad == wants for one in found)
            if wants:
                given = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
                found += [
                    g.clone().requires_grad_() for g in torch.autograd.grad(found[-1].sum(), given)
                ]
        return found

    with use_backend("triton"):
        wanted = all_bits()
        monkeypatch.setattr(plans, "replays_interpreted", True)
        monkeypatch.setattr(call_cache, "on_cpu", True)
        call_cache.forget()
        found = all_bits()
        assert [run for _, run in call_cache._calls.values()]
        plans_made = [p for store in call_cache._stores for p in store.values() if callable(p)]
        assert len(plans_made) >= 2 * wants  # of the forward and of the backward
        assert plans._NEVER not in plans_made
        call_cache.forget()
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)
