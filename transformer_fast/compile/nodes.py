"""Properties of graph nodes that do not depend on the op: value, shape, dtype, users."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true


def value(node: Any) -> Any:
    """Returns the node's value during the capture, such as a fake tensor; non-nodes as they are."""
    if not isinstance(node, Node):
        return node
    return node.meta.get("example_value", node.meta.get("val"))


def shape(node: Any) -> tuple[Any, ...] | None:
    found = value(node)
    return tuple(found.shape) if isinstance(found, Tensor) else None


def rank(node: Any) -> int | None:
    found = value(node)
    return found.dim() if isinstance(found, Tensor) else None


def dtype(node: Any) -> torch.dtype | None:
    found = value(node)
    return found.dtype if isinstance(found, Tensor) else None


def is_same(one: Sequence[Any] | None, other: Sequence[Any] | None) -> bool:
    """True if two sequences of sizes are equal.

    An ordinary comparison of symbolic sizes would add a guard to the program.
    """
    if one is None or other is None or len(one) != len(other):
        return False
    return all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))


def is_number(x: Any) -> bool:
    """True for a Python number that is known at compile time."""
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def is_single(node: Any) -> bool:
    """True for a one-element tensor of rank 0 or 1, and for a number known only at run time."""
    found = value(node)
    if isinstance(found, Tensor):
        return all(isinstance(n, int) and n == 1 for n in found.shape) and found.dim() <= 1
    return isinstance(node, Node) and isinstance(found, (int, float, torch.SymInt, torch.SymFloat))


def only_user(node: Node) -> Node | None:
    """Returns the only node that uses this one; None if there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None
