"""The small-size fallback to PyTorch's ops: one rule for dispatcher, functions and modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Operators
from module_cases import CASES
from module_checks import run, to_ours
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import transformer_fast
from transformer_fast import _native, dispatch, fast_path, functional, nn
from transformer_fast._context import is_plain_eager
from transformer_fast.testing import call_of

pytestmark = [
    pytest.mark.usefixtures("small_calls"),
    pytest.mark.skipif(_native.module is None, reason=str(_native.why_not)),
]

needs_entries = pytest.mark.skipif(_native.autograd is None, reason=str(_native.why_no_autograd))


def _ours(run: Callable[[], Any]) -> list[str]:
    with Operators() as found:
        run()
    return found.ours


def _calls(grad: bool) -> dict[str, Callable[[int], tuple[Any, ...]]]:
    """Returns, per op, a function of the number of rows that returns arguments of the public
    function.
    """

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=grad)

    return {
        "linear_cross_entropy": lambda n: (leaf(n, 64), leaf(64, 64), torch.randint(64, (n,))),
        "linear": lambda n: (leaf(n, 64), leaf(64, 64), leaf(64)),
        "layer_norm": lambda n: (leaf(n, 64), (64,), leaf(64), leaf(64)),
        "add_layer_norm": lambda n: (leaf(n, 64), leaf(n, 64), (64,), leaf(64), leaf(64)),
        "feed_forward": lambda n: (
            leaf(n, 64), leaf(128, 64), leaf(128), leaf(64, 128), leaf(64)
        ),
        "attention": lambda n: (leaf(1, 4, n, 16), leaf(1, 4, n, 16), leaf(1, 4, n, 16)),
        "cross_entropy": lambda n: (leaf(n, 64), torch.randint(64, (n,))),
    }  # fmt: skip


def _call(op: str, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    public = "scaled_dot_product_attention" if op == "attention" else op
    return lambda: getattr(functional, public)(*arguments)


_LARGE = {"attention": 512, "linear_cross_entropy": 32768}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("op", _calls(False))
def test_functions_run_the_explained_backend(op: str, grad: bool) -> None:
    for rows in (1, 20, _LARGE.get(op, 8192)):
        arguments = _calls(grad)[op](rows)
        with fast_path.small_size_fallback(short=False):  # no entry runs in the mode of `_ours`
            explanation = transformer_fast.explain(op, *arguments)
        kernels = _ours(_call(op, arguments))
        if op == "linear_cross_entropy":  # the linear layer of a small call has its own backend
            kernels = [kernel for kernel in kernels if "cross_entropy" in kernel]
        assert bool(kernels) == (explanation.backend == "cpu"), (rows, explanation, kernels)
        if rows == 20 and not (op == "attention" and grad):
            assert explanation.backend == "torch"
            assert "PyTorch's op is faster for calls this small" in str(explanation)
        if rows > 20:
            assert explanation.backend == "cpu"


@needs_entries
@pytest.mark.parametrize("op", ["linear", "layer_norm", "add_layer_norm", "feed_forward"])
def test_explain_says_which_calls_an_entry_runs(op: str) -> None:
    given = _calls(True)[op](20)
    strided = given[0].detach().t().contiguous().t().requires_grad_()
    calls = [(given, True), ((strided, *given[1:]), False)]
    for shape in ([64], 64):  # of norms
        calls.append((tuple(shape if isinstance(x, tuple) else x for x in given), True))
    for arguments, in_entry in calls:
        found = transformer_fast.explain(op, *arguments)
        result = _call(op, arguments)()
        node = (result[0] if isinstance(result, tuple) else result).grad_fn
        assert (found.remark == "in its entry in C++") == in_entry, (arguments, found)
        assert (node.name() == f"transformer_fast::{op}_backward") == in_entry


@pytest.mark.parametrize("op", _calls(False))
def test_a_named_backend_overrides_the_fallback(op: str) -> None:
    call = _call(op, _calls(False)[op](20))
    with transformer_fast.use_backend("cpu"):
        assert _ours(call)
    assert not _ours(call)
    with transformer_fast.strict():
        assert not _ours(call)


@pytest.mark.filterwarnings("ignore:enable_nested", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
@pytest.mark.parametrize("name", CASES)
def test_small_modules_match_pytorch(name: str, training: bool) -> None:
    case = CASES[name]
    theirs = case.make(torch.nn).train(training)
    inputs = tuple(x.requires_grad_(training) for x in case.inputs())
    ours = to_ours(theirs)
    found = (run(module, inputs, case.masks, grad=training) for module in (ours, theirs))
    torch.testing.assert_close(*found)


def _norm(rows: int = 4096) -> list[Any]:
    leaves = [torch.randn(n, 8, requires_grad=True) for n in (rows, 1, 1)]
    return [leaves[0], (8,), leaves[1][0].detach(), leaves[2][0].detach(), 1e-5]


def test_the_direct_kernel_is_the_dispatchers_choice() -> None:
    arguments = _norm()
    assert is_plain_eager(arguments[0], *arguments[2:4])
    function = fast_path.direct_kernel("layer_norm", (arguments[0], *arguments[2:4]))
    assert function is dispatch.select(call_of("layer_norm", tuple(arguments))).function
    with Operators() as found, dispatch.use_backend(None):
        nn.LayerNorm(8)(arguments[0])
    assert found.ours == ["layer_norm_training.cpu"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, lambda: torch.randn(4096, 7)), (0, lambda: torch.randn(4096, 8).double()),
        (0, lambda: torch.randn(4096, 8).to_sparse()),
        (0, lambda: torch.nested.nested_tensor([torch.randn(3, 8)])),
        (0, lambda: torch.randn(4096, 8, device="meta")), (1, lambda: (4096, 8)),
        (2, lambda: torch.randn(7)), (2, lambda: torch.randn(8).double()),
        (3, lambda: torch.randn(1, 8)), (3, lambda: torch.randn(8, device="meta")), (4, lambda: 1),
    ],
)  # fmt: skip
def test_unusual_arguments_go_through_the_dispatcher(
    place: int, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = _norm()
    arguments[place] = value()
    chosen = []
    # `defers_to_torch` is the first function that only calls through the dispatcher reach.
    known = functional.layer_norm.__globals__
    monkeypatch.setitem(known, "defers_to_torch", lambda *_, **__: chosen.append(True) or False)
    with fast_path.small_size_fallback(on=False), contextlib.suppress(Exception):
        functional.layer_norm(*arguments)
    assert chosen


def test_named_backends_and_transforms_bypass_the_fast_path() -> None:
    arguments = _norm()
    for name in ("reference", "torch", "cpu"):
        with transformer_fast.use_backend(name):
            assert is_plain_eager(arguments[0]) is None
    with fast_path.small_size_fallback(short=False):
        assert is_plain_eager(arguments[0]) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert fast_path.direct_kernel("layer_norm", (arguments[0],)) is None
    seen = []

    def ask(x: Tensor) -> Tensor:
        seen.append(is_plain_eager(arguments[0]) is not None)
        return x * 2.0

    torch.func.jvp(ask, (arguments[0],), (arguments[0],))
    torch.vmap(ask)(arguments[0])
    torch.jit.trace(ask, (arguments[0],), check_trace=False)
    with torch.autograd.forward_ad.dual_level():
        ask(arguments[0])
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("change", ["mask", "causal", "weights", "dropout", "lead", "autocast"])
def test_small_attention_falls_back_only_if_pytorch_agrees(change: str) -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    options: dict[str, Any] = {
        "mask": {"attn_mask": torch.ones(5, 5, dtype=torch.bool)},
        "causal": {"is_causal": True},
        "weights": {"need_weights": True},
        "dropout": {"dropout_p": 0.5},
    }.get(change, {})
    if change == "lead":
        q = q[0]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=change == "autocast"):
        found = _ours(lambda: functional.scaled_dot_product_attention(q, k, v, **options))
    assert bool(found) == (change != "lead")


@pytest.mark.parametrize("keys", [5, 2048])
def test_small_attention_with_grouped_heads_falls_back(keys: int) -> None:
    q, k, v = torch.randn(2, 4, 5, 32), torch.randn(2, 2, keys, 32), torch.randn(2, 2, keys, 32)

    def run() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    assert bool(_ours(run)) == (keys > 5)
    repeated = (x.repeat_interleave(2, dim=1) for x in (k, v))
    torch.testing.assert_close(run(), F.scaled_dot_product_attention(q, *repeated))
    with pytest.raises(RuntimeError, match="heads"):
        functional.scaled_dot_product_attention(q[:, :3], k, v, enable_gqa=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [None, 5])
def test_small_linear_cross_entropy_runs_on_pytorch(rows: int | None, reduction: str) -> None:
    lead = () if rows is None else (rows,)
    x, weight, bias = (torch.randn(n, requires_grad=True) for n in ((*lead, 8), (6, 8), (6,)))
    target = torch.randint(6, lead)

    def run(**options: Any) -> Tensor:
        return functional.linear_cross_entropy(
            x, weight, target, linear_bias=bias, reduction=reduction, label_smoothing=0.1, **options
        )

    assert not _ours(lambda: run().sum().backward())
    torch.testing.assert_close(run(), run(backend="cpu"))
    leaves = x, weight, bias
    torch.testing.assert_close(
        torch.autograd.grad(run().sum(), leaves),
        torch.autograd.grad(run(backend="cpu").sum(), leaves),
    )
    with pytest.raises(IndexError, match="out of bounds"):
        functional.linear_cross_entropy(x, weight, target + 6)


@pytest.mark.parametrize(
    ("dtype", "classes", "smoothing"),
    [
        (torch.bfloat16, 64, 0.0), (torch.bfloat16, 10, 0.0), (torch.bfloat16, 20, 0.0),
        (torch.bfloat16, 64, 1.0), (torch.float16, 64, 0.0),
    ],
)  # fmt: skip
def test_small_losses_of_low_precision_are_pytorchs_in_float32(
    dtype: torch.dtype, classes: int, smoothing: float
) -> None:
    x, target = torch.randn(20, classes, dtype=dtype), torch.randint(classes, (20,))
    x[0], target[0] = 0.0, 1
    x[0, 0] = 6e4  # a float16 sum of two such losses overflows
    ours, theirs = x.clone().requires_grad_(), x.float().requires_grad_()
    loss = functional.cross_entropy(ours, target, label_smoothing=smoothing)
    expected = F.cross_entropy(theirs, target, label_smoothing=smoothing)
    assert _ours(lambda: functional.cross_entropy(ours, target, label_smoothing=smoothing)) == []
    assert torch.equal(loss, expected.to(dtype))
    for result in (loss, expected):
        result.backward()
    assert torch.equal(ours.grad, theirs.grad.to(dtype))  # type: ignore[union-attr, arg-type]


def test_small_modules_run_no_kernel() -> None:
    x = torch.randn(2, 7, 32)
    for name in ("Linear", "LayerNorm"):
        module = CASES[name].make(nn)
        assert not _ours(lambda m=module: m(x).sum().backward())
        with transformer_fast.use_backend("cpu"):
            assert _ours(lambda m=module: m(x).sum().backward())
    attention = CASES["attention"].make(nn).eval()
    with torch.no_grad():
        assert not _ours(lambda: attention(x, x, x))
        with transformer_fast.use_backend("cpu"):
            assert _ours(lambda: attention(x, x, x))


def test_hooks_and_parametrisations_take_effect() -> None:
    seen: list[str] = []
    x = torch.randn(3, 8)
    linear = nn.Linear(8, 8)
    linear.register_forward_hook(lambda *_: seen.append("forward"))
    linear.register_full_backward_hook(lambda *_: seen.append("backward"))
    linear(x.requires_grad_()).sum().backward()
    assert seen == ["forward", "backward"]

    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    attention.out_proj.register_forward_hook(lambda *_: seen.append("projection"))
    with torch.no_grad():
        attention(x[None], x[None], x[None])
    assert seen[-1] == "projection"

    class Double(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2.0 * x

    for name in ("weight", "bias"):
        for make in (lambda: nn.Linear(8, 8), lambda: nn.LayerNorm(8)):
            module = make()
            torch.nn.init.normal_(getattr(module, name))
            before = module(x) - module(torch.zeros_like(x)) * (name == "weight")
            base = getattr(module, name).detach().clone()
            torch.nn.utils.parametrize.register_parametrization(module, name, Double())
            after = module(x) - module(torch.zeros_like(x)) * (name == "weight")
            expected = 2.0 * before if name == "weight" else before + base
            torch.testing.assert_close(after, expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads_of_torch", [1, 2])
def test_norm_gradients_of_many_rows_run_on_kernels(threads_of_torch: int) -> None:
    """With many rows PyTorch's gradients have 4 to 12 times the reference's error.

    They are sums over the rows of each thread. The rule holds for any number of threads, since
    results must not depend on it.
    """
    torch.set_num_threads(threads_of_torch)
    for rows, ours in ((128, False), (129, True)):
        x, weight, bias = (torch.randn(n, 8, requires_grad=True) for n in (rows, 1, 1))
        arguments = x, (8,), weight[0], bias[0]
        assert bool(_ours(lambda a=arguments: functional.layer_norm(*a))) == ours
        assert bool(_ours(lambda a=arguments: functional.add_layer_norm(a[0], *a))) == ours
        explanation = dispatch.explain_call(call_of("layer_norm", (*arguments, 1e-5)))
        assert explanation.backend == ("cpu" if ours else "torch")
        with torch.no_grad():
            assert not _ours(lambda a=arguments: functional.layer_norm(*a))


def test_gradients_of_large_embeddings_run_on_our_kernel() -> None:
    tokens = torch.randint(0, 9, (5,))
    table = nn.Embedding(9, 8)
    assert not _ours(lambda: table(tokens).sum().backward())
    large = nn.Embedding(1 << 14, 64)
    assert _ours(lambda: large(tokens).sum().backward()) == ["embedding_backward.cpu"]


@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm"])
def test_derivatives_of_small_norms_match_finite_differences(name: str) -> None:
    """Compared with finite differences, since derivatives of PyTorch's forward mode are wrong here."""
    func, step = torch.func, 1e-6
    x, along, weight, bias, factor = (torch.randn(n, 6).double() for n in (3, 3, 1, 1, 3))

    def loss(x: Tensor) -> Tensor:
        arguments = (x.shape[-1:], weight[0].to(x.dtype), bias[0].to(x.dtype))
        if name == "layer_norm":
            y = functional.layer_norm(x, *arguments)
        else:
            y = functional.add_layer_norm(x, x * x, *arguments)[0]
        return (y * factor.to(x.dtype)).sin().sum()

    def tangent(x: Tensor) -> Tensor:
        return func.jvp(loss, (x,), (along.to(x.dtype),))[1]

    with transformer_fast.use_backend("reference"):
        slopes = [
            (tangent(x + step * one) - tangent(x - step * one)) / (2 * step)
            for one in torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
        ]
    expected = torch.stack(slopes).view_as(x)
    for dtype in (torch.float64, torch.float32):
        found = func.grad(tangent)(x.to(dtype))
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


