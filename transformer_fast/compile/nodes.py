"""What a captured graph knows of its nodes without looking at what they compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node


def value(node: Any) -> Any:
    """What the node gave while it was captured: a fake tensor, a number..."""
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


def is_number(x: Any) -> bool:
    """A Python number known while compiling."""
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def is_single(node: Any) -> bool:
    """A tensor of one element, or a number known at run time only."""
    found = value(node)
    if isinstance(found, Tensor):
        return all(isinstance(n, int) and n == 1 for n in found.shape) and found.dim() <= 1
    return isinstance(node, Node) and isinstance(found, (int, float, torch.SymInt, torch.SymFloat))


def only_user(node: Node) -> Node | None:
    """The node that alone uses this one, once."""
    return next(iter(node.users)) if len(node.users) == 1 else None
