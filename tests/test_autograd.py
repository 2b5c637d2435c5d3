"""Gradients of the kernels under compile, functorch, checkpointing and double backward."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from transformer_fast import _native, dispatch, use_backend
from transformer_fast import functional as F
from transformer_fast.specs import OPS
from transformer_fast.testing import require_grad

pytestmark = pytest.mark.skipif(_native.module is None, reason=str(_native.why_not))

#: One call of each op with everything in it that has a gradient.
CASES = {
    "layer_norm": "three dimensions",
    "add_layer_norm": "dropout",
    "attention": "float mask and causal",
    "linear": "silu, residual, no bias",
    "feed_forward": "dropout",
}


def arguments_of(op: str, name: str | None = None, seed: int = 0) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    case = OPS[op].case(name or CASES[op])
    return require_grad(op, case.build(torch.float32, "cpu", generator))


def leaves_of(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]


def run_of(op: str) -> Any:
    return next(k for k in dispatch.kernels(op) if k.backend == "cpu").run


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def gradients(op: str, arguments: tuple[Any, ...], run: Any = None) -> tuple[Tensor, ...]:
    loss = first((run or run_of(op))(*arguments)).sin().sum()
    return torch.autograd.grad(loss, leaves_of(arguments))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_compiled_whole(op, compiler):
    arguments = arguments_of(op)
    expected = gradients(op, arguments)
    compiled = torch.compile(run_of(op), backend=compiler, fullgraph=True)
    for got, want in zip(gradients(op, arguments, compiled), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", ["layer_norm", "linear", "feed_forward"])
def test_compiled_for_any_number_of_rows(op):
    compiled = torch.compile(run_of(op), backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (5, 8, 13):
        arguments = arguments_of(op)
        input = torch.randn(rows, arguments[0].shape[-1], requires_grad=True)
        rest = arguments[1:]
        if op == "linear":
            rest = (*rest[:-1], torch.randn(rows, rest[0].shape[0], requires_grad=True))
        arguments = (input, *rest)
        for got, want in zip(
            gradients(op, arguments, compiled), gradients(op, arguments), strict=True
        ):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_compiled_attention_for_any_length():
    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, backend="cpu")

    for length in (5, 9, 14):
        q, k, v = (torch.randn(2, 3, length, 16, requires_grad=True) for _ in range(3))
        got = torch.autograd.grad(attend(q, k, v).sin().sum(), (q, k, v))
        plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, backend="cpu")
        for a, b in zip(got, torch.autograd.grad(plain.sin().sum(), (q, k, v)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", CASES)
def test_second_derivative_is_refused(op):
    arguments = arguments_of(op)
    leaves = leaves_of(arguments)
    loss = first(run_of(op)(*arguments)).sum()  # its gradient is a constant: easily overlooked
    found = torch.autograd.grad(loss, leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{op} have no second derivative"):
        torch.autograd.grad(sum((g * g).sum() for g in found), leaves)


@pytest.mark.parametrize("op", CASES)
def test_the_reference_has_second_derivatives(op):
    arguments = arguments_of(op)
    leaves = leaves_of(arguments)
    loss = first(OPS[op].reference(*arguments)).sum()
    found = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
    torch.autograd.grad(
        sum((g * g).sum() for g in found if g is not None and g.requires_grad),
        leaves,
        allow_unused=True,
    )


def test_gradient_of_a_residual_is_no_second_derivative():
    x, w, r = torch.randn(4, 8), torch.randn(8, 8), torch.randn(4, 8, requires_grad=True)
    (found,) = torch.autograd.grad(
        F.linear(x, w, residual=r, backend="cpu").square().sum(), r, create_graph=True
    )
    assert found.requires_grad
    (second,) = torch.autograd.grad(found.sum(), r)
    assert torch.equal(second, torch.full_like(r, 2.0))


@pytest.mark.parametrize("op", CASES)
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_forward_mode_is_refused(op):
    arguments = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments_of(op))
    input = arguments[0]

    def function(x):
        return first(run_of(op)(x, *arguments[1:]))

    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(function, (input,), (torch.ones_like(input),))
    with torch.autograd.forward_ad.dual_level():
        function(input)  # without a tangent there is nothing to refuse
        dual = torch.autograd.forward_ad.make_dual(input, torch.ones_like(input))
        with pytest.raises(NotImplementedError, match="use_backend"):
            function(dual)


@pytest.mark.parametrize("op", CASES)
def test_functional_gradient(op):
    arguments = arguments_of(op)
    (expected,) = torch.autograd.grad(first(run_of(op)(*arguments)).sin().sum(), arguments[0])
    rest = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments[1:])
    got = torch.func.grad(lambda x: first(run_of(op)(x, *rest)).sin().sum())(arguments[0].detach())
    assert torch.equal(got, expected)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_gradients_by_sample():
    x, w = torch.randn(3, 5, 8), torch.randn(6, 8)

    def loss(w, x):
        return F.linear(x, w, activation="gelu", backend="cpu").sin().sum()

    together = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, x)
    for got, sample in zip(together, x, strict=True):
        torch.testing.assert_close(got, torch.func.grad(loss)(w, sample))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_dropout(reentrant):
    x, w, b = torch.randn(9, 16), torch.randn(16), torch.randn(16)
    w1, w2 = torch.randn(40, 16), torch.randn(16, 40)
    leaves = [t.requires_grad_() for t in (x, w, b, w1, w2)]

    def block(x, w, b, w1, w2):
        h = F.feed_forward(x, w1, None, w2, None, dropout_p=0.3, backend="cpu")
        y, total = F.add_layer_norm(h, x, (16,), w, b, dropout_p=0.3, backend="cpu")
        q = y.view(1, 1, 9, 16)
        a = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3, backend="cpu")
        return a.view(9, 16) + total

    found = []
    for run in (
        lambda: checkpoint(block, *leaves, use_reentrant=reentrant),
        lambda: block(*leaves),
    ):
        torch.manual_seed(7)
        run().sin().sum().backward()
        found.append([leaf.grad for leaf in leaves])
        for leaf in leaves:
            leaf.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("op", CASES)
def test_a_call_inspects_no_signature(op, monkeypatch):
    """Which PyTorch's own way into autograd functions does, and takes longer than a small call."""
    arguments = arguments_of(op)
    leaves = leaves_of(arguments)
    monkeypatch.setattr(inspect, "signature", None)
    result = first(run_of(op)(*arguments))
    assert all(g is not None for g in torch.autograd.grad(result.sum(), leaves))


