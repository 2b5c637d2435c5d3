"""Runs a rewritten graph as a tape: a list of instructions, in one call of C++ (``csrc/autograd``).

An instruction calls an entry for small calls or an operator of PyTorch, without the time that Python needs
to call them. Other nodes, and calls that an entry declines, run as functions of Python. While a mode,
autocast or a transform is active, the graph runs as a whole in Python.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from .. import _native, fast_path, functional
from ..recipe import NormKind
from . import run_time
from .nodes import dtype, is_number, value
from .ops import mutates, read
from .sublayers import Sublayers

_ENTRIES = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm", "linear", "feed_forward")
#: Function -> the name of its entry, which takes the same arguments without `_UNSUPPORTED`.
_FUNCTIONS = {getattr(functional, name): name for name in _ENTRIES}
_UNSUPPORTED = {"linear": ("residual", "backend")}
#: Operators of two operands; those of `_SYMMETRIC` may swap them.
_BINARY = {
    **{name: name for name in ("add", "sub", "mul", "div", "eq", "ne", "lt", "le", "gt", "ge")},
    **{"and_": "bitwise_and", "or_": "bitwise_or"},
}
_SYMMETRIC = frozenset({"add", "mul", "eq", "ne", "bitwise_and", "bitwise_or"})
_RESHAPES = frozenset({"view", "reshape", "permute", "transpose", "unsqueeze", "contiguous"})
#: Calls that are computed in advance if all their arguments are known.
_CONSTANT = frozenset({torch.ones, torch.zeros, torch.full, torch.tril, torch.triu, "tril", "triu"})
#: Largest number of elements of a value that is computed in advance.
_LARGEST = 1 << 16
#: Values of ``IndexKind`` in csrc/autograd/tape.cpp.
_NEW_DIMENSION, _ALL, _SELECT, _SLICE = range(4)

#: An entry, or the name of an operator in tape.cpp; its operands; a function of the items of its result.
_Native = tuple[Any, Sequence[Any], Any]


class _Function:
    """Nodes of a graph as a function, which the first call creates."""

    def __init__(
        self, module: GraphModule, nodes: Sequence[Node], inputs: Sequence[Node], results: Any
    ) -> None:
        self.parts = module, nodes, inputs, results

    def __call__(self, *values: Any) -> Any:
        return self.forward(*values)

    @functools.cached_property
    def forward(self) -> Callable[..., Any]:
        module, nodes, inputs, results = self.parts
        graph = Graph()
        copies = {node: graph.placeholder(node.name) for node in inputs}
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(map_arg(results, copies.__getitem__))
        return GraphModule(module, graph).forward


def tape(module: GraphModule) -> Callable[..., Any]:
    """Returns the graph as a function; its ``forward`` if there is nothing that runs natively."""
    nodes = list(module.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    (outputs,) = nodes[-1].args
    tensors = [x for x in map(value, nodes) if isinstance(x, Tensor)]
    if (
        _native.autograd is None
        or not isinstance(outputs, tuple)
        or not all(isinstance(node, Node) for node in outputs)
        or any(not x.is_cpu for x in tensors)
    ):
        return module.forward
    known = _known(nodes)
    slots = {node: slot for slot, node in enumerate([*given, *known])}
    #: Nodes that are one instruction: a native one, or all in a row that are not.
    parts: list[tuple[list[Node], _Native | None]] = []
    for node in nodes[len(given) : -1]:
        if node in known:
            continue
        slots[node] = len(slots)
        native = _native_call(node, slots)
        if native is None and parts and parts[-1][1] is None:
            parts[-1][0].append(node)
        else:
            parts.append(([node], native))
    if all(native is None for _, native in parts):
        return module.forward
    last = {each: index for index, (part, _) in enumerate(parts) for n in part for each in _read(n)}
    instructions = []
    for index, (part, native) in enumerate(parts):
        inputs = list(dict.fromkeys(n for node in part for n in _read(node) if n not in part))
        results = [n for n in part if native or n in outputs or last.get(n, index) > index]
        function = _Function(module, part, inputs, results[0] if len(results) == 1 else (*results,))
        released = [
            slots[n]
            for n in (*inputs, *results)
            if last.get(n, index) == index and n not in outputs and slots[n] >= len(given) + len(known)
        ]
        call, operands, finish = native or (None, [], None)
        python = function if native else function.forward
        instructions.append(
            (call, list(operands), finish, python, [slots[n] for n in inputs],
             [slots[n] for n in results], released)
        )  # fmt: skip
    found: Callable[..., Any] = _native.autograd.tape(
        module.forward, len(given), [*known.values()], len(slots), instructions,
        [slots[node] for node in outputs],
    )  # fmt: skip
    return found


def _read(node: Node) -> list[Node]:
    return node.all_input_nodes


def _known(nodes: Sequence[Node]) -> dict[Node, Tensor]:
    """Returns the values of nodes that depend on constants only, such as causal masks.

    Their users only read them and return new memory.
    """
    known: dict[Node, Tensor] = {}
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        for node in nodes:
            x = value(node)
            is_small = isinstance(x, Tensor) and all(
                isinstance(n, int) for n in x.shape
            ) and x.numel() <= _LARGEST  # fmt: skip
            read_only = all(user.target in _CONSTANT or _name(user) in _BINARY for user in node.users)
            if (
                node.target not in _CONSTANT
                or not is_small
                or not read_only
                or any(n not in known for n in node.all_input_nodes)
            ):
                continue
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            name = node.target
            run: Any = getattr(Tensor, name) if isinstance(name, str) else name
            known[node] = run(*args, **kwargs)
    # Values that only other constants read are not needed.
    return {n: x for n, x in known.items() if any(user not in known for user in n.users)}


def _native_call(node: Node, slots: dict[Node, int]) -> _Native | None:
    """Returns the instruction of a node, or None if it runs in Python."""
    if node.op == "call_module":
        module: Any = node.graph.owning_module
        layers = module.get_submodule(str(node.target))
        return _layers(layers, [slots[n] for n in node.args]) if type(layers) is Sublayers else None
    if node.op not in ("call_function", "call_method") or mutates(node):
        return None
    if node.target in _FUNCTIONS:
        return _entry_call(node, slots)
    if node.target is run_time.prepare_hidden and not node.kwargs:
        condition, hides, fill, rank = node.args
        rest = [(hides,), (math.isfinite(fill),), (rank,)]
        return fast_path.entry("hidden_mask"), [slots[condition], *rest], run_time.Mask
    found = _operator(node)
    if found is None:
        return None
    name, operands = found
    return name, [slots[x] if isinstance(x, Node) else (x,) for x in operands], None


def _entry_call(node: Node, slots: dict[Node, int]) -> _Native | None:
    name = _FUNCTIONS[node.target]
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    for unsupported in _UNSUPPORTED.get(name, ("backend",)):
        if bound.arguments.pop(unsupported) is not None:
            return None
    given = list(bound.arguments.values())
    if any(isinstance(x, (tuple, list)) and any(isinstance(n, Node) for n in x) for x in given):
        return None
    operands = [slots[x] if isinstance(x, Node) else (x,) for x in given]
    return fast_path.entry(name), operands, None


def _layers(layers: Sublayers, slots: Sequence[int]) -> _Native | None:
    """Returns the call of the entry of small layers; its parameters are looked up in each call."""
    plan = layers.plan
    pairs = [pair for one in plan.layer.sublayers for pair in one.in_pairs()]
    options = {(one.heads, one.scale) for one in plan.layer.sublayers if one.kind.is_attention}
    if (
        len(options) != 1
        or next(iter(options))[1] is not None
        or any(norm.kind != NormKind.LAYER and not kind.is_part for kind, *_, norm in pairs)
        or max(plan.own[1], plan.cross[1]) >= 0
        or layers.int8
    ):
        return None
    parameters = [
        -1 if place is None else slots[place]
        for _, first, second, norm in pairs
        for place in (first.weight, first.bias, second.weight, second.bias, norm.weight, norm.bias)
    ]
    own, cross = (
        (-1 if mask[0] < 0 else slots[mask[0]], mask[2]) for mask in (plan.own, plan.cross)
    )
    kinds, eps = [int(kind) for kind, *_ in pairs], [norm.eps for *_, norm in pairs]
    heads, norm_first = next(iter(options))[0], plan.layer.norm_first
    memory = -1 if plan.memory < 0 else slots[plan.memory]
    return fast_path.entry("encoder_layer"), [
        slots[plan.x], (kinds,), parameters, (eps,), (heads,), (norm_first,), (True,),
        (plan.layer.activation,), own, memory, cross, (plan.dropouts,),
    ], None  # fmt: skip


def _name(node: Node) -> str:
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))


def _operator(node: Node) -> tuple[str, Sequence[Any]] | None:
    """Returns the name of an operator in tape.cpp and its operands, or None."""
    args, name = node.args, _name(node)
    if not args or not isinstance(value(node), Tensor):
        if node.target is operator.getitem and isinstance(args[1], int):
            return None
        return None
    op = read(node)
    if node.target is F.embedding:
        return _embedding(node)
    if node.target is operator.getitem:
        return _index(*args) if isinstance(value(args[0]), Tensor) else None
    if name in _RESHAPES and node.op == "call_method" and not node.kwargs:
        sizes = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        return (name, [args[0], *sizes]) if all(map(_is_integer, sizes)) else None
    if op is not None and op.name == "not" and dtype(args[0]) == torch.bool and len(args) == 1:
        return "bitwise_not", args
    is_function = getattr(operator, name, None) is node.target or node.target is getattr(torch, name, 0)
    if op is not None and op.name in _BINARY:
        name, args = op.name, (op["input"], op["other"])
    elif not is_function or name not in _BINARY:
        return None
    if len(args) != 2 or node.kwargs:
        return None
    one, other = args
    if not isinstance(value(one), Tensor) and _BINARY[name] in _SYMMETRIC:
        one, other = other, one
    is_operand = isinstance(value(other), Tensor) or is_number(other) or _is_integer(other)
    if not isinstance(value(one), Tensor) or not is_operand:
        return None
    return _BINARY[name], (one, other)


def _is_integer(x: Any) -> bool:
    found = value(x)
    return isinstance(found, (int, torch.SymInt)) and not isinstance(found, bool)


def _embedding(node: Node) -> tuple[str, Sequence[Any]] | None:
    bound = inspect.signature(F.embedding).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    padding = -1 if given["padding_idx"] is None else given["padding_idx"]
    options = given["max_norm"], given["scale_grad_by_freq"], given["sparse"]
    if options != (None, False, False) or not isinstance(padding, int) or padding < -1:
        return None
    return "embedding", (given["input"], given["weight"], padding)


def _index(x: Node, index: Any) -> tuple[str, Sequence[Any]] | None:
    """Returns basic indexing by integers, slices with step 1, and None."""
    found: list[Any] = []
    for each in index if isinstance(index, tuple) else (index,):
        if each is None:
            found += _NEW_DIMENSION, 0, 0
        elif isinstance(each, slice) and each.step in (None, 1):
            start = 0 if each.start is None else each.start
            stop = (1 << 63) - 1 if each.stop is None else each.stop
            is_all = each.start is None and each.stop is None
            if not _is_integer(start) or not _is_integer(stop):
                return None
            found += (_ALL, 0, 0) if is_all else (_SLICE, start, stop)
        elif not isinstance(each, Node) and _is_integer(each):
            found += _SELECT, each, 0
        else:
            return None
    return ("index", (x, *found)) if set(found[::3]) != {_ALL} else None
