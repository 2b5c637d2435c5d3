"""What is special to rms_norm; the op table's tests have the rest."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from accelerate_checks import check, compiled
from hand_written import B, Block, M, Norm, T, causal
from torch import Tensor

from transformer_fast import accelerate, explain, functional, nn
from transformer_fast.functional.layer_norm import TRAINING
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


def test_the_modules_eps_counts():
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(nn.RMSNorm((5, 8), 0.1)(x), torch.nn.RMSNorm((5, 8), 0.1)(x))


def test_complex_and_empty_rows_are_as_in_pytorch():
    x = torch.randn(2, 4, dtype=torch.complex64)
    torch.testing.assert_close(nn.RMSNorm(4)(x), torch.nn.RMSNorm(4)(x))
    x, weight = torch.empty(3, 0, requires_grad=True), torch.empty(0, requires_grad=True)
    functional.rms_norm(x, 0, weight).sum().backward()
    assert x.grad.shape == (3, 0)
    assert weight.grad.shape == (0,)


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
def test_explanation_and_kinds():
    x, weight = torch.randn(4, 24), torch.randn(24)
    assert explain("rms_norm", x, 24, weight).backend == "cpu"
    with pytest.raises(RuntimeError, match="kind"):
        TRAINING.of["cpu"](x, None, None, None, 1, 1e-5, 4, 0.0, None)


@pytest.mark.parametrize(("model", "name"), [("t5", "T5LayerNorm"), ("llama", "LlamaRMSNorm")])
def test_those_of_transformers(model, name):
    pytest.importorskip("transformers")
    theirs = getattr(
        importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name
    )(M)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert set(report[""].inference) == set(report[""].training) == {"rms_norm"}
    x = torch.randn(B, T, M)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.fixture
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def llama_norm(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return a * (wide * torch.rsqrt(variance + 1e-6)).to(x.dtype)


def root_mean_square(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-2) * a


def torchs_rms_norm(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.rms_norm(x, (M,), a, 1e-3)


def t5_norm(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
    return a * (x * torch.rsqrt(variance + 1e-6)).to(a.dtype)


WRITTEN = {f.__name__: f for f in (llama_norm, t5_norm, root_mean_square, torchs_rms_norm)}


@pytest.mark.parametrize("name", WRITTEN)
def test_compile_backend(fresh, name):
    model = torch.nn.Sequential(torch.nn.Linear(M, M), Norm(WRITTEN[name]))
    [report] = check(model, 1 + 3 * torch.randn(B, T, M), rms_norm=1, layer_norm=0)
    assert not {"mean", "pow", "sqrt", "rsqrt"} & set(report.others)
    check(model, 1e-3 * torch.randn(B, T, M), rms_norm=1)  # eps counts
    half = copy.deepcopy(model).bfloat16()
    ours, reports = compiled(half)
    x = torch.randn(B, T, M).bfloat16()
    torch.testing.assert_close(ours(x), half(x), rtol=2**-6, atol=2**-6)
    assert reports[0].counts["rms_norm"] == 1
    assert not {"to", "mul"} & set(reports[0].others)
    block = Block(False, True, WRITTEN[name])
    [report] = check(block, torch.randn(B, T, M), None, causal(), None, add_rms_norm=1, rms_norm=1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_casts_that_round_stay(fresh, dtype):
    def norm(x: Tensor) -> Tensor:
        q = x.to(dtype)
        return q * torch.rsqrt(q.float().pow(2).mean(-1, keepdim=True) + 1e-6)

    x = torch.full((2, 8), 0.4)
    ours, _ = compiled(norm)
    torch.testing.assert_close(ours(x), norm(x), rtol=0, atol=2**-7)


def test_a_wider_weight_widens_the_result(fresh):
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        square = x.float().pow(2).mean(-1, keepdim=True)
        return weight * (x.float() * torch.rsqrt(square + 1e-6)).to(x.dtype)

    x, weight = torch.randn(2, 8).bfloat16(), torch.randn(8)
    ours, _ = compiled(norm)
    assert ours(x, weight).dtype == torch.float32
    torch.testing.assert_close(ours(x, weight), norm(x, weight), rtol=2**-7, atol=2**-7)
