"""The two products of attention, written as matmul, bmm, baddbmm or einsum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from .editor import Editor
from .nodes import is_number, rank, shape
from .ops import Op, read

#: Positions of a tensor's dimensions, or None: as they are.
_Order = tuple[int, ...] | None


@dataclass
class Product:
    """``scores = queries keys^T``, and what comes with it."""

    left: Node
    right: Node
    #: Orders that give (..., T, D) and (..., S, D).
    left_order: _Order = None
    right_order: _Order = None
    scale: float = 1.0
    added: Node | None = None

    def queries(self, editor: Editor, before: Node) -> Node:
        return _permuted(editor, before, self.left, self.left_order)

    def keys(self, editor: Editor, before: Node) -> Node:
        return _permuted(editor, before, self.right, self.right_order)


@dataclass
class WeightedSum:
    """``weights values``."""

    values: Node
    #: Order that gives (..., S, Dv), and that of the result from (..., T, Dv).
    values_order: _Order = None
    result_order: _Order = None

    def permuted_values(self, editor: Editor, before: Node) -> Node:
        return _permuted(editor, before, self.values, self.values_order)

    def result(self, editor: Editor, output: Node) -> Node:
        if self.result_order is None:
            return output
        with editor.graph.inserting_after(output):
            node = editor.graph.call_method("permute", (output, self.result_order))
        node.meta = dict(output.meta)
        return node


def _permuted(editor: Editor, before: Node, node: Node, order: _Order) -> Node:
    if order is None or order == tuple(range(len(order))):
        return node
    op = read(node)
    if op is not None and _undoes(op, order):
        inner: Node = op["input"]
        return inner
    return editor.call(before, torch.permute, node, order, like=node)


def permutation(op: Op, size: int | None) -> list[int] | None:
    """Where each dimension of a permuted tensor comes from; None: nothing is permuted."""
    if size is None:
        return None
    if op.name == "transpose":
        there = list(range(size))
        a, b = op["dim0"], op["dim1"]
        if not (isinstance(a, int) and isinstance(b, int)):
            return None
        there[a], there[b] = there[b], there[a]
        return there
    if op.name == "permute" and isinstance(op["dims"], (tuple, list)):
        return [d % size for d in op["dims"]]
    return None


def _undoes(op: Op, order: tuple[int, ...]) -> bool:
    """Whether the node is ``permute(input, inverse of order)``."""
    there = permutation(op, len(order))
    return there is not None and [there[d] for d in order] == list(range(len(order)))


def split_product(node: Node) -> Product | None:
    """Queries and keys of a product that may be scores, or None."""
    op = read(node)
    if op is None:
        return None
    if op.name == "matmul":
        left, right = op["input"], op["other"]
        return _of_matmul(left, right)
    if op.name == "baddbmm":
        product = _of_matmul(op["batch1"], op["batch2"])
        beta, alpha = op.args.get("beta", 1), op.args.get("alpha", 1)
        if product is None or not (is_number(beta) and is_number(alpha)) or beta not in (0, 1):
            return None
        product.scale = float(alpha)
        product.added = op["input"] if beta else None
        return product
    if op.name == "einsum":
        return _of_einsum(op["equation"], op["input"], op["other"])
    return None


def _of_matmul(left: object, right: object) -> Product | None:
    if not (isinstance(left, Node) and isinstance(right, Node)):
        return None
    size = rank(left)
    if size is None or size < 2 or rank(right) != size:
        return None
    if not _spreads(shape(right), shape(left)):
        return None
    swapped = (*range(size - 2), size - 1, size - 2)
    return Product(left, right, None, swapped)


def _spreads(one: tuple[Any, ...] | None, over: tuple[Any, ...] | None) -> bool:
    """Whether keys or values are there for each of the queries' batches and heads, or for all."""
    if one is None or over is None or len(one) != len(over):
        return False
    pairs = zip(one[:-2], over[:-2], strict=True)
    return all(a == b or (isinstance(a, int) and a == 1) for a, b in pairs)


def _of_einsum(equation: str, first: Node, second: Node) -> Product | None:
    inputs, result = equation.split("->")
    one, two = inputs.split(",")
    if not all(len(set(x)) == len(x) >= 2 for x in (one, two, result)):
        return None
    *batch, q, k = list(result)
    if k in one and k not in two:  # keys first
        one, two, first, second = two, one, second, first
    summed = [letter for letter in one if letter in two and letter not in result]
    if len(summed) != 1 or set(one) != {*batch, q, *summed} or set(two) != {*batch, k, *summed}:
        return None
    return Product(
        first,
        second,
        _order(one, [*batch, q, *summed]),
        _order(two, [*batch, k, *summed]),
    )


def _order(have: str, want: list[str]) -> tuple[int, ...]:
    return tuple(have.index(letter) for letter in want)


def weighted_sum(node: Node, weights: Node) -> WeightedSum | None:
    """The values that ``node`` multiplies the weights with, or None."""
    op = read(node)
    if op is None:
        return None
    if op.name == "matmul":
        values = op["other"]
        if op["input"] is not weights or values is weights or not isinstance(values, Node):
            return None
        if not _spreads(shape(values), shape(weights)):
            return None
        return WeightedSum(values)
    if op.name != "einsum" or op["input"] is op["other"]:
        return None
    inputs, result = op["equation"].split("->")
    one, two = inputs.split(",")
    values = op["other"]
    if op["other"] is weights:
        one, two, values = two, one, op["input"]
    if not isinstance(values, Node) or not all(len(set(x)) == len(x) for x in (one, two, result)):
        return None
    *batch, q, k = list(one)
    size = [letter for letter in two if letter not in one]
    if k in result or len(size) != 1 or set(two) != {*batch, k, *size}:
        return None
    if set(result) != {*batch, q, *size}:
        return None
    ours = [*batch, q, *size]
    order = tuple(ours.index(letter) for letter in result)
    return WeightedSum(
        values,
        _order(two, [*batch, k, *size]),
        None if order == tuple(range(len(order))) else order,
    )
