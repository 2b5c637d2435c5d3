"""Gradients of the kernels under compile, functorch, checkpointing and double backward."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from harness import drawn, kernel_of
from ops import ROWS
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from transformer_fast import _native, dispatch, explain, strict
from transformer_fast import functional as F
from transformer_fast.reference import DIFFERENTIABLE
from transformer_fast.specs import OPS
from transformer_fast.testing import call_of, require_grad
from transformer_fast.testing.oracle import as_results, is_floating

pytestmark = [
    pytest.mark.sampled(60),
    pytest.mark.usefixtures("fresh"),
    pytest.mark.skipif(_native.module is None, reason=str(_native.why_not)),
]

#: Op -> a case with all arguments that have gradients.
CASES = {op: ROWS[op].sample for op in DIFFERENTIABLE}


def arguments_of(op: str, name: str | None = None, seed: int = 0) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)
    case = OPS[op].case(name or CASES[op])
    return require_grad(op, case.build(torch.float32, "cpu", generator))


def leaves_of(arguments: tuple[Any, ...]) -> list[Tensor]:
    return [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]


def run_of(op: str) -> Any:
    return kernel_of(op).run


def first(result: Any) -> Tensor:
    return as_results(result)[0]


def gradients(op: str, arguments: tuple[Any, ...], run: Any = None) -> tuple[Tensor, ...]:
    loss = first((run or run_of(op))(*arguments)).sin().sum()
    return torch.autograd.grad(loss, leaves_of(arguments))


@pytest.mark.thorough
@pytest.mark.parametrize("op", ["layer_norm", "linear", "feed_forward", "attention"])
def test_compiled_calls_support_any_number_of_rows(op):
    """The same for any number of queries and keys of attention."""
    compiled = torch.compile(run_of(op), backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (5, 8, 13):
        input, *rest = arguments_of(op, "causal" if op == "attention" else None)
        if op == "attention":
            input, *rest[:2] = (torch.randn(2, 3, rows, 16, requires_grad=True) for _ in range(3))
        else:
            input = torch.randn(rows, input.shape[-1], requires_grad=True)
        if op == "linear":
            rest[-1] = torch.randn(rows, rest[0].shape[0], requires_grad=True)
        arguments = (input, *rest)
        torch.testing.assert_close(
            gradients(op, arguments, compiled), gradients(op, arguments), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("op", CASES)
def test_third_derivatives_match_the_reference(op):
    arguments = arguments_of(op)
    leaves = leaves_of(arguments)
    found = []
    for run in (run_of(op), OPS[op].reference):
        total = first(run(*arguments)).sin().sum()
        for _ in range(2):
            gradients = torch.autograd.grad(total, leaves, create_graph=True)
            total = sum(g.square().mean() for g in gradients)
        found.append(torch.autograd.grad(total, leaves))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_checkpoints_have_the_same_second_derivatives():
    """Dropout repeats the pattern of the forward in both derivatives."""
    x = torch.randn(9, 16, requires_grad=True)
    w1, w2 = torch.randn(40, 16), torch.randn(16, 40)

    def block(x):
        h = F.feed_forward(x, w1, None, w2, None, dropout_p=0.3, backend="cpu")
        y, total = F.add_layer_norm(h, x, (16,), dropout_p=0.3, backend="cpu")
        return F.linear(y + total, w1, activation="gelu", backend="cpu")

    found = []
    for run in (lambda: checkpoint(block, x, use_reentrant=False), lambda: block(x)):
        torch.manual_seed(7)
        (once,) = torch.autograd.grad(run().sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(once.square().sum(), x)[0])
    torch.testing.assert_close(*found)


def dispatched(op: str) -> Any:
    """Returns the op as its public function runs it with ``backend="cpu"``."""
    return lambda *arguments: dispatch.select(call_of(op, arguments), "cpu").run(*arguments)


def of_input(op: str, run: Any) -> tuple[Any, Tensor]:
    """Returns the op as a function of its first argument, and that argument."""
    input, *rest = (x.detach() if isinstance(x, Tensor) else x for x in arguments_of(op))
    return lambda x: first(run(x, *rest)).sin(), input


@pytest.mark.parametrize("op", CASES)
def test_forward_mode_matches_the_reference(op):
    function, input = of_input(op, dispatched(op))
    reference, _ = of_input(op, OPS[op].reference)
    tangent = torch.randn(input.shape, generator=torch.Generator().manual_seed(1))
    _, expected = torch.func.jvp(reference, (input,), (tangent,))
    _, got = torch.func.jvp(function, (input,), (tangent,))
    assert torch.equal(got, expected)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level(), torch.no_grad():
        assert forward_ad.unpack_dual(function(input)).tangent is None
        dual = forward_ad.unpack_dual(function(forward_ad.make_dual(input, tangent)))
        torch.testing.assert_close(dual.tangent, expected)
        with strict(), pytest.raises(NotImplementedError, match="forward-mode differentiation"):
            function(forward_ad.make_dual(input, tangent))


@pytest.mark.parametrize("op", CASES)
def test_a_backward_keeps_the_tangent_of_its_gradient(op):
    """A backward is linear in its gradient, so the result's tangent is the backward of the tangent."""
    arguments = arguments_of(op, "gelu" if op == "linear" else None)  # silu has no forward mode
    leaves = leaves_of(arguments)
    result = first(run_of(op)(*arguments))
    upstream = torch.randn(2, *result.shape, generator=torch.Generator().manual_seed(1))

    def backward(grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(result, leaves, grad, retain_graph=True)

    expected = backward(upstream[0]), backward(upstream[1])
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        found = [forward_ad.unpack_dual(x) for x in backward(forward_ad.make_dual(*upstream))]
    for dual, *both in zip(found, *expected, strict=True):
        torch.testing.assert_close(list(dual), both, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", CASES)
def test_functional_transforms_match_the_reference(op):
    """vmap, grad, grad of grad, and forward over reverse, with a named backend."""
    function, input = of_input(op, dispatched(op))
    reference, _ = of_input(op, OPS[op].reference)
    batch = torch.stack((input, 0.5 * input))

    def each(f: Any) -> list[Tensor]:
        def loss(x: Tensor) -> Tensor:
            return f(x).sum()

        def penalty(x: Tensor) -> Tensor:
            return torch.func.grad(loss)(x).square().sum()

        return [
            torch.func.grad(loss)(input),
            torch.func.grad(penalty)(input),
            torch.func.jvp(torch.func.grad(loss), (input,), (input,))[1],
            torch.func.vmap(f)(batch),
            torch.func.vmap(torch.func.grad(penalty))(batch),
        ]

    for got, want in zip(each(function), each(reference), strict=True):
        assert torch.equal(got, want)


def test_strict_mode_refuses_transforms():
    x = torch.randn(3, 5, 8)
    with strict(), pytest.raises(NotImplementedError, match=r"torch\.func transforms"):
        torch.func.vmap(lambda x: F.layer_norm(x, (8,)))(x)
    assert "transform" not in str(explain("layer_norm", x, (8,)))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_hessians_match_the_reference():
    """Compares two products with vectors, since each row of a Hessian costs a backward."""
    for op in CASES:
        found = []
        for run in (run_of(op), OPS[op].reference):
            function, input = of_input(op, run)
            ways = torch.randn(2, *input.shape, generator=torch.Generator().manual_seed(1))

            def along(steps: Tensor, f: Any = function, x: Tensor = input, w: Tensor = ways) -> Any:
                return f(x + steps[0] * w[0] + steps[1] * w[1]).sum()

            found.append(torch.autograd.functional.hessian(along, torch.zeros(2), vectorize=True))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_no_graph_is_recorded_without_gradients():
    x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    assert F.linear(x, w, backend="cpu").grad_fn is not None
    with torch.no_grad():
        assert F.linear(x, w, backend="cpu").grad_fn is None
    with torch.inference_mode():
        assert not F.linear(x, w, backend="cpu").requires_grad
    assert not F.linear(x, w.detach(), backend="cpu").requires_grad


def saved_bytes(function: Any, *leaves: Tensor) -> int:
    """Returns the bytes that a call saves for backward, counting each storage once."""
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = first(function(*leaves))
    result.sum().backward()
    assert all((leaf.grad is not None) == leaf.requires_grad for leaf in leaves)
    return sum(storages.values())


@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=3))[:-1])
def test_saved_memory_is_at_most_pytorchs(needs):
    """No more than PyTorch saves: a linear layer with a frozen weight does not save its input."""

    def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
        return [torch.randn(s, requires_grad=n) for s, n in zip(shapes, needs, strict=True)]

    functional = torch.nn.functional
    ours = saved_bytes(F.linear, *leaves((50, 60), (70, 60), (70,)))
    assert ours <= saved_bytes(functional.linear, *leaves((50, 60), (70, 60), (70,)))
    norm = leaves((50, 64), (64,), (64,))
    ours = saved_bytes(lambda x, w, b: F.layer_norm(x, (64,), w, b, backend="cpu"), *norm)
    norm = leaves((50, 64), (64,), (64,))
    assert ours <= saved_bytes(lambda x, w, b: functional.layer_norm(x, (64,), w, b), *norm)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("needs", [(True, False, False), (False, True, True), (False, False, True)])
