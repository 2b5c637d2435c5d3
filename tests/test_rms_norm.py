"""What is special to rms_norm; the op table's tests have the rest."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from transformer_fast import explain, functional, nn
from transformer_fast.functional.layer_norm import BACKWARD, RMS, TRAINING
from transformer_fast.reference import rms_norm


def test_by_hand():
    x = torch.tensor([[3.0, -4.0], [0.0, 0.0]], dtype=torch.float64)
    weight = torch.tensor([2.0, 1.0], dtype=torch.float64)
    expected = torch.tensor([[6.0, -4.0], [0.0, 0.0]], dtype=torch.float64) / (12.5 + 0.5) ** 0.5
    torch.testing.assert_close(rms_norm(x, (2,), weight, 0.5), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_default_eps_is_pytorchs(dtype):
    x = torch.full((2, 8), 1e-3, dtype=dtype)
    torch.testing.assert_close(functional.rms_norm(x, 8), F.rms_norm(x, (8,)))


def test_the_default_eps_is_that_of_the_sum():
    x, r = torch.full((1, 4), 1e-4), torch.zeros(1, 4, dtype=torch.float64)
    y, total = functional.add_rms_norm(x, r, 4)
    torch.testing.assert_close(y, F.rms_norm(total, (4,)))


def test_complex_and_empty_rows_are_as_in_pytorch():
    x = torch.randn(2, 4, dtype=torch.complex64)
    torch.testing.assert_close(nn.RMSNorm(4)(x), torch.nn.RMSNorm(4)(x))
    x, weight = torch.empty(3, 0, requires_grad=True), torch.empty(0, requires_grad=True)
    functional.rms_norm(x, 0, weight).sum().backward()
    assert x.grad.shape == (3, 0)
    assert weight.grad.shape == (0,)


@pytest.mark.parametrize("affine", [True, False])
def test_the_module_is_a_drop_in(affine):
    theirs = torch.nn.RMSNorm((5, 8), eps=1e-4, elementwise_affine=affine)
    ours = nn.RMSNorm((5, 8), eps=1e-4, elementwise_affine=affine)
    ours.load_state_dict(theirs.state_dict())
    assert isinstance(ours, torch.nn.RMSNorm)
    assert repr(ours) == repr(theirs)
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(ours(x), theirs(x))
    program = torch.export.export(ours, (x,))
    assert "transformer_fast" not in str(program.graph)


def test_compiled_without_graph_breaks():
    norm, x = nn.RMSNorm(16), torch.randn(4, 16, requires_grad=True)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    compiled(x).square().sum().backward()
    (expected,) = torch.autograd.grad(norm(x).square().sum(), x)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda f: f(torch.ones(2, 3), 4), RuntimeError, "normalized_shape"),
        (lambda f: f(torch.ones(2, 3), 3, torch.ones(4)), RuntimeError, "weight"),
        (lambda f: f(torch.ones(2, 3), "3"), TypeError, "normalized_shape"),
        (lambda f: f([1.0], 1), TypeError, "input"),
        (lambda f: f(torch.ones(2, 3).int(), 3), (ValueError, RuntimeError), "Int|floating"),
        (lambda f: f(torch.ones(2, 3), 3, eps="no"), TypeError, "eps"),
    ],
)
def test_wrong_arguments_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call(functional.rms_norm)
    with pytest.raises(error, match=words):
        call(lambda x, *rest, **more: functional.add_rms_norm(x, x, *rest, **more))


def test_the_residual_has_inputs_shape():
    with pytest.raises(ValueError, match="residual"):
        functional.add_rms_norm(torch.ones(2, 3), torch.ones(3), 3)


@pytest.mark.skipif("cpu" not in TRAINING.of, reason="needs the native kernels")
def test_opcheck_and_explanation():
    x, weight = torch.randn(4, 24), torch.randn(24)
    assert explain("rms_norm", x, 24, weight).backend == "cpu"
    forward, backward = TRAINING.of["cpu"], BACKWARD.of["cpu"]
    torch.library.opcheck(forward, (x, x, weight, None, 1, 1e-5, RMS, 0.0, None))
    _, total, mean, rstd = forward(x, x, weight, None, 1, 1e-5, RMS, 0.0, None)
    rest = (weight, mean, rstd, 1, RMS, 0.0, None, True, False, True, False)
    torch.library.opcheck(backward, (x, None, total, *rest))
    with pytest.raises(RuntimeError, match="kind"):
        forward(x, None, None, None, 1, 1e-5, 4, 0.0, None)
