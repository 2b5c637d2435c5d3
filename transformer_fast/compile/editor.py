"""Editing a captured graph: inserts calls and removes the nodes that they replace."""

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

from ..functional._checked_call import checked_call
from .aliasing import NO_MEMORY, AliasAnalysis, between
from .graph_report import GraphReport, Match, where
from .modes import GraphModes
from .nodes import only_user, value
from .ops import constant, is_view, mutates, read


class Editor:
    def __init__(
        self, graph: Graph, report: GraphReport, modes: GraphModes, aliases: AliasAnalysis
    ) -> None:
        self.graph, self.report, self.modes, self.aliases = graph, report, modes, aliases
        self._shared: dict[Any, Node] = {}

    def obstacle(self, last: Node, inputs: Iterable[Any], point: Node | None = None) -> str | None:
        """Returns why one call of ``inputs`` at ``point`` cannot replace ``last``, or None.

        ``point=None``: at ``last``. The caller must remove ``last`` after the replacement.
        """
        sources = [n for n in inputs if isinstance(n, Node)]
        # No mode changes the value of a number or a constant.
        parts = [
            n for n in between(set(sources), last)
            if not isinstance(value(n), NO_MEMORY) and constant(n) is None
        ]  # fmt: skip
        if not self.modes.same([*parts, last, point]):
            return "a torch.no_grad, autocast or similar block begins or ends between its ops"
        if not self.aliases.may_replace(last, sources, point):
            return "a tensor is modified in place between its ops"
        return None

    def refusal(
        self, node: Node, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> str | None:
        """Returns why a public function would raise at the place of ``node``, or None."""
        fake = FakeTensorMode()
        try:
            with ExitStack() as modes:
                for device, enabled, to in self.modes.at(node).autocast:
                    modes.enter_context(torch.autocast(device, to, enabled))
                given = map_arg((args, kwargs), lambda n: _example(n, fake))
                checked_call(function, *given[0], **given[1])
        except Exception as error:
            return f"transformer_fast.functional.{function.__name__} does not support it: {error}"
        return None

    def call(
        self, before: Node, function: Callable[..., Any], *args: Any, like: Node, **kwargs: Any
    ) -> Node:
        """Inserts a function call, with the metadata of ``like``, and returns its node."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(function, args, kwargs)
        node.meta = dict(like.meta)
        return node

    def method(self, before: Node, name: str, of: Node, *args: Any) -> Node:
        """Inserts a method call of the tensor ``of``, and returns its node."""
        with self.graph.inserting_before(before):
            node = self.graph.call_method(name, (of, *args))
        node.meta = {**of.meta, "example_value": getattr(value(of), name)(*args)}
        return node

    def replace(self, old: Node, new: Node, *parts: Any) -> None:
        """Redirects the users of ``old`` to ``new``; removes ``old`` and the unused ``parts``."""
        old.replace_all_uses_with(new)
        self.remove([old, *parts])

    def item(self, of: Node, index: int, like: Node) -> Node:
        """Inserts ``of[index]``, where ``of`` returns a tuple; the metadata is that of ``like``."""
        with self.graph.inserting_after(of):
            node = self.graph.call_function(operator.getitem, (of, index))
        node.meta = dict(like.meta)
        return node

    def shared(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], latest: Node
    ) -> Node:
        """Returns the call of ``function``, the same node for equal arguments and modes.

        It is as early as possible, not after ``latest``: behind the last write to its arguments.
        """
        written = self.aliases.last_write(arguments, latest)
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
        """Returns the node that runs last; None if there are none."""
        wanted = set(nodes)
        return next((n for n in reversed(self.graph.nodes) if n in wanted), None)

    def remove(self, nodes: Iterable[Node]) -> None:
        """Removes the unused ones of these nodes, and the pure calls that only they used."""
        doomed = set(nodes)
        for node in reversed(list(self.graph.nodes)):
            if node.users or node.op not in ("call_function", "call_method"):
                continue
            if node in doomed:
                doomed |= {n for n in node.all_input_nodes if self._has_no_side_effects(n)}
                self.graph.erase_node(node)

    def _has_no_side_effects(self, node: Node) -> bool:
        """True if the call affects nothing but its result.

        A write in place qualifies if only this call reads the tensor that it changes.
        """
        if not mutates(node):
            return is_view(node) or read(node) is not None
        target = node.args[0] if node.args else None
        unshared = isinstance(target, Node) and only_user(target) is node
        return unshared and read(node) is not None and self.aliases.is_internal(target)  # type: ignore[arg-type]

    def report_rewritten(self, op: str, node: Node) -> None:
        self.report.rewritten.append(Match(op, where(node)))

    def report_left(self, op: str, node: Node, reason: str) -> None:
        self.report.left.append(Match(op, where(node), reason))


def _example(node: Node, fake: FakeTensorMode) -> Any:
    """Returns a fake tensor or number like the node's value.

    Dynamic sizes become plain numbers, since comparing symbolic sizes would add guards.
    """
    found = value(node)
    if not isinstance(found, Tensor):
        return number(found)
    with fake:
        sizes = [number(size) for size in found.shape]
        return torch.empty(sizes, dtype=found.dtype, device=found.device)


def number(x: Any) -> Any:
    """Returns a number; for a symbol, its value during the capture."""
    is_symbol = isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return x.node.hint if is_symbol else x