def test_no_graph_without_need():
    x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    assert F.linear(x, w, backend="cpu").grad_fn is not None
    with torch.no_grad():
        assert F.linear(x, w, backend="cpu").grad_fn is None
    with torch.inference_mode():
        assert not F.linear(x, w, backend="cpu").requires_grad
    assert not F.linear(x, w.detach(), backend="cpu").requires_grad


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("layout", ["expanded", "transposed", "offset"])
def test_upstream_gradients_of_any_layout(op, layout):
    arguments = arguments_of(op)
    leaves = leaves_of(arguments)
    result = first(run_of(op)(*arguments))
    shape = result.shape
    if layout == "expanded":
        grad = torch.tensor(0.7).expand(shape)
    elif layout == "transposed":
        grad = torch.randn(*reversed(shape)).permute(*reversed(range(len(shape))))
    else:
        grad = torch.randn(*shape[:-1], 2 * shape[-1] + 1)[..., 1::2]
    got = torch.autograd.grad(result, leaves, grad, retain_graph=True)
    expected = torch.autograd.grad(result, leaves, grad.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_only_the_sum_is_used():
    arguments = arguments_of("add_layer_norm")
    results = [run_of("add_layer_norm")(*arguments), OPS["add_layer_norm"].reference(*arguments)]
    leaves = leaves_of(arguments)[:2]
    got, expected = (torch.autograd.grad(r[1].sin().sum(), leaves) for r in results)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_only_the_weights_are_used():
    arguments = arguments_of("attention", "dropout, weights, causal")
    results = [run_of("attention")(*arguments), OPS["attention"].reference(*arguments)]
    leaves = leaves_of(arguments)
    got, expected = (torch.autograd.grad(r[1].sin().sum(), leaves[:2]) for r in results)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("op", CASES)
def test_inputs_stay_as_they_are(op):
    arguments = arguments_of(op)
    before = [x.detach().clone() if isinstance(x, Tensor) else x for x in arguments]
    result = first(run_of(op)(*arguments))
    grad = torch.randn(result.shape)
    kept = grad.clone()
    torch.autograd.grad(result, leaves_of(arguments), grad)
    assert torch.equal(grad, kept)
    for now, then in zip(arguments, before, strict=True):
        assert torch.equal(now, then) if isinstance(now, Tensor) else now == then


def test_training_with_the_dispatchers_choice():
    """The whole way: a public function, the kernel chosen, parameters that learn."""
    torch.manual_seed(0)
    w1 = torch.nn.Parameter(torch.randn(64, 16) / 4)
    w2 = torch.nn.Parameter(torch.randn(16, 64) / 8)
    optimiser = torch.optim.SGD([w1, w2], lr=0.1)
    x = torch.randn(128, 16)
    losses = []
    with use_backend("cpu"):
        for _ in range(30):
            loss = (F.feed_forward(x, w1, None, w2, None, activation="gelu") - x).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def half_calls(dtype: torch.dtype) -> list[Any]:
    ops = torch.ops.transformer_fast
    seed = torch.tensor(5)
    x, g, z = (torch.randn(6, n).to(dtype) for n in (16, 16, 24))
    w, w2 = torch.randn(24, 16).to(dtype), torch.randn(16, 24).to(dtype)
    return [
        (ops.cpu_linear_with_preactivation, (x, w, None, g @ w2, 2)),
        (ops.cpu_linear_backward, (z, x, w, z, 2, True, True, True)),
        (ops.cpu_linear_backward, (z, x, w, None, 0, False, True, False)),
        (ops.cpu_feed_forward_training, (x, w, None, w2, None, 1, 0.3, seed, True)),
        (ops.cpu_feed_forward_training, (x, w, None, w2, None, 1, 0.0, None, False)),
        (ops.cpu_feed_forward_backward,
         (g, x, w, w2, z, 1, 0.3, seed, True, True, True, True, True)),
        (ops.cpu_feed_forward_backward,
         (g, x, w, w2, z, 1, 0.0, None, False, False, False, True, False)),
    ]  # fmt: skip


def backward_calls() -> list[Any]:
    ops = torch.ops.transformer_fast
    seed = torch.tensor(5)
    x, g, rows = torch.randn(6, 16), torch.randn(6, 16), torch.randn(6)
    w, w2 = torch.randn(24, 16), torch.randn(16, 24)
    q, k = torch.randn(2, 5, 4, 8).transpose(1, 2), torch.randn(2, 2, 7, 8)
    mask, lengths = torch.randn(1, 4, 5, 7), torch.tensor([7, 3])
    output, _, shift, norm = ops.cpu_attention(q, k, k, mask, lengths, True, 0.3, 0.2, seed, False)
    everything = ops.cpu_attention(q, k, k, None, None, False, 0.3, 0.0, None, True)
    return [
        (ops.cpu_layer_norm, (x, g, rows[:1].expand(16), None, 16, 1e-5, 0.3, seed)),
        (ops.cpu_layer_norm_backward,
         (g, x, x, rows, rows, None, 16, 0.3, seed, True, True, True, True)),
        (ops.cpu_layer_norm_backward,
         (g, None, x, rows, rows, None, 16, 0.0, None, False, False, True, False)),
        (ops.cpu_layer_norm_backward,
         (g.half(), None, x.half(), rows, rows, None, 16, 0.0, None, True, False, True, True)),
        (ops.cpu_layer_norm_alone, (x, rows[:1].expand(16), None, 16, 1e-5)),
        (ops.cpu_layer_norm_alone, (x.bfloat16(), None, None, 16, 1e-5)),
        (ops.cpu_add_layer_norm_alone, (x, g, None, rows[:1].expand(16), 16, 1e-5)),
        (ops.cpu_add_layer_norm_alone, (x.half(), g.half(), None, None, 16, 1e-5)),
        (ops.cpu_linear_with_preactivation, (x, w, None, None, 2)),
        (ops.cpu_linear_backward, (torch.randn(6, 24), x, w, torch.randn(6, 24), 2, True, True,
                                   True)),
        (ops.cpu_linear_backward, (torch.randn(6, 24), x, w, None, 0, False, True, False)),
        (ops.cpu_feed_forward_training, (x, w, None, w2, None, 1, 0.3, seed, True)),
        (ops.cpu_feed_forward_training, (x, w, None, w2, None, 1, 0.0, None, False)),
        (ops.cpu_feed_forward_backward,
         (g, x, w, w2, torch.randn(6, 24), 1, 0.3, seed, True, True, True, True, True)),
        (ops.cpu_feed_forward_backward,
         (g, x, w, w2, torch.randn(6, 24), 1, 0.0, None, False, False, True, False, False)),
        *half_calls(torch.bfloat16),
        *half_calls(torch.float16),
        (ops.cpu_attention, (q, k, k, mask, lengths, True, 0.3, 0.2, seed, True)),
        (ops.cpu_attention, (q, k, k, mask, lengths, True, 0.3, 0.2, seed, False, False)),
        (ops.cpu_attention_backward,
         (torch.randn_like(q), None, q, k, k, mask, lengths, True, 0.3, 0.2, seed, output, None,
          shift, norm, True, True, True, True)),
        (ops.cpu_attention_backward,
         (torch.randn_like(q), torch.randn(2, 4, 5, 7), q, k, k, None, None, False, 0.3, 0.0, None,
          *everything, True, False, False, False)),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(33))
def test_opcheck(number):
    calls = backward_calls()
    assert len(calls) == 33
    op, arguments = calls[number]
    torch.library.opcheck(op.default, arguments)
