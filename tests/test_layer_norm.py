"""RMSNorm and the Annotated Transformer's norm; the op table covers the rest of the norms."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from accelerate_checks import check, compiled
from hand_written import B, Block, M, Norm, T, causal
from harness import drawn, kernel_of
from module_checks import check_budget
from torch import Tensor

from transformer_fast import (
    _native,
    accelerate,
    explain,
    functional,
    nn,
    testing,
    use_backend,
)
from transformer_fast.dispatch import explain_call
from transformer_fast.functional.layer_norm import add_annotated_layer_norm
from transformer_fast.models import AnnotatedLayerNorm
from transformer_fast.ops.layer_norm import (
    ANNOTATED,
    ANNOTATED_BIASED,
    BACKWARD,
    TRAINING,
)
from transformer_fast.testing import GRADIENT_FACTOR, call_of, require_grad

pytestmark = pytest.mark.sampled(40)

needs_native = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))


# RMSNorm -----------------------------------------------------------------------------------------


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm"])
def test_float_weights_beside_rows_of_low_precision(op, dtype, isa):
    """The dtypes of CPU autocast run on a kernel, for every norm; gradients have the weights' dtype."""
    x, *rest = drawn(op, "prime columns", dtype)
    parameters = [t for t in rest if isinstance(t, Tensor) and t.shape == x.shape[-1:]]
    arguments = (x, *(t.float() if any(t is p for p in parameters) else t for t in rest))
    assert explain_call(call_of(op, require_grad(op, arguments))).backend == "cpu"
    testing.check(op, kernel_of(op).run(*arguments), arguments)
    testing.check_gradients(op, kernel_of(op).run, arguments)


@needs_native
@pytest.mark.parametrize("columns", [33, 700])
def test_rows_far_from_zero_lose_no_digits(columns, isa):
    """The rounding error of a mean of 1e6 is 3 % of a standard deviation of 1."""
    far = torch.randn(20, columns) + 1e6
    weight, bias, upstream = torch.rand(columns), torch.rand(columns), torch.randn(20, columns)

    def results(x: Tensor) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        y = functional.layer_norm(leaves[0], (columns,), *leaves[1:], backend="cpu")
        return [y, *torch.autograd.grad(y, leaves, upstream)]

    torch.testing.assert_close(results(far), results(far - 1e6))  # the difference is exact


@needs_native
@pytest.mark.parametrize("value", [0.1, 123.456, 1e6])
def test_rows_of_one_value_are_zero_for_any_eps(value, isa):
    x = torch.full((3, 77), value)
    assert not functional.layer_norm(x, (77,), eps=1e-12, backend="cpu").any()


