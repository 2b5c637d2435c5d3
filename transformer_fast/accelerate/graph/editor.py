"""Changing a captured graph: putting calls in, taking out what they replace."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from .ops import dtype, is_number, is_view, mutates, rank, read, value
from .report import Found, GraphReport, where


class Editor:
    def __init__(self, graph: Graph, report: GraphReport) -> None:
        self.graph, self.report = graph, report
        self._shared: dict[Any, Node] = {}

    def call(
        self, before: Node, function: Callable[..., Any], *args: Any, like: Node, **kwargs: Any
    ) -> Node:
        """A new call in front of ``before``, which gives what ``like`` gave."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(function, args, kwargs)
        node.meta = dict(like.meta)
        return node

    def item(self, of: Node, index: int, like: Node) -> Node:
        """Element ``index`` of the tuple that ``of`` gives."""
        with self.graph.inserting_after(of):
            node = self.graph.call_function(operator.getitem, (of, index))
        node.meta = dict(like.meta)
        return node

    def shared(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], latest: Node
    ) -> Node:
        """A call of ``arguments`` that all who ask for it share, as early as they allow."""
        key = (function, arguments)
        found = self._shared.get(key)
        if found is None or found.graph is not self.graph:
            after = self.last([a for a in arguments if isinstance(a, Node)])
            if after is None or after.op == "placeholder":
                first = next(n for n in self.graph.nodes if n.op != "placeholder")
                found = self.call(first, function, *arguments, like=latest)
            else:
                with self.graph.inserting_after(after):
                    found = self.graph.call_function(function, arguments)
            found.meta = {"stack_trace": latest.meta.get("stack_trace")}
            self._shared[key] = found
        return found

    def last(self, nodes: Iterable[Node]) -> Node | None:
        """The one that the graph runs last."""
        wanted = set(nodes)
        return next((n for n in reversed(self.graph.nodes) if n in wanted), None)

    def remove(self, nodes: Iterable[Node]) -> None:
        """Take out those that nobody uses any more, with whatever pure calls only they used."""
        doomed = set(nodes)
        for node in reversed(list(self.graph.nodes)):
            if node.users or node.op not in ("call_function", "call_method"):
                continue
            if node in doomed:
                doomed |= {n for n in node.all_input_nodes if _is_pure(n)}
                self.graph.erase_node(node)

    def has_autocast(self) -> bool:
        """Whether dtypes may change on the way into an op."""
        return any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")) or any(
            n.target is torch.amp.autocast_mode._enter_autocast for n in self.graph.nodes
        )

    def found(self, op: str, node: Node) -> None:
        self.report.rewritten.append(Found(op, where(node)))

    def left(self, op: str, node: Node, reason: str) -> None:
        self.report.left.append(Found(op, where(node), reason))

    def nothing_else_writes(self, nodes: set[Node], until: Node) -> bool:
        """Whether no other call from the first of the nodes to ``until`` writes into a tensor."""
        started = False
        for node in self.graph.nodes:
            started = started or node in nodes
            if node is until:
                return True
            if started and node not in nodes and mutates(node):
                return False
        return True


def _is_pure(node: Node) -> bool:
    return (is_view(node) or read(node) is not None) and not mutates(node)


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


def merge_equal(graph: Graph) -> None:
    """Compute masks once: pure calls of the same ops on the same nodes become one node."""
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        op = read(node)
        if op is None or op.name not in _MERGED or mutates(node):
            continue
        written = any(mutates(user) for user in node.users)
        written |= any(mutates(u) for n in node.all_input_nodes for u in n.users)
        if written:
            continue
        key = (op.name, map_arg(tuple(sorted(op.args.items())), lambda n: n.name))
        try:
            first = seen.setdefault(key, node)
        except TypeError:  # a list among the arguments
            continue
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


_MERGED = frozenset({"eq", "ne", "not", "bool", "unsqueeze"})


def remove_idle_dropout(graph: Graph) -> None:
    """Dropouts that drop nothing (evaluation, p = 0) give their input back."""
    for node in list(graph.nodes):
        op = read(node)
        if op is None or op.name != "dropout" or not isinstance(op["input"], Node):
            continue
        if op["training"] is False or op["p"] == 0:
            node.replace_all_uses_with(op["input"])
            graph.erase_node(node)


def name_dtypes(graph: Graph) -> None:
    """``x.type_as(y)`` as ``x.to(dtype)``: it reads nothing of y but that."""
    for node in list(graph.nodes):
        op = read(node)
        if op is None or op.name != "type_as":
            continue
        here, there = value(op["input"]), value(op["other"])
        if not isinstance(there, torch.Tensor) or here.device != there.device:
            continue
        with graph.inserting_before(node):
            new = graph.call_method("to", (op["input"], there.dtype))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
