"""Softmax written by hand: ``exp(x - max(x)) / sum(exp(x - max(x)))``."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from .editor import Editor
from .ops import Op, read


def rewrite_softmax(editor: Editor) -> None:
    """Put torch.softmax in; `rewrite_attention` looks at what is around it."""
    for node in list(editor.graph.nodes):
        op = read(node)
        if op is None or op.name != "div" or not node.users:
            continue
        powers, total = read(op["input"]), read(op["other"])
        if powers is None or powers.name != "exp" or total is None or total.name != "sum":
            continue
        dim = _dim(total)
        if total["input"] is not op["input"] or dim is None or total["dtype"] is not None:
            continue
        input = _without_maximum(powers["input"], dim)
        if isinstance(input, Node) and editor.memory.may_replace(node, [input]):
            new = editor.call(node, torch.softmax, input, dim, like=node)
            node.replace_all_uses_with(new)
            editor.remove([node])


def _dim(op: Op) -> int | None:
    """The one dimension that is reduced and kept."""
    dim = op["dim"]
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    return dim if isinstance(dim, int) and op["keepdim"] is True else None


def _without_maximum(node: Any, dim: int) -> Any:
    """x of ``x - max(x)``; of anything else, itself."""
    op = read(node)
    if op is None or op.name != "sub":
        return node
    largest = read(op["other"])
    if largest is not None and largest.name == "detach":
        largest = read(largest["input"])
    if largest is not None and largest.name == "getitem" and largest["index"] == 0:
        largest = read(largest["input"])
    if largest is None or largest.name not in ("max", "amax") or _dim(largest) != dim:
        return node
    return op["input"] if largest["input"] is op["input"] else node
