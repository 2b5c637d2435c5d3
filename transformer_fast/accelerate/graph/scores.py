"""What stands between the product of queries and keys and the softmax: scaling, masks, biases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .nodes import dtype, is_number, is_single, only_user, rank, shape
from .ops import Op, constant, is_view, mutates, read
from .products import Product, permutation, split_product

#: A fill as low as this hides: exp of the difference to any usual score is 0.
_HIDES = -9000.0


class NotAttentionError(Exception):
    """Why a softmax is not the middle of an attention that our op can do; str() is a sentence."""


class Mask(NamedTuple):
    node: Node
    #: The shape it is spread over, if it is another than that of the scores.
    over: tuple[Any, ...] | None
    #: The order of its dimensions that is the scores'; empty: as they are.
    order: tuple[int, ...] = ()


@dataclass
class Scores:
    """What stands between the product of queries and keys and the softmax."""

    product: Product
    #: The shape that the product has.
    shape: tuple[Any, ...] | None
    nodes: set[Node] = field(default_factory=set)
    scale: float = 1.0
    #: One-element tensors and run-time numbers: (node, whether it divides).
    factors: list[tuple[Node, bool]] = field(default_factory=list)
    #: Tensors that are added, and what they are multiplied by.
    added: list[tuple[Mask, float]] = field(default_factory=list)
    #: (condition, whether it hides where it is True, value filled in)
    fills: list[tuple[Mask, bool, float]] = field(default_factory=list)
    #: The shape in which they are looked at, if it is another than the product's.
    seen_as: tuple[Any, ...] | None = None

    def inputs(self) -> list[Node]:
        """Masks and factors."""
        masks = [mask for mask, _ in self.added] + [mask for mask, *_ in self.fills]
        return [mask.node for mask in masks] + [node for node, _ in self.factors]

    def mask(self, node: Node, order: tuple[int, ...]) -> Mask:
        return Mask(node, self.seen_as, order)


def peel(node: Any, after: float, order: tuple[int, ...] = ()) -> Scores:
    """The scores behind ``node``, which is multiplied by ``after`` before the softmax.

    ``order``: in which the softmax has the node's dimensions; empty: as they are.
    """
    if not isinstance(node, Node):
        raise NotAttentionError("its input is not computed from queries and keys")
    product = split_product(node)
    if product is not None:
        if order != tuple(range(len(order))):
            raise NotAttentionError("its scores are permuted")
        scores = Scores(product, shape(node), {node}, after * product.scale)
        if product.added is not None:
            scores.added.append((scores.mask(product.added, ()), after))
        _require_one_user(node)
        return scores
    op = read(node)
    if op is None and not is_view(node):
        raise NotAttentionError(f"its scores come from {_name(node)}")
    _require_one_user(node)
    if op is None and order:
        raise NotAttentionError("its scores are reshaped while they are permuted")
    scores = _peel_view(node, after) if op is None else _peel_op(node, op, after, order)
    scores.nodes.add(node)
    return scores


def _peel_view(node: Node, after: float) -> Scores:
    """Scores in another shape for a while, with the keys still in the last dimension."""
    before = node.args[0]
    now, then = shape(node), shape(before)
    if str(node.target) not in ("view", "reshape") or not now or not then or now[-1] != then[-1]:
        raise NotAttentionError(f"its scores come from {_name(node)}")
    if not all(isinstance(size, int) for size in (*now, *then)):
        raise NotAttentionError("its scores are reshaped to sizes that vary")
    scores = peel(before, after)
    scores.seen_as = None if now == scores.shape else now
    return scores


def _require_one_user(node: Node) -> None:
    if only_user(node) is None:
        raise NotAttentionError("its scores are used elsewhere too")


def _peel_op(node: Node, op: Op, after: float, order: tuple[int, ...]) -> Scores:
    if op.name in ("float", "to", "type_as", "contiguous", "clone"):
        if dtype(node) not in (dtype(op["input"]), torch.float32):
            raise NotAttentionError(f"its scores are converted to {dtype(node)}")
        return peel(op["input"], after, order)
    if op.name in ("mul", "div"):
        return _peel_factor(node, op, after, order)
    if op.name in ("add", "sub"):
        return _peel_added(node, op, after, order)
    if op.name in ("masked_fill", "where"):
        return _peel_fill(node, op, after, order)
    dims = permutation(op, rank(node))
    if dims is not None:
        found = peel(op["input"], after, tuple(dims[i] for i in order or range(len(dims))))
        if found.seen_as is not None:
            raise NotAttentionError("its scores are reshaped while they are permuted")
        return found
    raise NotAttentionError(f"its scores come from {_name(node)}")


def _peel_factor(node: Node, op: Op, after: float, order: tuple[int, ...]) -> Scores:
    divides = op.name == "div"
    for scores, factor in _sides(op, both=not divides):
        number = factor if is_number(factor) else _filled_with(factor)
        if number is not None:
            if number == 0:
                break
            return peel(scores, after / number if divides else after * number, order)
        alike = is_single(factor) if order else _is_the_same_for_all_keys(factor, node)
        if alike and shape(scores) == shape(node):
            found = peel(scores, after, order)
            if found.added or found.fills:
                raise NotAttentionError("a tensor scales its scores after they are masked")
            if found.seen_as is not None:
                raise NotAttentionError("a tensor scales its scores while they are reshaped")
            found.factors.append((factor, divides))
            return found
    raise NotAttentionError("its scores are multiplied by more than a number")


def _is_the_same_for_all_keys(factor: Any, scores: Node) -> bool:
    """A number or tensor that queries can be multiplied by as well."""
    if is_single(factor):
        return True
    sizes, dimensions = shape(factor), rank(scores)
    if sizes is None or dimensions is None or not 0 < len(sizes) <= dimensions:
        return False
    return isinstance(sizes[-1], int) and sizes[-1] == 1


def _peel_added(node: Node, op: Op, after: float, order: tuple[int, ...]) -> Scores:
    reason = NotAttentionError("its scores are a sum of unknown things")
    for scores, added in _sides(op, both=op.name == "add"):
        if shape(scores) != shape(node) or not isinstance(added, Node):
            continue
        kind = dtype(added)
        if kind is None or not kind.is_floating_point or (rank(added) or 0) > (rank(node) or 0):
            continue
        try:
            found = peel(scores, after, order)
        except NotAttentionError as why:
            reason = why
            continue
        if any(math.isfinite(value) for *_, value in found.fills):
            raise NotAttentionError("something is added to its scores after a finite fill")
        found.added.append((found.mask(added, order), after if op.name == "add" else -after))
        return found
    raise reason


def fill_choices(op: Op) -> list[tuple[Any, Any, bool, Any]]:
    """(what is filled, condition, whether it fills where that is True, with what)"""
    if op.name == "masked_fill":
        return [(op["input"], op["mask"], True, op["value"])]
    return [
        (op["input"], op["condition"], False, op["other"]),
        (op["other"], op["condition"], True, op["input"]),
    ]


def _peel_fill(node: Node, op: Op, after: float, order: tuple[int, ...]) -> Scores:
    for scores, condition, hides, filled in fill_choices(op):
        number = _filled_with(filled)
        if number is None or not isinstance(condition, Node) or shape(scores) != shape(node):
            continue
        if (rank(condition) or 0) > (rank(node) or 0):
            continue
        if not number * after <= _HIDES:
            raise NotAttentionError(f"its scores are filled with {number:g}, which does not hide")
        found = peel(scores, after, order)
        if found.factors and after < 0:
            break
        others = {value for *_, value in found.fills}
        if others - {number * after}:
            raise NotAttentionError("its scores are filled with several values")
        found.fills.append((found.mask(condition, order), hides, number * after))
        return found
    raise NotAttentionError("what its scores are filled with is not known while compiling")


def _filled_with(x: Any) -> float | None:
    """The number, if it is known; tensors of several elements are not asked."""
    if isinstance(x, Node) and (not is_single(x) or any(mutates(user) for user in x.users)):
        return None
    return constant(x)


def _sides(op: Op, both: bool) -> Iterator[tuple[Any, Any]]:
    yield op["input"], op["other"]
    if both:
        yield op["other"], op["input"]


def _name(node: Node) -> str:
    if node.op == "placeholder":
        return "outside this graph"
    target = node.target
    return f"{target if isinstance(target, str) else getattr(target, '__name__', target)}"
