"""torch.compile(backend="transformer_fast") with blocks that set a mode inside the compiled
function.

No rewrite crosses the border of a torch.no_grad, torch.enable_grad or autocast block. Checkpoints
recompute with the same dropout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from accelerate_checks import compiled
from hand_written import (
    NORMS,
    Block,
    annotated_norm,
    divided,
    einsum,
    scaled_first,
    softmax_by_hand,
)
from harness import open_autocast_blocks
from module_checks import check_budget
from torch import Tensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from transformer_fast.compile.backend import rewrite
from transformer_fast.compile.inner import why_not
from transformer_fast.compile.modes import Modes, current_modes
from transformer_fast.testing.parity import GRADIENT_FACTOR

B, H, T, D = 2, 2, 16, 8
M = H * D
#: Shapes of the inputs x, p and bias of each program.
SIZES = (B, T, M), (M, M), (M,)
#: Rounding error of one value in autocast, relative.
_BF16 = torch.finfo(torch.bfloat16).eps / 2


def _attention(attend: Any) -> Any:
    def run(x: Tensor, p: Tensor, bias: Tensor) -> Any:
        q, k, v = (y.view(B, T, H, D).transpose(1, 2) for y in (4 * x, 4 * x + bias, x * bias))
        mask = torch.ones(T, T, dtype=torch.bool).tril()
        found = attend(q, k, v, mask, lambda weights: F.dropout(weights, 1e-12))
        return (found[0] if isinstance(found, tuple) else found) * p[0, 0]

    return run


def _learned_bias(x: Tensor, p: Tensor, bias: Tensor) -> Tensor:
    """The bias is an input of the program, and is scaled together with the scores."""
    scores = ((x * bias) @ x.mT + p) / 2
    return scores.softmax(-1) @ x


def _feed_forward(x: Tensor, p: Tensor, bias: Tensor) -> Tensor:
    hidden = F.linear(x, p, bias)
    hidden = 0.5 * hidden * (1 + torch.tanh(0.7978845608 * (hidden + 0.044715 * hidden**3)))
    return F.linear(F.dropout(hidden, 1e-12), p.t(), bias)


def _linear(x: Tensor, p: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, F.relu(F.linear(x, p, bias)).view(-1, M), p).view(B, T, M)


def _add_norm(x: Tensor, p: Tensor, bias: Tensor) -> Tensor:
    total = F.dropout(x * bias, 1e-12) + x
    return F.layer_norm(total, (M,), bias, bias) + total


def _convolutions(x: Tensor, p: Tensor, bias: Tensor) -> Tensor:
    hidden = F.relu(F.conv1d(x.transpose(1, 2), p[..., None], bias))
    return F.conv1d(hidden, p[..., None], bias).transpose(1, 2) * bias


def _patches(x: Tensor, p: Tensor, bias: Tensor) -> Tensor:
    image = x.view(B, 2, 8, 16)
    return F.conv2d(image, p.view(32, 2, 2, 2), None, 2).flatten(2).transpose(1, 2) * p[0, 0]


def _merged(x: Tensor, p: Tensor, bias: Tensor) -> Tensor:
    return x * bias.unsqueeze(0) + p[0].unsqueeze(0) + bias.unsqueeze(0)


def _in_place(x: Tensor, p: Tensor, bias: Tensor) -> Tensor:
    y = x * bias
    y += x * p[0]
    return F.layer_norm(y, (M,), p[0]) * 2


PROGRAMS: dict[str, Callable[..., Tensor]] = {
    **{f.__name__: _attention(f) for f in (divided, einsum, scaled_first, softmax_by_hand)},
    "annotated norm": lambda x, p, bias: annotated_norm(x * bias, p[0], bias),
    **{f"norm {n}": lambda x, p, bias, n=n: NORMS[n](x * bias, p[0], bias) for n in [*NORMS][1:3]},
    "rms norm": lambda x, p, bias: (
        p[0] * ((y := x * bias) * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5))
    ),
    **{
        f.__name__: f
        for f in (
            _learned_bias, _feed_forward, _linear, _add_norm, _convolutions, _patches, _merged,
            _in_place,
        )
    },
}  # fmt: skip


class Border(NamedTuple):
    """The two calls that enclose a block."""

    enter: tuple[Any, ...]
    exit: tuple[Any, ...]
    #: Context with the modes around the block; restores them if the program raises.
    outside: Callable[[], AbstractContextManager[Any]]
    dtype: torch.dtype
    #: True if the block extends to the end of the graph.
    is_rest: bool = False


def _grad(enabled: bool) -> tuple[Any, ...]:
    return torch._C._set_grad_enabled, enabled


BORDERS = {
    "no_grad": Border(_grad(False), _grad(True), torch.enable_grad, torch.float64),
    "enable_grad": Border(_grad(True), _grad(False), torch.no_grad, torch.float64, is_rest=True),
    "autocast": Border(
        (_enter_autocast, "cpu", torch.bfloat16, True, None), (_exit_autocast,),
        lambda: torch.autocast("cpu", enabled=False), torch.float32,
    ),
    "autocast(enabled=False)": Border(
        (_enter_autocast, "cpu", None, False, None), (_exit_autocast,),
        lambda: torch.autocast("cpu", torch.bfloat16), torch.float32,
    ),
}  # fmt: skip


def _captured(function: Any, args: list[Tensor]) -> tuple[GraphModule, list[Tensor]]:
    """Returns the program as torch.compile captures it, and its inputs in order."""
    found: list[Any] = []

    def backend(module: GraphModule, inputs: list[Tensor]) -> Any:
        found.extend((module, inputs))
        return module.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return found[0], found[1]


def _with_block(module: GraphModule, node: Node, border: Border) -> GraphModule:
    """Returns the program with ``node`` inside a block."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    nodes = list(graph.nodes)
    with graph.inserting_before(copies[node]):
        entered = graph.call_function(border.enter[0], border.enter[1:])
    with graph.inserting_before(nodes[-1] if border.is_rest else copies[node].next):
        graph.call_function(border.exit[0], border.exit[1:] or (entered,))
    return GraphModule(module, graph)


