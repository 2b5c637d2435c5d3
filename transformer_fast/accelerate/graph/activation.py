"""Recognising activations written by hand: both forms of GELU, and SiLU."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch.fx import Node

from .editor import Editor
from .factors import close, factors, plus
from .ops import read


def rewrite_activations(editor: Editor) -> None:
    """Put torch's own function in for each; `rewrite_feed_forward` then knows it."""
    for node in list(editor.graph.nodes):
        op = read(node)
        if op is None or op.name not in ("mul", "div") or not node.users:
            continue
        found = _gelu(node) or _silu(node)
        if found is None or not editor.memory.may_replace(node, [found[1]]):
            continue
        name, input = found
        if name == "silu":
            new = editor.call(node, F.silu, input, like=node)
        else:
            new = editor.call(node, F.gelu, input, approximate=name, like=node)
        node.replace_all_uses_with(new)
        editor.remove([node])


def _gelu(node: Node) -> tuple[str, Node] | None:
    """``x/2 (1 + erf(x / sqrt 2))``, or ``x/2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))``"""
    number, nodes = factors(node)
    if len(nodes) != 2 or not close(number, 0.5):
        return None
    for x, gate in (nodes, nodes[::-1]):
        sum = plus(gate)
        if sum is None or sum[0] != 1.0:
            continue
        op = read(sum[1])
        if op is None or op.name not in ("erf", "tanh") or not isinstance(op["input"], Node):
            continue
        inner = factors(op["input"])
        is_tanh = op.name == "tanh" and close(inner.number, math.sqrt(2 / math.pi))
        if is_tanh and len(inner.nodes) == 2 and _is_cubic_over_x(inner.nodes, x):
            return "tanh", x
        if len(inner.nodes) != 1:
            continue
        if op.name == "erf" and inner.nodes == (x,) and close(inner.number, math.sqrt(0.5)):
            return "none", x
        if is_tanh and _is_cubic(inner.nodes[0], x):
            return "tanh", x
    return None


def _is_cubic(node: Node, x: Node) -> bool:
    """``x + 0.044715 x^3``"""
    op = read(node)
    if op is None or op.name != "add":
        return False
    for one, other in ((op["input"], op["other"]), (op["other"], op["input"])):
        if one is x and isinstance(other, Node):
            number, nodes = factors(other)
            return nodes == (x, x, x) and close(number, 0.044715)
    return False


def _is_cubic_over_x(nodes: tuple[Node, ...], x: Node) -> bool:
    """``x`` and ``1 + 0.044715 x^2``"""
    for one, other in (nodes, nodes[::-1]):
        sum = plus(other)
        if one is x and sum is not None and sum[0] == 1.0:
            number, inner = factors(sum[1])
            return inner == (x, x) and close(number, 0.044715)
    return False


def _silu(node: Node) -> tuple[str, Node] | None:
    """``x * sigmoid(x)``"""
    number, nodes = factors(node)
    if len(nodes) != 2 or number != 1.0:
        return None
    for x, gate in (nodes, nodes[::-1]):
        op = read(gate)
        if op is not None and op.name == "sigmoid" and op["input"] is x:
            return "silu", x
    return None


def activation_of(node: object) -> tuple[str, Node] | None:
    """The name by which kernels know the activation that ``node`` computes, and its input."""
    op = read(node)
    if op is None or not isinstance(op["input"], Node):
        return None
    if op.name in ("relu", "silu"):
        return op.name, op["input"]
    if op.name == "gelu" and op.args.get("approximate", "none") in ("none", "tanh"):
        return ("gelu_tanh" if op["approximate"] == "tanh" else "gelu"), op["input"]
    return None