def test_saved_memory_of_frozen_networks_is_at_most_pytorchs(needs, activation):
    def leaves() -> list[Tensor]:
        shapes = ((50, 32), (128, 32), (32, 128))
        return [torch.randn(s, requires_grad=n) for s, n in zip(shapes, needs, strict=True)]

    def ours(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return F.feed_forward(x, w1, None, w2, None, activation=activation, backend="cpu")

    def theirs(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        hidden = getattr(torch.nn.functional, activation)(torch.nn.functional.linear(x, w1))
        return torch.nn.functional.linear(hidden, w2)

    assert saved_bytes(ours, *leaves()) <= saved_bytes(theirs, *leaves())


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_do_not_depend_on_which_are_requested(op, dtype):
    """Also with create_graph, each gradient is the same whichever others are requested."""
    arguments = drawn(op, CASES[op], dtype)

    def found(names: tuple[str, ...]) -> dict[str, Tensor]:
        given = require_grad(op, arguments, names)
        total = first(run_of(op)(*given)).float().sin().sum()
        wanted = torch.autograd.grad(total, leaves_of(given), create_graph=True)
        return dict(zip(names, wanted, strict=True))

    names = OPS[op].named(arguments)
    names = tuple(n for n in OPS[op].gradients_of if is_floating(names[n]))
    every = found(names)
    for one in names:
        for some in ((one,), tuple(name for name in names if name != one)):
            for name, gradient in (found(some) if some else {}).items():
                torch.testing.assert_close(gradient, every[name])


@pytest.mark.parametrize("op", CASES)
def test_gradients_of_matrices_left_out_of_a_call_are_not_computed(op, monkeypatch):
    """Calls `torch.autograd.grad` with the input alone, as attribution methods do."""
    monkeypatch.setattr("transformer_fast.ops.autograd._WORTH_ASKING", 0)
    arguments = arguments_of(op)
    named = OPS[op].named(arguments)
    names = [n for n in OPS[op].gradients_of if is_floating(named[n])]
    matrices = [n for n in names if n.startswith("weight") and named[n].dim() == 2]
    if not matrices:
        pytest.skip("no gradient of a matrix")
    loss = first(run_of(op)(*arguments)).sin().sum()
    leaves = {id(named[n]): n for n in names}
    computed: dict[str, bool] = {}
    nodes = [loss.grad_fn]
    for node in nodes:  # the op's own node, or the nodes of the ops that it calls
        inputs = [following for following, _ in node.next_functions]
        nodes += filter(None, inputs)
        of = [leaves.get(id(getattr(following, "variable", None))) for following in inputs]
        node.register_hook(
            lambda grads, _, of=of: computed.update(
                {n: g is not None for n, g in zip(of, grads, strict=True) if n is not None}
            )
        )

    every = torch.autograd.grad(loss, [named[n] for n in names], retain_graph=True)
    assert all(computed.values())
    for name, expected in zip(names, every, strict=True):
        (grad,) = torch.autograd.grad(loss, named[name], retain_graph=True)
        torch.testing.assert_close(grad, expected)
        assert computed[name]
        assert not any(computed[other] for other in matrices if other != name)
    loss.backward()
    assert all(computed.values())
    again = first(checkpoint(run_of(op), *arguments, use_reentrant=False)).sin().sum()
    torch.testing.assert_close(torch.autograd.grad(again, [named[n] for n in names]), every)


def test_unsaved_weights_may_change_before_backward():
    """As in PyTorch: the gradients of a first layer do not depend on its weight."""
    x, b = torch.randn(50, 16), torch.randn(16, requires_grad=True)
    for function in (
        lambda w: F.linear(x, w, b, backend="cpu"),
        lambda w: F.linear(x, w, b, activation="gelu", backend="cpu"),
        lambda w: F.layer_norm(x, (16,), w[0], b, backend="cpu"),
    ):
        weight = torch.randn(16, 16, requires_grad=True)
        loss = function(weight).sum()
        with torch.no_grad():
            weight.mul_(2.0)
        loss.backward()
        assert weight.grad is not None
    weight, x = torch.randn(16, 16, requires_grad=True), x.requires_grad_()
    loss = F.linear(x, weight, b, backend="cpu").sum()
    with torch.no_grad():
        weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("op", "case"), [("add_layer_norm", None), ("attention", "dropout, weights, causal")]
)
def test_gradients_through_the_second_result_only(op, case):
    arguments = arguments_of(op, case)
    leaves = leaves_of(arguments)[:2]
    got, expected = (
        torch.autograd.grad(run(*arguments)[1].sin().sum(), leaves)
        for run in (run_of(op), OPS[op].reference)
    )
    torch.testing.assert_close(got, expected)
