"""Runs a rewritten graph as a tape: a list of instructions, in one call of C++ (``csrc/autograd``).

An instruction calls an entry for small calls or a PyTorch operator, without the overhead of Python.
Nodes without one, and calls that the entry does not support, run as Python functions. While a mode,
autocast or a transform is active, the whole graph runs in Python.
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
from ..functional.masks import is_looked_at
from ..recipe import NormKind
from . import run_time
from .nodes import dtype, is_number, value
from .ops import mutates, read
from .sublayers import Sublayers

_ENTRIES = ("layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm", "linear", "feed_forward")
#: Function -> the name of its entry, which has the same arguments except `_UNSUPPORTED`.
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

#: An entry, or an operator's name in tape.cpp; its operands; a function of its result, or None.
_Native = tuple[Any, Sequence[Any], Any]


class _Function:
    """A function that runs some nodes of a graph; the first call generates its code."""

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
    """Returns the graph as a function; its ``forward`` if no node runs natively."""
    nodes = list(module.graph.nodes)
    given = [node for node in nodes if node.op == "placeholder"]
    outputs: Any = nodes[-1].args[0]
    if (
        _native.autograd is None
        or not isinstance(outputs, tuple)
        or not all(isinstance(node, Node) for node in outputs)
        or any(isinstance(x, Tensor) and not x.is_cpu for x in map(value, nodes))
    ):
        return module.forward
    known, unused = _known(nodes)
    slots = {node: slot for slot, node in enumerate([*given, *known])}
    #: Nodes of each instruction: one that runs natively, or consecutive ones that do not.
    parts: list[tuple[list[Node], _Native | None]] = []
    for node in nodes[len(given) : -1]:
        if node in known or node in unused:
            continue
        slots[node] = len(slots)
        native = _native_call(node, slots)
        if native is None and parts and parts[-1][1] is None:
            parts[-1][0].append(node)
        else:
            parts.append(([node], native))
    if all(native is None for _, native in parts):
        return module.forward
    reads = [
        list(dict.fromkeys(n for node in part for n in node.all_input_nodes if n not in part))
        for part, _ in parts
    ]
    last = {node: index for index, inputs in enumerate(reads) for node in inputs}
    owned = len(given) + len(known)  # slots from here on are released
    instructions = []
    for index, ((part, native), inputs) in enumerate(zip(parts, reads, strict=True)):
        results = [n for n in part if native or n in outputs or n in last]
        function = _Function(module, part, inputs, results[0] if len(results) == 1 else (*results,))
        released = [
            slots[n]
            for n in (*inputs, *results)
            if last.get(n, index) == index and n not in outputs and slots[n] >= owned
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


def _known(nodes: Sequence[Node]) -> tuple[dict[Node, Tensor], set[Node]]:
    """Returns the values of constant nodes, such as causal masks, and nodes that only these read.

    No user of such a value changes it or returns a view of it.
    """
    known: dict[Node, Tensor] = {}
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        for node in nodes:
            x, run = value(node), node.target
            if (
                not _is_call(node)
                or run not in _CONSTANT
                or not isinstance(x, Tensor)
                or not all(isinstance(n, int) for n in x.shape)
                or x.numel() > _LARGEST
                or x.requires_grad
                or not all(map(_only_reads, node.users))
                or any(n not in known for n in node.all_input_nodes)
            ):
                continue
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = (getattr(Tensor, run) if isinstance(run, str) else run)(*args, **kwargs)
    unused = {node for node in known if all(user in known for user in node.users)}
    return {node: x for node, x in known.items() if node not in unused}, unused


def _only_reads(user: Node) -> bool:
    """True if the node does not change its arguments, and its result shares no memory with them."""
    is_known = user.target in _CONSTANT or _name(user) in _BINARY
    return _is_call(user) and is_known and not mutates(user)


def _is_call(node: Node) -> bool:
    return node.op in ("call_function", "call_method")


def _native_call(node: Node, slots: dict[Node, int]) -> _Native | None:
    """Returns the instruction of a node, or None if it runs in Python."""
    args: Any = node.args
    if node.op == "call_module":
        module: Any = node.graph.owning_module
        layers = module.get_submodule(str(node.target))
        return _layers(layers, [slots[n] for n in args]) if type(layers) is Sublayers else None
    if not _is_call(node) or mutates(node):
        return None
    if node.target is run_time.prepare_hidden:
        condition, hides, fill, rank = args
        rest = [(hides,), (math.isfinite(fill),), (rank,)]
        return fast_path.entry("hidden_mask"), [slots[condition], *rest], run_time.Mask
    if node.target is run_time.attention:
        return _attention(args, slots)
    if node.target is operator.getitem and args[0].target is run_time.attention:
        return operator.getitem, [slots[args[0]], (args[1],)], None
    is_entry = node.target in _FUNCTIONS
    found = _entry_call(node) if is_entry else _operator(node, args)
    if found is None:
        return None
    name, operands = found
    call = fast_path.entry(name) if is_entry else name
    return call, [slots[x] if isinstance(x, Node) else (x,) for x in operands], None


def _entry_call(node: Node) -> tuple[str, Sequence[Any]] | None:
    """Returns the node as (name of the entry, arguments), or None."""
    target: Any = node.target
    name, given = _FUNCTIONS[target], _arguments(target, node)
    for unsupported in _UNSUPPORTED.get(name, ("backend",)):
        if given.pop(unsupported) is not None:
            return None
    found = list(given.values())
    is_known = all(not isinstance(n, Node) for x in found if isinstance(x, tuple) for n in x)
    return (name, found) if is_known else None


def _arguments(function: Any, node: Node) -> dict[str, Any]:
    bound = inspect.signature(function).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    return bound.arguments


def _mask(slot: int, is_causal: bool) -> tuple[Any, Any]:
    """Returns the two operands of a `run_time.Mask`: its tensor, and whether it is causal."""
    return (slot, None), (slot, None, is_causal)


def _attention(args: Any, slots: dict[Node, int]) -> _Native | None:
    """Returns the call of the entry of `run_time.attention`, or None."""
    *heads, hidden, added, scale, dropout_p, need_weights, contiguous = args
    if added is not None or need_weights or contiguous:
        return None
    mask, is_causal = _mask(-1 if hidden is None else slots[hidden], False)
    factor = slots[scale] if isinstance(scale, Node) else (scale,)
    return fast_path.entry("attention"), [
        *[slots[each] for each in heads], mask, (dropout_p,), is_causal, factor, (False,),
        (is_looked_at,),
    ], _without_weights  # fmt: skip


def _without_weights(output: Tensor) -> tuple[Tensor, None]:
    return output, None


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
        _mask(-1 if hidden < 0 else slots[hidden], is_causal)
        for hidden, _, is_causal in (plan.own, plan.cross)
    )
    kinds, eps = [int(kind) for kind, *_ in pairs], [norm.eps for *_, norm in pairs]
    heads, norm_first = next(iter(options))[0], plan.layer.norm_first
    memory = -1 if plan.memory < 0 else slots[plan.memory]
    return fast_path.entry("encoder_layer"), [
        slots[plan.x], (kinds,), parameters, (eps,), (heads,), (norm_first,), (True,),
        (plan.layer.activation,), *own, memory, *cross, (plan.dropouts,),
    ], None  # fmt: skip


def _name(node: Node) -> str:
    return str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))


def _operator(node: Node, args: Any) -> tuple[str, Sequence[Any]] | None:
    """Returns the name of an operator in tape.cpp and its operands, or None."""
    if not args or not isinstance(value(node), Tensor):
        return None
    op, name = read(node), _name(node)
    if node.target is F.embedding:
        return _embedding(node)
    if node.target is operator.getitem:
        return _index(*args) if isinstance(value(args[0]), Tensor) else None
    if name in _RESHAPES and node.op == "call_method" and not node.kwargs:
        sizes = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        return (name, [args[0], *sizes]) if all(map(_is_integer, sizes)) else None
    if op is not None and op.name == "not" and dtype(args[0]) == torch.bool and len(args) == 1:
        return "bitwise_not", args
    is_function = node.target in (getattr(operator, name, None), getattr(torch, name, None))
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
    input, weight, padding, max_norm, _, *options = _arguments(F.embedding, node).values()
    if max_norm is not None or options != [False, False]:
        return None
    if padding is not None and not (isinstance(padding, int) and padding >= 0):
        return None
    return "embedding", (input, weight, -1 if padding is None else padding)


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
