"""Alias analysis: finds the writes in place of a graph, and which calls may move across them."""

from __future__ import annotations

import builtins
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops.layer_norm import NORMS
from .nodes import only_user, value
from .ops import is_view, mutates, read, written

#: Represents all memory from outside the graph: any two such tensors may alias.
_OUTSIDE = "outside"

#: Ops, as `read` names them, that return new memory.
_FRESH_OPS = frozenset(
    {"matmul", "baddbmm", "addmm", "einsum", "add", "sub", "mul", "div", "neg", "softmax",
     "masked_fill", "where", "linear", "relu", "gelu", "silu", "sigmoid", "tanh", "erf", "mean",
     "std", "var", "sqrt", "rsqrt", "pow", "eq", "ne", "not", "clone", "tensor", "full",
     "full_like", "attention", "conv", "exp", "sum", "maximum", "nan_to_num", *NORMS}
)  # fmt: skip
#: Names of other functions and methods that return new memory.
_FRESH_NAMES = frozenset(
    {"_weight_norm", "abs", "all", "and_", "any", "arange", "bitwise_and", "bitwise_or", "cat", "cos",
     "cumsum", "embedding", "empty", "empty_like", "eye", "full", "ge", "gt", "invert", "le",
     "linspace", "log", "logical_and", "logical_or", "logical_xor", "lt", "max", "min", "new_full",
     "new_ones", "new_zeros", "ones", "ones_like", "or_", "rand", "rand_like", "randint", "randn",
     "randn_like", "repeat", "repeat_interleave", "scalar_tensor", "sin", "stack", "tril", "triu",
     "zeros", "zeros_like"}
)  # fmt: skip


_VIEWS = frozenset({"transpose", "permute", "unsqueeze", "contiguous"})


class AliasAnalysis:
    """The in-place writes of a graph, found once: calls inserted later write to new memory only.

    ``inputs``: the values that the graph was captured with. Inputs in separate storages are assumed
    to share no memory, which later calls must check. None: any two inputs may share memory.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Any] | None = None) -> None:
        self._graph = graph
        self._writes = [n for n in graph.nodes if mutates(n)]
        #: The memory of the inputs, for `_roots`.
        self._outside: dict[Node, frozenset[Any]] = {}
        given = [n for n in graph.nodes if n.op == "placeholder"]
        if (
            inputs is not None
            and len(inputs) == len(given)
            and not any(
                n.op == "get_attr" and isinstance(value(n), torch.Tensor) for n in graph.nodes
            )
        ):
            self._outside = {
                node: frozenset({x.untyped_storage().data_ptr()})
                for node, x in zip(given, inputs, strict=True)
                if isinstance(x, torch.Tensor)
            }

    def remove_write(self, node: Node) -> None:
        """Notes that a write is about to be replaced by a call that writes to new memory."""
        self._writes.remove(node)

    def may_replace(self, last: Node, inputs: Iterable[Any], point: Node | None = None) -> bool:
        """True if one call of ``inputs`` at ``point`` (default: ``last``) can compute ``last``.

        Two conditions have to hold, from the first read up to that call. No other node writes to
        the memory of the inputs or of the intermediates. The replaced nodes write only to memory
        that they alone use. The caller must then remove ``last``.
        """
        if not self._writes:
            return True
        sources = set(_nodes(list(inputs)))
        cone = between(sources, last)
        if not cone:
            return True
        roots = dict(self._outside)
        given = (n for n in sources if only_user(n) in cone and self.is_internal(n))
        own = frozenset(cone).union(*(_roots(n, roots) for n in given))
        if any(n in cone and not _touched(n, roots) <= own for n in self._writes):
            return False
        order = self._order()
        first = min(cone, key=lambda n: order[n])
        ends = [last] if point is None else [last, point]
        return all(self.is_unwritten_between([*sources, *cone], first, end, own) for end in ends)

    def is_unwritten_between(
        self, nodes: Iterable[Any], one: Node, other: Node, but: Container[Node] = ()
    ) -> bool:
        """True if no call between the two, except those in ``but``, writes to the nodes' memory."""
        if not self._writes:
            return True
        order = self._order()
        first, end = sorted((order[one], order[other]))
        between = [n for n in self._writes if first < order.get(n, -1) < end and n not in but]
        return not self._touching(between, nodes)

    def last_write(self, nodes: Iterable[Any], before: Node) -> Node | None:
        """Returns the last call before ``before`` that may change the nodes' values, or None."""
        if not self._writes:
            return None
        order = self._order()
        found = [n for n in self._writes if order.get(n, len(order)) < order[before]]
        return max(self._touching(found, nodes), key=lambda n: order[n], default=None)

    def is_internal(self, node: Node) -> bool:
        """True if only this node and its users can access its memory."""
        while not is_fresh(node):
            op = read(node)
            inner = op["input"] if op is not None and op.name in _VIEWS else None
            if inner is None and node.args and (is_view(node) or mutates(node)):
                inner = node.args[0]
            if not isinstance(inner, Node) or only_user(inner) is not node:
                return False
            node = inner
        return True

    def is_written(self, nodes: Iterable[Any]) -> bool:
        """True if any call of the graph writes to the nodes' memory."""
        return bool(self._touching(self._writes, nodes))

    def shared(
        self, nodes: Iterable[Node], cache: dict[Node, frozenset[Any]] | None = None
    ) -> frozenset[Any]:
        """Returns identifiers of the memory of the nodes' values; ``cache``: by node."""
        roots = dict(self._outside) if cache is None else cache
        return frozenset().union(*(_roots(node, roots) for node in nodes))

    def _order(self) -> dict[Node, int]:
        return {node: i for i, node in enumerate(self._graph.nodes)}

    def _touching(self, writes: Sequence[Node], nodes: Iterable[Any]) -> list[Node]:
        """Returns the writes that may change the values of the nodes."""
        roots = dict(self._outside)
        read_memory = self.shared(_nodes(list(nodes)), roots)
        return [n for n in writes if _touched(n, roots) & read_memory]


