"""What stands between the product of queries and keys and the softmax: scaling, masks, biases."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .ops import Op, constant, dtype, is_number, is_single, is_view, only_user, rank, read, shape
from .products import Product, split_product

#: A fill as low as this hides: exp of the difference to any usual score is 0.
_HIDES = -9000.0


class NotAttentionError(Exception):
    """Why a softmax is not the middle of an attention that our op can do; str() is a sentence."""


class Mask(NamedTuple):
    node: Node
    #: The shape it is spread over, if it is another than that of the scores.
    over: tuple[Any, ...] | None


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

    def mask(self, node: Node) -> Mask:
        return Mask(node, self.seen_as)


def peel(node: Any, after: float) -> Scores:
    """The scores behind ``node``, which is multiplied by ``after`` before the softmax."""
    if not isinstance(node, Node):
        raise NotAttentionError("its input is not computed from queries and keys")
    product = split_product(node)
    if product is not None:
        scores = Scores(product, shape(node), {node}, after * product.scale)
        if product.added is not None:
            scores.added.append((scores.mask(product.added), after))
        _require_one_user(node)
        return scores
    op = read(node)
    if op is None and not is_view(node):
        raise NotAttentionError(f"its scores come from {_name(node)}")
    _require_one_user(node)
    scores = _peel_view(node, after) if op is None else _peel_op(node, op, after)
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


def _peel_op(node: Node, op: Op, after: float) -> Scores:
    if op.name in ("float", "to", "type_as", "contiguous", "clone"):
        if dtype(node) not in (dtype(op["input"]), torch.float32):
            raise NotAttentionError(f"its scores are converted to {dtype(node)}")
        return peel(op["input"], after)
    if op.name in ("mul", "div"):
        return _peel_factor(node, op, after)
    if op.name in ("add", "sub"):
        return _peel_added(node, op, after)
    if op.name in ("masked_fill", "where"):
        return _peel_fill(node, op, after)
    raise NotAttentionError(f"its scores come from {_name(node)}")


def _peel_factor(node: Node, op: Op, after: float) -> Scores:
    divides = op.name == "div"
    for scores, factor in _sides(op, both=not divides):
        if is_number(factor):
            if factor == 0:
                break
            return peel(scores, after / factor if divides else after * factor)
        if is_single(factor) and shape(scores) == shape(node):
            found = peel(scores, after)
            if found.added or found.fills:
                raise NotAttentionError("a tensor scales its scores after they are masked")
            found.factors.append((factor, divides))
            return found
    raise NotAttentionError("its scores are multiplied by more than a number")


def _peel_added(node: Node, op: Op, after: float) -> Scores:
    reason = NotAttentionError("its scores are a sum of unknown things")
    for scores, added in _sides(op, both=op.name == "add"):
        if shape(scores) != shape(node) or not isinstance(added, Node):
            continue
        kind = dtype(added)
        if kind is None or not kind.is_floating_point or (rank(added) or 0) > (rank(node) or 0):
            continue
        try:
            found = peel(scores, after)
        except NotAttentionError as why:
            reason = why
            continue
        if any(math.isfinite(value) for *_, value in found.fills):
            raise NotAttentionError("something is added to its scores after a finite fill")
        found.added.append((found.mask(added), after if op.name == "add" else -after))
        return found
    raise reason


def _peel_fill(node: Node, op: Op, after: float) -> Scores:
    if op.name == "masked_fill":
        choices = [(op["input"], op["mask"], True, op["value"])]
    else:
        choices = [
            (op["input"], op["condition"], False, op["other"]),
            (op["other"], op["condition"], True, op["input"]),
        ]
    for scores, condition, hides, filled in choices:
        number = constant(filled)
        if number is None or not isinstance(condition, Node) or shape(scores) != shape(node):
            continue
        if (rank(condition) or 0) > (rank(node) or 0):
            continue
        if not number * after <= _HIDES:
            raise NotAttentionError(f"its scores are filled with {number:g}, which does not hide")
        found = peel(scores, after)
        if found.factors and after < 0:
            break
        others = {value for *_, value in found.fills}
        if others - {number * after}:
            raise NotAttentionError("its scores are filled with several values")
        found.fills.append((found.mask(condition), hides, number * after))
        return found
    raise NotAttentionError("what its scores are filled with is not known while compiling")


def _sides(op: Op, both: bool) -> Iterator[tuple[Any, Any]]:
    yield op["input"], op["other"]
    if both:
        yield op["other"], op["input"]


def _name(node: Node) -> str:
    if node.op == "placeholder":
        return "outside this graph"
    target = node.target
    return f"{target if isinstance(target, str) else getattr(target, '__name__', target)}"
