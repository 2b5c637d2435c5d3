"""Changing a captured graph: putting calls in, taking out what they replace."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..dispatch import checked_call
from .memory import NO_MEMORY, Memory, between
from .modes import GraphModes
from .nodes import only_user, value
from .ops import constant, is_view, mutates, read
from .report import Found, GraphReport, where


class Editor:
    def __init__(self, graph: Graph, report: GraphReport, modes: GraphModes | None = None) -> None:
        self.graph, self.report, self.memory = graph, report, Memory(graph)
        self.modes = modes or GraphModes(graph)
        self._shared: dict[Any, Node] = {}

    def obstacle(self, last: Node, inputs: Iterable[Any], point: Node | None = None) -> str | None:
        """Why ``last`` cannot be replaced by one call of ``inputs`` at ``point`` (``last`` by default).

        None if it can. ``last`` then has to be removed.
        """
        known = [n for n in inputs if isinstance(n, Node)]
        parts = [n for n in between(set(known), last) if not _is_same_in_all_modes(n)]
        if not self.modes.same([*parts, last, point]):
            return "a torch.no_grad, autocast or similar block begins or ends between its ops"
        if not self.memory.may_replace(last, known, point):
            return "a tensor is modified in place between its ops"
        return None

    def refusal(
        self, node: Node, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> str | None:
        """Why a public function of this library raises for a call in place of ``node``, or None."""
        fake = FakeTensorMode()
        try:
            with ExitStack() as modes:
                for device, enabled, to in self.modes.at(node).autocast:
                    modes.enter_context(torch.autocast(device, to, enabled))
                given = map_arg((args, kwargs), lambda n: _example(n, fake))
                checked_call(function, *given[0], **given[1])
        except Exception as error:
            return f"transformer_fast.functional.{function.__name__} does not take it: {error}"
        return None

    def call(
        self, before: Node, function: Callable[..., Any], *args: Any, like: Node, **kwargs: Any
    ) -> Node:
        """A new call in front of ``before``, which gives what ``like`` gave."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(function, args, kwargs)
        node.meta = dict(like.meta)
        return node

    def method(self, before: Node, name: str, of: Node, *args: Any) -> Node:
        """A new call of a method of the tensor ``of`` in front of ``before``."""
        with self.graph.inserting_before(before):
            node = self.graph.call_method(name, (of, *args))
        node.meta = {**of.meta, "example_value": getattr(value(of), name)(*args)}
        return node

    def replace(self, old: Node, new: Node, *parts: Any) -> None:
        """Have the users of ``old`` use ``new``; take out ``old``, and the parts that only it used."""
        old.replace_all_uses_with(new)
        self.remove([old, *parts])

    def item(self, of: Node, index: int, like: Node) -> Node:
        """Element ``index`` of the tuple that ``of`` gives."""
        with self.graph.inserting_after(of):
            node = self.graph.call_function(operator.getitem, (of, index))
        node.meta = dict(like.meta)
        return node

    def shared(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], latest: Node
    ) -> Node:
        """One call per function, arguments and modes, as early in the graph as these allow."""
        written = self.memory.last_write(arguments, latest)
        modes = self.modes.at(latest)
        key = (function, arguments, written, modes)
        found = self._shared.get(key)
        if found is None or found.graph is not self.graph:
            after = self.last([n for n in (*arguments, written) if isinstance(n, Node)])
            if after is None or after.op == "placeholder":
                before = next(n for n in self.graph.nodes if n.op != "placeholder")
            else:
                before = after.next
            while before is not latest and self.modes.at(before) != modes:
                before = before.next
            with self.graph.inserting_before(before):
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
                doomed |= {n for n in node.all_input_nodes if self._may_go(n)}
                self.graph.erase_node(node)

    def _may_go(self, node: Node) -> bool:
        """Whether nobody would miss the call but those who use its result."""
        if not mutates(node):
            return is_view(node) or read(node) is not None
        target = node.args[0] if node.args else None
        unseen = isinstance(target, Node) and only_user(target) is node
        return unseen and read(node) is not None and self.memory.is_own(target)  # type: ignore[arg-type]

    def found(self, op: str, node: Node) -> None:
        self.report.rewritten.append(Found(op, where(node)))

    def left(self, op: str, node: Node, reason: str) -> None:
        self.report.left.append(Found(op, where(node), reason))


def _example(node: Node, fake: FakeTensorMode) -> Any:
    """A value like the node's. Dynamic sizes become numbers, since comparing them would add guards."""
    found = value(node)
    if not isinstance(found, Tensor):
        return _number(found)
    with fake:
        sizes = [_number(size) for size in found.shape]
        return torch.empty(sizes, dtype=found.dtype, device=found.device)


def _number(x: Any) -> Any:
    is_symbol = isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return x.node.hint if is_symbol else x


def _is_same_in_all_modes(node: Node) -> bool:
    """True if the node is a number or a constant, which no mode changes."""
    return isinstance(value(node), NO_MEMORY) or constant(node) is not None