def _modes(border: Border) -> Modes:
    with border.outside():
        return current_modes()


class _Annotating(Interpreter):
    """Runs a program and records the value of every node, as Dynamo does."""

    def run_node(self, node: Node) -> Any:
        found = super().run_node(node)
        if not isinstance(found, torch.autocast):
            node.meta["example_value"] = found
        return found


@contextmanager
def _closing_autocast() -> Iterator[None]:
    """Context manager that closes the autocast blocks that a program which raises leaves open."""
    before = open_autocast_blocks()
    try:
        yield
    finally:
        while open_autocast_blocks() > before:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()


def _results(
    run: Callable[..., Any], inputs: list[Tensor], border: Border
) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the output, and the gradient of each input."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    with border.outside(), _closing_autocast():
        [output] = run(*inputs)
    if not output.requires_grad:
        return output, [None] * len(inputs)
    total = output.double().cos().sum()
    return output.detach(), list(torch.autograd.grad(total, inputs, allow_unused=True))


@pytest.mark.sampled(10, 25)
@pytest.mark.parametrize("border", BORDERS.values(), ids=BORDERS)
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_no_rewrite_crosses_a_border(program: Callable[..., Tensor], border: Border) -> None:
    """Each node in turn is inside a block: results, dtypes and gradients stay the same."""
    torch.manual_seed(0)
    args = [torch.randn(size, dtype=border.dtype) for size in SIZES]
    with border.outside():
        module, inputs = _captured(program, [x.requires_grad_() for x in args])
    compared = 0
    for node in module.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        block = _with_block(module, node, border)
        try:
            expected = _results(_Annotating(block).run, inputs, border)
        except RuntimeError:  # dtypes do not match, or backward needs an overwritten tensor
            continue
        rewrite(block, _modes(border))
        got = _results(block.forward, inputs, border)
        assert got[0].dtype == expected[0].dtype
        assert [x is None for x in got[1]] == [x is None for x in expected[1]]
        if border.dtype == torch.float64:
            torch.testing.assert_close(got, expected)
        else:
            exact = _results(block.forward, [x.double() for x in inputs], border)
            check_budget(got[0], expected[0], exact[0], unit=_BF16)
            check_budget(got[1], expected[1], exact[1], GRADIENT_FACTOR, _BF16)
        compared += 1
    assert compared > 2


@pytest.mark.parametrize(
    "block",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autograd.graph.disable_saved_tensors_hooks("no hooks"),
    ],
    ids=["no_grad", "inference_mode", "autocast", "a mode that is not modelled"],
)
def test_blocks_that_torch_compile_captures(block: Any) -> None:
    layers = [torch.nn.Linear(M, M).requires_grad_(False) for _ in range(3)]

    def run(x: Tensor) -> Tensor:
        x = layers[0](x)
        with block():
            x = F.relu(x)
        return layers[2](F.relu(layers[1](x)))

    torch.compiler.reset()
    ours, reports = compiled(run)
    x = torch.randn(T, M)
    torch.testing.assert_close(ours(x), run(x))
    assert reports[0].counts == {"feed_forward": 1, "linear": 1}
    assert reports[0].others["relu"] == 1


def test_inductor_is_not_used_if_a_block_enables_gradients() -> None:
    with torch.no_grad():
        module, inputs = _captured(PROGRAMS["_linear"], [torch.ones(s) for s in SIZES])
        given = [x.requires_grad_() for x in inputs]
        assert why_not(module, given) is None
        [first, *_] = [node for node in module.graph.nodes if node.op != "placeholder"]
        block = _with_block(module, first, BORDERS["enable_grad"])
        assert "training" in str(why_not(block, given))


_SELECTIVE = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default, torch.ops.aten.mm.default]
)


@pytest.mark.sampled(20, 50)
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"use_reentrant": False},
        {"use_reentrant": True},
        {"use_reentrant": False, "determinism_check": "none", "early_stop": False},
        {"use_reentrant": False, "context_fn": _SELECTIVE},
    ],
    ids=["plain", "reentrant", "without checks", "selective"],
)
def test_checkpoints_recompute_with_the_same_dropout(options: dict[str, Any], levels: int) -> None:
    block = Block(False, True, p=0.3)

    def forward(x: Tensor) -> Tensor:
        return block(x, x, None, None)

    def run(x: Tensor, depth: int = levels) -> Tensor:
        if depth == 0:
            return forward(x)
        return checkpoint(run, x, depth - 1, **options).sin()

    def without(x: Tensor) -> Tensor:
        return forward(x).sin().sin() if levels == 2 else forward(x).sin()

    def results(run: Any) -> list[Tensor]:
        torch.compiler.reset()
        torch.manual_seed(1)
        x = torch.linspace(-2, 2, 2 * 6 * 32).view(2, 6, 32).requires_grad_()
        y = run(x)
        return [y, *torch.autograd.grad((y * y).sum(), [x, *block.parameters()]), torch.rand(3)]

    ours, reports = compiled(run, fullgraph=True)
    found = results(ours)
    # selective checkpointing chooses among PyTorch's operators: no rewrite
    if "context_fn" in options:
        assert not reports[0].counts
        expected = results(run)
    else:
        assert reports[0].counts["attention"] == 1
        expected = results(compiled(without)[0])
    torch.testing.assert_close(found, expected)
