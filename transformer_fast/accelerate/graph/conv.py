"""Convolutions that are linear maps: over single positions, and over patches side by side.

``conv2(act(conv1(x.transpose(1, 2)))).transpose(1, 2)``, with kernels of size 1, is
``linear2(act(linear1(x)))``; `rewrite_feed_forward` then knows it.
``conv(x).flatten(2).transpose(1, 2)``, whose stride is the size of its kernel, is the patch embedding
of vision models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from .editor import Editor
from .memory import is_fresh
from .nodes import only_user, rank, shape, value
from .ops import Op, is_view, read
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


def rewrite_patches(editor: Editor) -> None:
    """Put linear maps in for patch embeddings."""
    for node in list(editor.graph.nodes):
        op = _side_by_side(node)
        sizes = () if op is None else (*value(op["input"]).shape, *value(op["weight"]).shape)
        if op is None or rank(node) == 3 or not all(isinstance(n, int) for n in sizes):
            continue
        flat = only_user(node)
        tokens = None if flat is None else only_user(flat)
        if flat is None or tokens is None or _unswapped(tokens) is not flat:
            continue
        # Whoever looks at the tokens as a convolution lays them out gets them so.
        if not all(is_fresh(user) for user in tokens.users):
            continue
        x, weight = value(op["input"]), value(op["weight"])
        kernel = weight.shape[2:]
        grid = [size // k for size, k in zip(x.shape[2:], kernel, strict=True)]
        is_flat = is_view(flat) or flat.target is torch.flatten
        if (
            is_flat
            and shape(flat) == (len(x), len(weight), math.prod(grid))
            and x.device.type == "cpu"
        ):
            patches = _patches(editor, node, op["input"], grid, kernel)
            tokens.replace_all_uses_with(_linear(editor, node, patches, op))
            editor.remove([tokens, flat, node])


def _patches(
    editor: Editor, before: Node, x: Node, grid: Sequence[int], kernel: Sequence[int]
) -> Node:
    """(B, C, H, W) as (B, patches, C * height * width of a patch)."""
    known = value(x)
    batch, channels, *sizes = known.shape
    split = [n for pair in zip(grid, kernel, strict=True) for n in pair]
    dims = range(2, 2 + len(split), 2)
    with editor.graph.inserting_before(before):
        for dim, (size, n, k) in enumerate(zip(sizes, grid, kernel, strict=True), 2):
            if size != n * k:
                x = editor.graph.call_method("narrow", (x, dim, 0, n * k))
        x = editor.graph.call_method("reshape", (x, (batch, channels, *split)))
        x = editor.graph.call_method("permute", (x, (0, *dims, 1, *(d + 1 for d in dims))))
        # Not a view, which inductor takes as a division of the index of each element.
        x = editor.graph.call_method("contiguous", (x,))
        rows, depth = math.prod(grid), channels * math.prod(kernel)
        shape = (batch, rows, depth)
        x = editor.graph.call_method("as_strided", (x, shape, (rows * depth, depth, 1)))
    x.meta = {"example_value": known.new_empty(shape)}
    return x


def _as_linear(node: Any) -> Op | None:
    """A convolution that is a linear map of each position."""
    op = _side_by_side(node)
    return op if op is not None and rank(node) == 3 and shape(op["weight"])[2] == 1 else None  # type: ignore[index]


def _side_by_side(node: Any) -> Op | None:
    """A convolution of a batch whose windows lie side by side: its stride is the kernel's size."""
    op = read(node)
    if op is None or op.name != "conv":
        return None
    x, weight = value(op["input"]), shape(op["weight"])
    if weight is None or rank(op["input"]) != len(weight):
        return None
    # What torch.func maps over has dimensions of its own.
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return None
    # "same" is for strides of 1, and then nothing is padded.
    unpadded = _is(op["padding"], 0) or op["padding"] in ("same", "valid")
    plain = unpadded and all(_is(op[name], 1) for name in ("dilation", "groups"))
    stride, kernel = op["stride"], list(weight[2:])
    strides = list(stride) if _is_sequence(stride) else [stride or 1] * len(kernel)
    return op if plain and strides == kernel else None


def _is(given: Any, wanted: int) -> bool:
    return given is None or (set(given) == {wanted} if _is_sequence(given) else given == wanted)


def _is_sequence(given: Any) -> bool:
    return isinstance(given, tuple | list)


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
        weight = editor.graph.call_method("flatten", (conv["weight"], 1))
    weight.meta = {"example_value": value(conv["weight"]).flatten(1)}
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
