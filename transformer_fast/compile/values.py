"""Recognises formulas by their values: in any spelling, a formula has the same results on numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from .editor import number
from .nodes import dtype, shape, value
from .ops import constant, mutates, read

#: Maximum number of calls that are searched: the formula, and some calls before it.
_LARGEST = 32


class UnknownValueError(Exception):
    """A value depends on a node, the argument, that is neither known nor may be computed."""


def formula_of(node: Node, names: Collection[str]) -> list[Node]:
    """Returns the node and the ops with these names that it is computed from, nearest first."""
    found = [node]
    for each in found:
        op = read(each)
        if op is not None and op.name in names and len(found) <= _LARGEST:
            found += [n for n in each.all_input_nodes if n not in found]
    return found


def evaluate(node: Node, known: dict[Node, Any], within: Collection[Node] | None = None) -> Any:
    """Computes the node's value from known values of other nodes, without casts to other floats.

    within: the nodes that may be computed; None: all. Raises `UnknownValueError`.
    """
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        return _evaluated(node, {**known}, within)


def inputs_by_value(
    node: Node, formula: Collection[Node], numbers: Tensor
) -> Iterator[tuple[Node, Tensor]]:
    """Yields (input, result): a node of the formula with the shape and dtype of its output, nearest
    first, and the output if the value of this node is ``numbers``."""
    for x in formula:
        if x is not node and (shape(x), dtype(x)) == (shape(node), dtype(node)):
            with contextlib.suppress(UnknownValueError, RuntimeError, TypeError):
                result = evaluate(node, {x: numbers}, formula)
                if result.shape == numbers.shape:
                    yield x, result


def _evaluated(node: Node, known: dict[Node, Any], within: Collection[Node] | None) -> Any:
    if node in known:
        return known[node]
    op, found = read(node), constant(node)
    if found is not None:
        known[node] = torch.tensor(found, dtype=torch.float64)
    elif isinstance(value(node), torch.SymInt):
        known[node] = number(value(node))
    elif (
        node.op not in ("call_function", "call_method")
        or mutates(node)
        or not (within is None or node in within)
    ):
        raise UnknownValueError(node)
    elif op is not None and op.name in ("to", "float") and value(node).is_floating_point():
        known[node] = _evaluated(op["input"], known, within)
    else:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: _evaluated(n, known, within))
        name = node.target
        run: Any = getattr(Tensor, name) if isinstance(name, str) else name
        known[node] = run(*args, **kwargs)
    return known[node]