def test_the_fast_path_raises_the_same_errors() -> None:
    x, big = torch.randn(3, 8), torch.randn(64, 512)
    with pytest.raises(RuntimeError, match="device"):
        functional.linear(x, torch.empty(5, 8, device="meta"))
    for columns in (512.0, torch.tensor(512.0)):
        with pytest.raises(TypeError):
            functional.layer_norm(big, (columns,))  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="add_layer_norm"):
            functional.add_layer_norm(big, big, (columns,))  # type: ignore[arg-type]
    target = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="label_smoothing"):
        functional.cross_entropy(x, target, label_smoothing=-1.0)
    with pytest.raises(TypeError, match="ignore_index"):
        functional.cross_entropy(x, target, ignore_index=None)  # type: ignore[arg-type]


@torch.no_grad()
def test_symbolic_sizes_are_supported() -> None:
    x, weight = torch.randn(300, 512), torch.randn(600, 512)
    traced = make_fx(lambda x, w: functional.linear(x, w), tracing_mode="symbolic")(x, weight)
    expected = torch.nn.functional.linear(x[:7], weight)
    torch.testing.assert_close(traced(x[:7], weight), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_negative_views_of_weights_match() -> None:
    x, weight = torch.randn(64, 512), torch.nn.Parameter(torch.randn(512, 512))
    y = functional.linear(x, weight, backend="cpu" if _native.module else None)
    negative = functional.linear(x, torch._neg_view(weight))
    torch.testing.assert_close(negative, -y, rtol=1e-4, atol=1e-3)