@pytest.mark.thorough
@needs_native
@pytest.mark.parametrize("has_weight", [False, True])
def test_the_gradients_of_parameters_have_their_dtype_in_traces(has_weight):
    x, weight = torch.randn(3, 8, dtype=torch.bfloat16), torch.randn(8) if has_weight else None
    statistics = torch.zeros(3), torch.ones(3)
    arguments = (x, None, x, weight, *statistics, 1, 0, 0.0, None, True, False, True, True)
    torch.library.opcheck(BACKWARD.of["cpu"], arguments, test_utils="test_faketensor")
    *_, grad_weight, grad_bias = BACKWARD.of["cpu"](*arguments)
    assert grad_weight.dtype == grad_bias.dtype == (torch.float32 if has_weight else x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_default_eps_matches_pytorch(dtype):
    x = torch.full((2, 8), 1e-3, dtype=dtype)
    torch.testing.assert_close(functional.rms_norm(x, 8), F.rms_norm(x, (8,)))


def test_the_default_eps_has_the_dtype_of_the_sum():
    x, r = torch.full((1, 4), 1e-4), torch.zeros(1, 4, dtype=torch.float64)
    y, total = functional.add_rms_norm(x, r, 4)
    torch.testing.assert_close(y, F.rms_norm(total, (4,)))


def test_complex_and_empty_inputs_match_pytorch():
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
def test_errors_name_the_invalid_argument(call, error, words):
    with pytest.raises(error, match=words):
        call(functional.rms_norm)
    with pytest.raises(error, match=words):
        call(lambda x, *rest, **more: functional.add_rms_norm(x, x, *rest, **more))


def test_a_residual_of_another_shape_raises():
    with pytest.raises(ValueError, match="residual"):
        functional.add_rms_norm(torch.ones(2, 3), torch.ones(3), 3)


@needs_native
def test_rms_norm_runs_on_the_cpu_kernel():
    x, weight = torch.randn(4, 24), torch.randn(24)
    assert explain("rms_norm", x, 24, weight).backend == "cpu"
    with pytest.raises(RuntimeError, match="kind"):
        TRAINING.of["cpu"](x, None, None, None, 1, 1e-5, 4, 0.0, None)


@pytest.mark.thorough  # imports transformers
@pytest.mark.parametrize(
    ("model", "name"),
    [("t5", "T5LayerNorm"), ("llama", "LlamaRMSNorm"), ("olmo2", "Olmo2RMSNorm")],
)
def test_norms_of_transformers_are_replaced(model, name):
    pytest.importorskip("transformers")
    theirs = getattr(
        importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name
    )(M)
    ours = copy.deepcopy(theirs)
    report = accelerate(ours)
    assert set(report[""].inference) == set(report[""].training) == {"rms_norm"}
    x = torch.randn(B, T, M)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.thorough  # imports transformers
def test_norms_with_shifted_weights_are_left():
    pytest.importorskip("transformers")
    module = importlib.import_module("transformers.models.gemma.modeling_gemma")
    assert not accelerate(module.GemmaRMSNorm(M)).swapped


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


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRITTEN)
def test_hand_written_rms_norms_are_rewritten(fresh, name):
    model = torch.nn.Sequential(torch.nn.Linear(M, M), Norm(WRITTEN[name]))
    [report] = check(model, 1 + 3 * torch.randn(B, T, M), rms_norm=1, layer_norm=0)
    assert not {"mean", "pow", "sqrt", "rsqrt"} & set(report.others)
    check(model, 1e-3 * torch.randn(B, T, M), rms_norm=1)  # small inputs, for which eps matters
    half = copy.deepcopy(model).bfloat16()
    ours, reports = compiled(half)
    x = torch.randn(B, T, M).bfloat16()
    torch.testing.assert_close(ours(x), half(x), rtol=2**-6, atol=2**-6)
    assert reports[0].counts["rms_norm"] == 1
    assert not {"to", "mul"} & set(reports[0].others)
    block = Block(False, True, WRITTEN[name])
    [report] = check(block, torch.randn(B, T, M), None, causal(), None, add_rms_norm=1, rms_norm=1)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32])
def test_rounding_casts_prevent_the_rewrite(fresh, dtype):
    def norm(x: Tensor) -> Tensor:
        q = x.to(dtype)
        return q * torch.rsqrt(q.float().pow(2).mean(-1, keepdim=True) + 1e-6)

    x = torch.full((2, 8), 0.4)
    ours, _ = compiled(norm)
    torch.testing.assert_close(ours(x), norm(x), rtol=0, atol=2**-7)


@pytest.mark.thorough
def test_a_wider_weight_gives_the_wider_dtype(fresh):
    def norm(x: Tensor, weight: Tensor) -> Tensor:
        square = x.float().pow(2).mean(-1, keepdim=True)
        return weight * (x.float() * torch.rsqrt(square + 1e-6)).to(x.dtype)

    x, weight = torch.randn(2, 8).bfloat16(), torch.randn(8)
    ours, _ = compiled(norm)
    assert ours(x, weight).dtype == torch.float32
    torch.testing.assert_close(ours(x, weight), norm(x, weight), rtol=2**-7, atol=2**-7)


# The Annotated Transformer's norm, compared with its module in plain PyTorch ---------------------