def _touched(write: Node, roots: dict[Node, frozenset[Any]]) -> frozenset[Any]:
    """Returns the memory that a write in place may change."""
    targets = _nodes(written(write)) or write.all_input_nodes
    return frozenset().union(*(_roots(n, roots) for n in targets))


def _nodes(tree: Any) -> list[Node]:
    return [n for n in torch.utils._pytree.tree_leaves(tree) if isinstance(n, Node)]


def between(inputs: set[Node], last: Node) -> set[Node]:
    """Returns ``last`` and the calls on all paths from the inputs to it."""
    found: set[Node] = set()
    todo = [last]
    while todo:
        node = todo.pop()
        if node in found or node in inputs or node.op in ("placeholder", "get_attr"):
            continue
        found.add(node)
        todo += node.all_input_nodes
    return found


NO_MEMORY = (
    bool, int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool, torch.Size, torch.dtype,
    torch.device,
)  # fmt: skip


def _roots(node: Node, cache: dict[Node, frozenset[Any]]) -> frozenset[Any]:
    """Returns the memory that the node's value may occupy, as the calls that allocated it."""
    todo = [node]
    while todo:  # iterative: graphs of deep models would exceed the recursion limit
        current = todo[-1]
        if current in cache:
            todo.pop()
            continue
        if isinstance(value(current), NO_MEMORY):
            cache[current] = frozenset()
        elif current.op in ("placeholder", "get_attr"):
            cache[current] = frozenset({_OUTSIDE})
        elif is_fresh(current):
            cache[current] = frozenset({current})
        else:
            missing = [n for n in current.all_input_nodes if n not in cache]
            if missing:
                todo += missing
                continue
            inner = (cache[n] for n in current.all_input_nodes)
            cache[current] = frozenset({current}).union(*inner)
    return cache[node]


def is_fresh(node: Node) -> bool:
    """True if the call returns new memory, which no other node shares."""
    if mutates(node):
        return False
    op = read(node)
    if op is not None:
        return op.name in _FRESH_OPS or (op.name == "getitem" and _copies(op["index"]))
    if node.op == "call_function":
        where, name = getattr(node.target, "__module__", ""), getattr(node.target, "__name__", "")
        if (where or "").startswith("transformer_fast."):
            return not name.startswith(("prepare_", "spread", "reorder"))
        return node.target is not builtins.getattr and name in _FRESH_NAMES
    return node.op == "call_method" and str(node.target) in _FRESH_NAMES


def _copies(index: Any) -> bool:
    """True if indexing with ``index`` copies, because it contains a tensor."""
    return any(isinstance(value(n), torch.Tensor) for n in _nodes(index))
