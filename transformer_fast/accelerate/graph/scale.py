"""Scaling of queries or keys before their product: ``q / sqrt(d)``, perhaps heads apart later."""

from __future__ import annotations

from torch.fx import Node

from .editor import Editor
from .nodes import is_number, only_user
from .ops import is_view, mutates, read
from .products import Product


def scale_on_the_way(editor: Editor, product: Product, last: Node) -> float:
    """Take multiplications by numbers out of the ways to the product; what they multiply by.

    ``last``: the last call before which the product's inputs will be read.
    """
    scale = 1.0
    for side in ("left", "right"):
        while True:
            found = _find(getattr(product, side))
            if found is None:
                break
            node, inner, factor = found
            if not editor.memory.may_replace(getattr(product, side), [inner], last):
                break
            scale *= factor
            if node is getattr(product, side):
                setattr(product, side, inner)
            else:
                node.replace_all_uses_with(inner)
                editor.remove([node])
    return scale


def _find(node: Node) -> tuple[Node, Node, float] | None:
    """The nearest scaling behind views that lead to nowhere else."""
    while only_user(node) is not None:
        op = read(node)
        if op is not None and op.name in ("mul", "div") and not mutates(node):
            factor, inner = op["other"], op["input"]
            if op.name == "mul" and is_number(inner):
                factor, inner = inner, factor
            if not is_number(factor) or factor == 0 or not isinstance(inner, Node):
                return None
            return node, inner, 1.0 / factor if op.name == "div" else float(factor)
        if not is_view(node) or not isinstance(node.args[0], Node):
            return None
        node = node.args[0]
    return None