def annotated(
    rows: int, columns: int, dtype: torch.dtype
) -> tuple[AnnotatedLayerNorm, torch.Tensor]:
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
    """Returns the output and all gradients."""
    norm, x = annotated(rows, columns, rounded_to)
    norm, x = norm.to(dtype), x.to(dtype).requires_grad_()
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(rounded_to).to(dtype)
    with use_backend(backend):
        y = norm(x)
        y.backward(grad)
    return [y.detach(), x.grad, norm.weight.grad, norm.bias.grad]


@needs_native
@pytest.mark.parametrize("columns", [2, 3, 15, 16, 33, 64, 130, 512])
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_annotated_norm_matches_plain_pytorch(rows, columns, dtype, isa):
    ours = results(rows, columns, dtype, "cpu")
    plain = results(rows, columns, dtype, "reference")
    true = results(rows, columns, torch.float64, "reference", rounded_to=dtype)
    for a, b, t in zip(ours, plain, true, strict=True):
        check_budget(a, b, t, GRADIENT_FACTOR)


@needs_native
def test_the_annotated_norm_of_equal_values(isa):
    norm, _ = annotated(1, 24, torch.float32)
    x = torch.full((3, 24), 2.5, requires_grad=True)
    y = norm(x)
    assert torch.equal(y, norm.bias.expand(3, 24))
    y.sum().backward()
    with use_backend("reference"):
        plain = x.detach().clone().requires_grad_()
        norm(plain).sum().backward()
    torch.testing.assert_close(x.grad, plain.grad)


@needs_native
def test_annotated_norms_of_strided_inputs():
    norm, x = annotated(5, 12, torch.float32)
    turned = x.transpose(0, 1)
    with torch.inference_mode():
        torch.testing.assert_close(norm(turned), norm(x).transpose(0, 1))
    with torch.no_grad():
        assert norm(x[:, :0]).shape == (2, 0, 12)


@needs_native
def test_second_derivatives_and_forward_mode():
    found = []
    for backend in ("cpu", "reference"):
        norm, x = annotated(2, 6, torch.float32)
        leaves = [x.requires_grad_(), *norm.parameters()]
        with use_backend(backend):
            grads = torch.autograd.grad(norm(x).pow(3).sum(), leaves, create_graph=True)
            second = torch.autograd.grad(sum(g.square().sum() for g in grads), leaves)
            _, tangent = torch.func.jvp(norm, (x.detach(),), (torch.ones_like(x) * x.detach(),))
            found.append([*second, tangent])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


@pytest.mark.thorough
@needs_native
@pytest.mark.parametrize("kind", [ANNOTATED, ANNOTATED_BIASED])
def test_opcheck_of_the_annotated_norm(kind):
    norm, x = annotated(2, 6, torch.float32)
    w, b = norm.weight.detach(), norm.bias.detach()
    forward, backward = TRAINING.of["cpu"], BACKWARD.of["cpu"]
    torch.library.opcheck(forward, (x, None, w, b, 1, 0.1, kind, 0.0, None))
    _, _, mean, rstd = forward(x, None, w, b, 1, 0.1, kind, 0.0, None)
    rest = (1, kind, 0.0, None, True, False, True, True)
    torch.library.opcheck(backward, (x, None, x, w, mean, rstd, *rest))


def test_the_annotated_norm_is_explained_and_a_named_backend_never_falls_back() -> None:
    norm, x = annotated(3, 8, torch.float32)
    assert explain(norm, x).backend == ("cpu" if "cpu" in TRAINING.of else "torch")
    assert explain("annotated_layer_norm", x.double(), None, None, 1e-6).backend == "torch"
    with use_backend("cuda"), pytest.raises(NotImplementedError, match="annotated_layer_norm"):
        norm(x)
    with use_backend("cpu"), pytest.raises(NotImplementedError, match="float64"):
        norm.double()(x.double())
    with use_backend("cpu"), pytest.raises(NotImplementedError, match="annotated_layer_norm"):
        add_annotated_layer_norm(x[..., :1], x[..., :1], None, None, 1e-6, True, 0.0)
