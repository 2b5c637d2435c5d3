"""The two products of attention, written as matmul, bmm, baddbmm or einsum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from .editor import Editor
from .ops import Op, is_number, rank, read, shape

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


def _undoes(op: Op, order: tuple[int, ...]) -> bool:
    """Whether the node is ``permute(input, inverse of order)``."""
    size = len(order)
    if op.name == "transpose":
        there = list(range(size))
        a, b = op["dim0"], op["dim1"]
        if not (isinstance(a, int) and isinstance(b, int)):
            return False
        there[a], there[b] = there[b], there[a]
    elif op.name == "permute":
        there = [d % size for d in op["dims"]]
    else:
        return False
    return tuple(there[d] for d in order) == tuple(range(size))


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
    if shape(left)[:-2] != shape(right)[:-2]:  # type: ignore[index]
        return None
    swapped = (*range(size - 2), size - 1, size - 2)
    return Product(left, right, None, swapped)


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
        sizes, theirs = shape(weights), shape(values)
        if sizes is None or theirs is None or sizes[:-2] != theirs[:-2]:
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
