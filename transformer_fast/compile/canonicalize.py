"""What is done to a graph before anything is recognised in it: the same meaning, in fewer forms."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .memory import Memory
from .modes import GraphModes
from .nodes import dtype, is_number, only_user, rank, shape, value
from .ops import Op, calls, constant, mutates, read


def canonicalize(graph: Graph, modes: GraphModes) -> None:
    """All of it."""
    name_mutations(graph)
    name_dtypes(graph)
    remove_idle_calls(graph)
    remove_empty_parts(graph, modes)
    write_apart(graph, modes)
    name_constants(graph)
    merge_equal(graph, modes)


def name_mutations(graph: Graph) -> None:
    """Give the result of every write in place a name of its own.

    Afterwards ``x.masked_fill_(m, c); y = x + 1`` reads ``x1 = x.masked_fill_(m, c); y = x1 + 1``:
    the same tensor, but who reads it before and who after is plain.
    """
    for node in list(graph.nodes):
        if not mutates(node) or not node.args or not isinstance(node.args[0], Node):
            continue
        target = node.args[0]
        op = read(node)
        if op is not None and op.name == "setitem":
            if not _fills_where_true(op):
                continue
            with graph.inserting_before(node):
                fill = graph.call_method("masked_fill_", (target, op["index"], op["value"]))
            fill.meta = dict(target.meta)
            fill.meta["stack_trace"] = node.meta.get("stack_trace")
            graph.erase_node(node)
            node = fill
        elif node.kwargs.get("out") is not None or not _returns_its_target(node):
            continue
        order = {n: i for i, n in enumerate(graph.nodes)}
        for user in list(target.users):
            if order[user] > order[node]:
                user.replace_input_with(target, node)


def _returns_its_target(node: Node) -> bool:
    return rank(node) is not None and rank(node) == rank(node.args[0])


def _fills_where_true(op: Any) -> bool:
    index, target = op["index"], op["input"]
    is_mask = isinstance(index, Node) and dtype(index) == torch.bool
    return is_mask and rank(index) == rank(target) and is_number(op["value"])


def write_apart(graph: Graph, modes: GraphModes) -> None:
    """``y += x`` as ``y = y + x`` where nobody else sees the memory of y, in one mode."""
    memory = Memory(graph)
    nodes: list[Node] = list(graph.nodes)
    for node in nodes:
        apart = _APART.get(node.target)
        if apart is None or node.kwargs or len(node.args) != 2:
            continue
        target, other = node.args
        if (
            isinstance(target, Node)
            and only_user(target) is node
            and target is not other
            and modes.same([node, target])
            and memory.is_own(target)
            and shape(target) is not None
            and (is_number(other) or dtype(other) == dtype(target))
        ):
            with graph.inserting_before(node):
                _put_in_place(node, graph.call_function(apart, (target, other)))


def _put_in_place(node: Node, new: Node) -> None:
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


_APART: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    "add_": operator.add,
    "sub_": operator.sub,
    "mul_": operator.mul,
    "div_": operator.truediv,
}


def name_constants(graph: Graph) -> None:
    """``torch.full_like(scores, c)`` as one number without scores, where it is chosen."""
    memory = Memory(graph)
    for node, op in calls(graph, "where"):
        for name, other in (("input", "other"), ("other", "input")):
            choice, number = op[name], constant(op[name])
            if number is None or not isinstance(choice, Node) or shape(choice) == ():
                continue
            rest = [n for n in (shape(op["condition"]), shape(op[other])) if n is not None]
            found = value(choice)
            if not _broadcasts_to(rest, shape(node)) or memory.is_written([choice]):
                continue
            with graph.inserting_before(node):
                new = graph.call_function(torch.full, ((), number))
            new.kwargs = {"dtype": found.dtype, "device": found.device}
            new.meta = {"example_value": found.new_empty(())}
            node.replace_input_with(choice, new)
            _remove_unused(graph, choice)


def _broadcasts_to(shapes: list[tuple[Any, ...]], wanted: tuple[Any, ...] | None) -> bool:
    """Whether these shapes together make the wanted one."""
    if wanted is None:
        return False
    for i, size in enumerate(reversed(wanted)):
        if not any(len(s) > i and s[-1 - i] == size for s in shapes):
            return False
    return True


def _remove_unused(graph: Graph, node: Node) -> None:
    """Take out a constant and what only it was made of."""
    if node.users or constant(node) is None or mutates(node):
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for inner in inputs:
        _remove_unused(graph, inner)


def merge_equal(graph: Graph, modes: GraphModes) -> None:
    """Compute masks once: pure calls of the same ops on the same nodes become one node."""
    memory = Memory(graph)
    seen: dict[Any, Node] = {}
    for node, op in calls(graph, "eq", "ne", "not", "bool", "unsqueeze"):
        if mutates(node) or memory.is_written([node, *node.all_input_nodes]):
            continue
        arguments = map_arg(tuple(sorted(op.args.items())), lambda n: n.name)
        key = (op.name, arguments, modes.at(node))
        try:
            first = seen.setdefault(key, node)
        except TypeError:  # a list among the arguments
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def remove_idle_calls(graph: Graph) -> None:
    """Dropouts that drop nothing (evaluation, p = 0) and casts to the same dtype give their input."""
    for node, op in calls(graph, "dropout", "to", "float"):
        if not isinstance(op["input"], Node):
            continue
        drops_nothing = op.name == "dropout" and (op["training"] is False or op["p"] == 0)
        if drops_nothing or (op.name != "dropout" and _is_idle_cast(node, op)):
            node.replace_all_uses_with(op["input"])
            graph.erase_node(node)


def _is_idle_cast(node: Node, op: Op) -> bool:
    before, after = value(op["input"]), value(node)
    return (
        op.args.keys() <= {"input", "dtype", "device"}
        and isinstance(before, torch.Tensor)
        and (before.dtype, before.device) == (after.dtype, after.device)
    )


def remove_empty_parts(graph: Graph, modes: GraphModes) -> None:
    """``torch.cat([empty, x])`` as x, where nobody can tell: the first step of a cache of keys."""
    memory = Memory(graph)
    # Views need the strides of the copy.
    viewed = [n for n in graph.nodes if getattr(n.target, "__name__", n.target) in _NEED_STRIDES]
    ends = [*viewed, next(iter(reversed(graph.nodes)))]
    kept = memory.shared(node for end in ends for node in end.all_input_nodes)
    for node in list(graph.nodes):
        if node.target not in (torch.cat, torch.concat) or not node.args:
            continue
        parts = node.args[0]
        rest = [part for part in parts if shape(part) != (0,)]  # type: ignore[union-attr]
        if len(rest) != 1 or len(rest) == len(parts) or dtype(rest[0]) != dtype(node):  # type: ignore[arg-type]
            continue
        same = modes.same([node, rest[0], *node.users])
        if same and not memory.is_written([node, *rest]) and node not in kept:
            node.replace_all_uses_with(rest[0])
            graph.erase_node(node)


_NEED_STRIDES = frozenset({"as_strided", "view", "view_as", "view_as_complex"})


def name_dtypes(graph: Graph) -> None:
    """``x.type_as(y)`` as ``x.to(dtype)``: it reads nothing of y but that."""
    for node, op in calls(graph, "type_as"):
        here, there = value(op["input"]), value(op["other"])
        if not isinstance(there, torch.Tensor) or here.device != there.device:
            continue
        with graph.inserting_before(node):
            _put_in_place(node, graph.call_method("to", (op["input"], there.dtype)))
