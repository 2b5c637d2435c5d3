"""The kernel of The Annotated Transformer's layer norm against its module in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from module_checks import check_budget

from transformer_fast import _native, use_backend
from transformer_fast.functional.layer_norm import ANNOTATED, ANNOTATED_BIASED, BACKWARD, TRAINING
from transformer_fast.models import AnnotatedLayerNorm
from transformer_fast.testing import GRADIENT_FACTOR

pytestmark = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))


def drawn(rows: int, columns: int, dtype: torch.dtype) -> tuple[AnnotatedLayerNorm, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    norm = AnnotatedLayerNorm(columns, 0.1).to(dtype)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(columns, generator=generator))
    return norm, (3 * torch.randn(2, rows, columns, generator=generator) + 1).to(dtype)


def results(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    backend: str,
    rounded_to: torch.dtype = torch.float32,
) -> list[torch.Tensor]:
    """The output and all gradients."""
    norm, x = drawn(rows, columns, rounded_to)
    norm, x = norm.to(dtype), x.to(dtype).requires_grad_()
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(rounded_to).to(dtype)
    with use_backend(backend):
        y = norm(x)
        y.backward(grad)
    return [y.detach(), x.grad, norm.weight.grad, norm.bias.grad]


@pytest.mark.parametrize("columns", [2, 3, 15, 16, 33, 64, 130, 512])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_it_is_the_plain_one(rows, columns, dtype, isa):
    ours = results(rows, columns, dtype, "cpu")
    plain = results(rows, columns, dtype, "reference")
    true = results(rows, columns, torch.float64, "reference", rounded_to=dtype)
    for a, b, t in zip(ours, plain, true, strict=True):
        check_budget(a, b, t, GRADIENT_FACTOR)


def test_rows_of_equal_values(isa):
    norm, _ = drawn(1, 24, torch.float32)
    x = torch.full((3, 24), 2.5, requires_grad=True)
    y = norm(x)
    assert torch.equal(y, norm.bias.expand(3, 24))
    y.sum().backward()
    with use_backend("reference"):
        plain = x.detach().clone().requires_grad_()
        norm(plain).sum().backward()
    torch.testing.assert_close(x.grad, plain.grad)


def test_what_runs_on_the_kernel():
    norm, x = drawn(3, 8, torch.float32)
    assert "NormFunction" in type(norm(x).grad_fn).__name__
    assert "NormFunction" not in type(norm.double()(x.double()).grad_fn).__name__
    with use_backend("reference"):
        assert "NormFunction" not in type(norm.float()(x).grad_fn).__name__
    half = norm.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert "NormFunction" in type(half.grad_fn).__name__


def test_strides_and_inference():
    norm, x = drawn(5, 12, torch.float32)
    turned = x.transpose(0, 1)
    with torch.inference_mode():
        torch.testing.assert_close(norm(turned), norm(x).transpose(0, 1))
    with torch.no_grad():
        assert norm(x[:, :0]).shape == (2, 0, 12)


def test_second_derivatives_and_forward_mode():
    found = []
    for backend in ("cpu", "reference"):
        norm, x = drawn(2, 6, torch.float32)
        leaves = [x.requires_grad_(), *norm.parameters()]
        with use_backend(backend):
            grads = torch.autograd.grad(norm(x).pow(3).sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
            _, tangent = torch.func.jvp(norm, (x.detach(),), (torch.ones_like(x) * x.detach(),))
            found.append([*second, tangent])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("kind", [ANNOTATED, ANNOTATED_BIASED])
def test_opcheck(kind):
    norm, x = drawn(2, 6, torch.float32)
    w, b = norm.weight.detach(), norm.bias.detach()
    forward, backward = TRAINING.of["cpu"], BACKWARD.of["cpu"]
    torch.library.opcheck(forward, (x, None, w, b, 1, 0.1, kind, 0.0, None))
    _, _, mean, rstd = forward(x, None, w, b, 1, 0.1, kind, 0.0, None)
    rest = (1, kind, 0.0, None, True, False, True, True)
    torch.library.opcheck(backward, (x, None, x, w, mean, rstd, *rest))
