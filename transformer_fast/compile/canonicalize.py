"""Rewrites a graph to fewer equivalent forms, before any pattern is matched."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .aliasing import AliasAnalysis
from .modes import GraphModes
from .nodes import dtype, is_number, only_user, rank, shape, value
from .ops import calls, constant, mutates, read


def canonicalize(graph: Graph, modes: GraphModes) -> AliasAnalysis:
    """Applies all steps of this module, in place; returns the remaining writes."""
    use_mutation_results(graph)
    replace_type_as(graph)
    remove_no_ops(graph)
    aliases = AliasAnalysis(graph)
    make_out_of_place(graph, modes, aliases)
    scalarize_constants(graph, aliases)
    merge_equal(graph, modes, aliases)
    return aliases


def use_mutation_results(graph: Graph) -> None:
    """Makes later readers of a mutated tensor use the result of the mutation.

    ``x.masked_fill_(m, c); y = x + 1`` becomes ``x1 = x.masked_fill_(m, c); y = x1 + 1``. The
    tensor is the same, but the graph now shows which nodes read it before the write and which
    after.
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
        elif node.kwargs.get("out") is not None or rank(node) is None or rank(node) != rank(target):
            continue
        order = {n: i for i, n in enumerate(graph.nodes)}
        for user in list(target.users):
            if order[user] > order[node]:
                user.replace_input_with(target, node)


def _fills_where_true(op: Any) -> bool:
    index, target = op["index"], op["input"]
    is_mask = isinstance(index, Node) and dtype(index) == torch.bool
    return is_mask and rank(index) == rank(target) and is_number(op["value"])


def make_out_of_place(graph: Graph, modes: GraphModes, aliases: AliasAnalysis) -> None:
    """Replaces ``y += x`` with ``y = y + x`` if nothing shares y's memory and modes are equal."""
    nodes: list[Node] = list(graph.nodes)
    for node in nodes:
        out_of_place = _OUT_OF_PLACE.get(node.target)
        if out_of_place is None or node.kwargs or len(node.args) != 2:
            continue
        target, other = node.args
        if (
            isinstance(target, Node)
            and only_user(target) is node
            and target is not other
            and modes.same([node, target])
            and aliases.is_internal(target)
            and shape(target) is not None
            and (is_number(other) or dtype(other) == dtype(target))
        ):
            aliases.remove_write(node)
            with graph.inserting_before(node):
                _replace_node(node, graph.call_function(out_of_place, (target, other)))


def _replace_node(node: Node, new: Node) -> None:
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


_OUT_OF_PLACE: dict[Any, Any] = {
    writing: getattr(operator, name)
    for name, method in (("add", "add_"), ("sub", "sub_"), ("mul", "mul_"), ("truediv", "div_"))
    for writing in (getattr(operator, f"i{name}"), method)
}


def scalarize_constants(graph: Graph, aliases: AliasAnalysis) -> None:
    """Replaces ``torch.full_like(scores, c)`` in a `where` with a scalar, which needs no scores."""
    for node, op in calls(graph, "where"):
        for name, other in (("input", "other"), ("other", "input")):
            choice, number = op[name], constant(op[name])
            if number is None or not isinstance(choice, Node) or shape(choice) == ():
                continue
            rest = [n for n in (shape(op["condition"]), shape(op[other])) if n is not None]
            found = value(choice)
            if not _broadcasts_to(rest, shape(node)) or aliases.is_written([choice]):
                continue
            with graph.inserting_before(node):
                new = graph.call_function(torch.full, ((), number))
            new.kwargs = {"dtype": found.dtype, "device": found.device}
            new.meta = {"example_value": found.new_empty(())}
            node.replace_input_with(choice, new)
            _remove_unused(graph, choice)


def _broadcasts_to(shapes: list[tuple[Any, ...]], wanted: tuple[Any, ...] | None) -> bool:
    """True if these shapes together broadcast to the wanted one."""
    if wanted is None:
        return False
    for i, size in enumerate(reversed(wanted)):
        if not any(len(s) > i and s[-1 - i] == size for s in shapes):
            return False
    return True


def _remove_unused(graph: Graph, node: Node) -> None:
    """Removes an unused constant and the nodes that only it depends on."""
    if node.users or constant(node) is None or mutates(node):
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for inner in inputs:
        _remove_unused(graph, inner)


def merge_equal(graph: Graph, modes: GraphModes, aliases: AliasAnalysis) -> None:
    """Merges pure mask ops with equal arguments, so that each mask is computed once."""
    visited: dict[Any, Node] = {}
    for node, op in calls(graph, "eq", "ne", "not", "bool", "unsqueeze"):
        if mutates(node) or aliases.is_written([node, *node.all_input_nodes]):
            continue
        arguments = map_arg(tuple(sorted(op.args.items())), lambda n: n.name)
        key = (op.name, arguments, modes.at(node))
        try:
            first = visited.setdefault(key, node)
        except TypeError:  # a list among the arguments
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def remove_no_ops(graph: Graph) -> None:
    """Removes dropouts that drop nothing (evaluation, p = 0) and casts to the same dtype."""
    for node, op in calls(graph, "dropout", "to", "float"):
        if not isinstance(op["input"], Node):
            continue
        if op.name == "dropout":
            does_nothing = op["training"] is False or op["p"] == 0
        else:
            before, after = value(op["input"]), value(node)
            does_nothing = (
                op.args.keys() <= {"input", "dtype", "device"}
                and isinstance(before, torch.Tensor)
                and (before.dtype, before.device) == (after.dtype, after.device)
            )
        if does_nothing:
            node.replace_all_uses_with(op["input"])
            graph.erase_node(node)


def replace_type_as(graph: Graph) -> None:
    """Replaces ``x.type_as(y)`` with ``x.to(dtype)``: it uses only the dtype of y."""
    for node, op in calls(graph, "type_as"):
        here, there = value(op["input"]), value(op["other"])
        if not isinstance(there, torch.Tensor) or here.device != there.device:
            continue
        with graph.inserting_before(node):
            _replace_node(node, graph.call_method("to", (op["input"], there.dtype)))
