"""`transformer_fast.nn.Embedding`: the look-up and the bitwise equal gradient of PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import check_threads
from module_checks import to_ours
from torch import Tensor

from transformer_fast import _native, nn, use_backend

needs_native = pytest.mark.skipif(_native.module is None, reason="the native module is not built")


def _pair(*args: Any, **kwargs: Any) -> tuple[nn.Embedding, torch.nn.Embedding]:
    torch.manual_seed(0)
    theirs = torch.nn.Embedding(*args, **kwargs)
    ours = to_ours(theirs)
    assert isinstance(ours, nn.Embedding)
    return ours, theirs


def _uses_own_backward(y: Tensor) -> bool:
    assert y.grad_fn is not None
    return "LookUp" in type(y.grad_fn).__name__


@needs_native
@pytest.mark.parametrize("padding", [None, 0, 6, -1])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 40), (2, 3, 500)])
@pytest.mark.parametrize("size", [(7, 1), (7, 33), (3000, 512)])
def test_gradient_equals_pytorchs_bitwise(
    padding: int | None, shape: tuple[int, ...], size: tuple[int, int]
):
    ours, theirs = _pair(*size, padding_idx=padding)
    tokens = torch.randint(0, min(size[0], 50), shape)
    a, b = ours(tokens), theirs(tokens)
    assert torch.equal(a, b)
    assert _uses_own_backward(a)
    grad = torch.randn_like(a)
    for _ in range(2):  # the second call accumulates into the existing gradient
        ours(tokens).backward(grad)
        theirs(tokens).backward(grad)
        assert torch.equal(ours.weight.grad, theirs.weight.grad)


@needs_native
def test_gradient_of_strided_inputs_and_several_threads(threads: None) -> None:
    ours, theirs = _pair(2000, 600)
    tokens = torch.randint(0, 2000, (64, 9)).t()
    wide = torch.randn(9, 64, 1200)
    for grad in (wide[..., ::2], wide[..., :600], wide[:, :, :1].expand(9, 64, 600)):

        def both(grad: Tensor = grad) -> list[Tensor]:
            found = [torch.autograd.grad(m(tokens), m.weight, grad)[0] for m in (ours, theirs)]
            assert torch.equal(*found)
            return found

        check_threads(both)


@needs_native
def test_infinite_and_nan_gradients_propagate() -> None:
    ours, theirs = _pair(5, 4)
    tokens = torch.tensor([1, 1, 3])
    grad = torch.tensor([[float("inf")] * 4, [float("-inf")] * 4, [float("nan")] * 4])
    (a,) = torch.autograd.grad(ours(tokens), ours.weight, grad)
    (b,) = torch.autograd.grad(theirs(tokens), theirs.weight, grad)
    assert torch.equal(a.isnan(), b.isnan())
    assert a[1].isnan().all()
    assert (a[0] == 0).all()


@pytest.mark.parametrize(
    "options",
    [{"sparse": True}, {"scale_grad_by_freq": True}, {"max_norm": 1.0},
     {"dtype": torch.float64}, {"dtype": torch.bfloat16}],
)  # fmt: skip
def test_other_options_run_pytorchs_backward(options: dict[str, Any]) -> None:
    ours, theirs = _pair(11, 6, **options)
    tokens = torch.randint(0, 11, (4, 5))
    a, b = ours(tokens), theirs(tokens)
    assert torch.equal(a, b)
    assert not _uses_own_backward(a)
    found = [torch.autograd.grad(y.sum(), m.weight)[0] for y, m in ((a, ours), (b, theirs))]
    assert torch.equal(*(grad.to_dense() for grad in found))


def test_inference_and_other_backends() -> None:
    ours, _ = _pair(11, 6)
    tokens = torch.randint(0, 11, (4, 5))
    with torch.no_grad():
        assert not ours(tokens).requires_grad
    assert not _uses_own_backward(ours(tokens.int()))
    for backend in ("reference", "torch"):
        with use_backend(backend):
            assert not _uses_own_backward(ours(tokens))
    ours.weight.requires_grad_(False)
    assert not ours(tokens).requires_grad


def test_out_of_range_tokens_raise_pytorchs_error() -> None:
    ours, _ = _pair(11, 6)
    for wrong in (11, -1):
        with pytest.raises(IndexError, match="index out of range"):
            ours(torch.tensor([0, wrong]))
    with pytest.raises(RuntimeError, match="Long, Int"):
        ours(torch.tensor([0.0]))


@needs_native
def test_tokens_written_before_backward_raise() -> None:
    ours, _ = _pair(11, 6)
    tokens = torch.tensor([1, 2])
    y = ours(tokens)
    tokens[0] = 99
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@needs_native
def test_errors_of_the_operator_name_the_argument() -> None:
    op = torch.ops.transformer_fast.embedding_backward.cpu
    grad, tokens = torch.zeros(2, 3), torch.tensor([0, 1])
    with pytest.raises(RuntimeError, match=r"token 1 is not in \[0, 1\)"):
        op(grad, tokens, 1, -1)
    with pytest.raises(RuntimeError, match="tokens must be int64"):
        op(grad, tokens.int(), 2, -1)
    with pytest.raises(RuntimeError, match="grad must be float32"):
        op(grad.double(), tokens, 2, -1)
    with pytest.raises(RuntimeError, match="a row for each token"):
        op(torch.zeros(3, 3), tokens, 2, -1)
    with pytest.raises(RuntimeError, match="one dimension more"):
        op(torch.zeros(3), tokens, 2, -1)


def test_second_derivatives_and_functorch_transforms() -> None:
    ours, theirs = _pair(11, 6)
    tokens = torch.randint(0, 11, (4, 5))

    def curvature(module: torch.nn.Module) -> Tensor:
        (first,) = torch.autograd.grad(
            module(tokens).pow(3).sum(), module.weight, create_graph=True
        )
        return torch.autograd.grad(first.pow(2).sum(), module.weight)[0]

    assert torch.equal(curvature(ours), curvature(theirs))

    upstream = torch.randn(2, 4, 5, 6)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(*upstream)
        (found,) = torch.autograd.grad(ours(tokens), ours.weight, dual)
        _, tangent = forward_ad.unpack_dual(found)
    (expected,) = torch.autograd.grad(theirs(tokens), theirs.weight, upstream[1])
    assert torch.equal(tangent, expected)

    def loss(weight: Tensor) -> Tensor:
        return torch.func.functional_call(ours, {"weight": weight}, (tokens,)).pow(2).sum()

    found = torch.func.grad(loss)(ours.weight.detach())
    assert torch.equal(found, torch.autograd.grad(loss(ours.weight), ours.weight)[0])


@pytest.mark.thorough
@needs_native
def test_compiles_and_opcheck() -> None:
    ours, theirs = _pair(11, 6)
    tokens = torch.randint(0, 11, (4, 5))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    (a,) = torch.autograd.grad(compiled(tokens).pow(2).sum(), ours.weight)
    (b,) = torch.autograd.grad(theirs(tokens).pow(2).sum(), theirs.weight)
    assert torch.equal(a, b)
    arguments = (torch.randn(4, 5, 6), tokens, 11, 3)
    torch.library.opcheck(torch.ops.transformer_fast.embedding_backward.cpu, arguments)
