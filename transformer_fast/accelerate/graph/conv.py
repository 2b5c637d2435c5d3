"""Feed-forward networks written as two convolutions over single positions.

``conv2(act(conv1(x.transpose(1, 2)))).transpose(1, 2)``, with kernels of size 1, is
``linear2(act(linear1(x)))``; `rewrite_feed_forward` then knows it.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch.fx import Node

from .editor import Editor
from .nodes import only_user, rank, shape
from .ops import Op, read
from .products import permutation

#: What works on each element alone, so that it may come before or after a transposition.
_ELEMENTWISE = frozenset({"relu", "gelu", "silu", "dropout"})


def rewrite_convolutions(editor: Editor) -> None:
    """Put linear maps in for pairs of convolutions that make up a feed-forward network."""
    for second in list(editor.graph.nodes):
        op = _as_linear(second)
        if op is None or not second.users:
            continue
        between: list[Node] = []
        node = op["input"]
        while (step := read(node)) is not None and step.name in _ELEMENTWISE:
            between.append(node)
            node = step["input"]
        first = _as_linear(node)
        chain = [*between, node]
        if first is None or not between or any(only_user(n) is None for n in chain):
            continue
        inputs = [first[n] for n in ("input", "weight", "bias")] + [op["weight"], op["bias"]]
        if editor.memory.may_replace(second, inputs):
            _rewrite(editor, first, between[::-1], op, second)


def _as_linear(node: Any) -> Op | None:
    """A convolution that is a linear map of each position."""
    op = read(node)
    if op is None or op.name != "conv1d" or rank(op["input"]) != 3:
        return None
    sizes = shape(op["weight"])
    plain = all(_is(op[name], 1) for name in ("stride", "dilation", "groups"))
    unpadded = _is(op["padding"], 0) or op["padding"] in ("same", "valid")
    return op if plain and unpadded and sizes is not None and sizes[-1] == 1 else None


def _is(given: Any, wanted: int) -> bool:
    return given is None or given in (wanted, (wanted,), [wanted])


def _rewrite(editor: Editor, first: Op, between: list[Node], second: Op, last: Node) -> None:
    x = _unswapped(first["input"]) or _swapped(editor, last, first["input"])
    y = _linear(editor, last, x, first)
    for node in between:
        op = read(node)
        assert op is not None
        args = {**op.args, "input": y}
        if "inplace" in args:
            args["inplace"] = False
        function = getattr(F, op.name)
        meta = y.meta
        y = editor.call(last, function, args.pop("input"), like=node, **args)
        y.meta["example_value"] = meta["example_value"]
    y = _linear(editor, last, y, second)
    for user in list(last.users):
        if _unswapped(user) is last:
            user.replace_all_uses_with(y)
            editor.remove([user])
    if last.users:
        with editor.graph.inserting_before(last):
            # Whatever comes then may count on the layout that a convolution gives.
            whole = editor.graph.call_method("contiguous", (_swapped(editor, last, y),))
        whole.meta = dict(last.meta)
        last.replace_all_uses_with(whole)
    editor.remove([last, *between])


def _linear(editor: Editor, before: Node, x: Node, conv: Op) -> Node:
    with editor.graph.inserting_before(before):
        weight = editor.graph.call_method("squeeze", (conv["weight"], -1))
    weight.meta = {"example_value": conv["weight"].meta["example_value"].squeeze(-1)}
    y = editor.call(before, F.linear, x, weight, conv["bias"], like=before)
    width = weight.meta["example_value"].shape[0]
    known = x.meta["example_value"]
    y.meta["example_value"] = known.new_empty((*known.shape[:-1], width))
    return y


def _swapped(editor: Editor, before: Node, x: Node) -> Node:
    with editor.graph.inserting_before(before):
        node = editor.graph.call_method("transpose", (x, 1, 2))
    node.meta = {"example_value": x.meta["example_value"].transpose(1, 2)}
    return node


def _unswapped(node: Any) -> Node | None:
    """x of ``x.transpose(1, 2)``."""
    op = read(node)
    if op is None or rank(node) != 3 or permutation(op, 3) != [0, 2, 1]:
        return None
    inner = op["input"]
    return inner if isinstance(inner, Node) else None
