"""Recognising attention written by hand: everything around one softmax over keys.

From the softmax upwards: scaling, masks and biases, down to the product of queries and keys
(`scores`). Downwards: dropout, the product with the values, and whoever looks at the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from . import run_time
from .editor import Editor
from .nodes import dtype, is_number, rank
from .ops import Op, read
from .products import Product, weighted_sum
from .scale import scale_on_the_way
from .scores import Mask, NotAttentionError, Scores, fill_choices, peel


def rewrite_attention(editor: Editor) -> None:
    """Put our attention in for every one in the graph; tell of each softmax that is left."""
    for node in list(editor.graph.nodes):
        op = read(node)
        if op is None or op.name != "softmax" or len(node.users) == 0:
            continue
        try:
            _rewrite(editor, node, op)
        except NotAttentionError as reason:
            editor.left("softmax", node, str(reason))


def _rewrite(editor: Editor, softmax: Node, op: Op) -> None:
    if op["dtype"] not in (None, dtype(softmax), torch.float32):
        raise NotAttentionError(f"it is computed in {op['dtype']}")
    if not _is_over_keys(softmax, op):
        raise NotAttentionError("it is not taken over the last dimension")
    if rank(softmax) not in (2, 3, 4):
        raise NotAttentionError("its scores have neither 2, 3 nor 4 dimensions")
    scores = peel(op["input"], 1.0)
    if scores.seen_as is not None:
        raise NotAttentionError("its scores are reshaped before it")
    nodes = scores.nodes | {softmax}
    weights, dropout_p, dropped = _downwards(softmax, nodes, scores)
    product = next((u for u in weights.users if weighted_sum(u, weights) is not None), None)
    if product is None:
        raise NotAttentionError("its result is not multiplied with values")
    found = weighted_sum(product, weights)
    assert found is not None
    nodes |= {product}
    inputs = [scores.product.left, scores.product.right, found.values, *scores.inputs()]
    if not editor.memory.may_replace(product, inputs):
        raise NotAttentionError("something is written in place between its parts")
    _check_tensors(editor, scores.product, found.values)

    # As early as possible: the weights may be looked at before they meet the values.
    point = softmax if editor.last([softmax, found.values]) is softmax else product
    seen_later = [u for u in weights.users if u is not product]
    seen_before = [u for u in softmax.users if u not in nodes] if dropped else []
    if point is product and (seen_later or seen_before):
        raise NotAttentionError("its weights are shown before its values are known")
    scale = scores.scale * scale_on_the_way(editor, scores.product, product)
    query = scores.product.queries(editor, point)
    for factor, divides in scores.factors:
        function = torch.div if divides else torch.mul
        query = editor.call(point, function, query, factor, like=query)
    key = scores.product.keys(editor, point)
    value = found.permuted_values(editor, point)
    hidden, added = _masks(editor, scores, softmax, point)

    def attend(p: float, need_weights: bool) -> Node:
        arguments = (query, key, value, hidden, added, scale, p, need_weights)
        return editor.call(point, run_time.attention, *arguments, like=product)

    both = attend(dropout_p, bool(seen_later))
    product.replace_all_uses_with(found.result(editor, editor.item(both, 0, product)))
    if seen_later:
        shown = _shown(editor, both, weights, product)
        for user in seen_later:
            user.replace_input_with(weights, shown)
    if seen_before:
        # Weights before dropout are wanted as well: those of a second, undropped attention.
        shown = _shown(editor, attend(0.0, True), softmax, product)
        for user in seen_before:
            user.replace_input_with(softmax, shown)
    editor.remove(nodes)
    editor.found("attention", product)


def _is_over_keys(softmax: Node, op: Op) -> bool:
    dim, dimensions = op["dim"], rank(softmax)
    return isinstance(dim, int) and dimensions is not None and dim in (-1, dimensions - 1)


def _shown(editor: Editor, both: Node, weights: Node, output: Node) -> Node:
    """The weights in the dtype that the user's have."""
    node = editor.item(both, 1, weights)
    if dtype(weights) != dtype(output):
        with editor.graph.inserting_after(node):
            node = editor.graph.call_method("to", (node, dtype(weights)))
    return node


def _downwards(softmax: Node, nodes: set[Node], scores: Scores) -> tuple[Node, float, bool]:
    """The node whose result meets the values, the dropout before it, and whether it drops."""
    weights, dropout_p, dropped = softmax, 0.0, False
    while True:
        step = [(u, op) for u in weights.users if (op := read(u)) is not None and op.name in _STEPS]
        if not step:
            return weights, dropout_p, dropped
        if len(step) > 1 or (weights is not softmax and len(weights.users) > 1):
            raise NotAttentionError("its weights go several ways")
        user, op = step[0]
        if op.name == "dropout":
            p, training = op.args.get("p", 0.5), op.args.get("training", True)
            if not is_number(p) or not isinstance(training, bool) or dropped:
                raise NotAttentionError("its dropout is not known while compiling")
            dropout_p, dropped = float(p), True
        elif len(weights.users) > 1:
            raise NotAttentionError("its weights go several ways")
        elif op.name in ("masked_fill", "where"):
            _hide_again(op, weights, scores)
        nodes.add(user)
        weights = user


#: What may stand between the softmax and the values; nan_to_num, since rows that see nothing have
#: no NaN here.
_STEPS = frozenset(
    {"dropout", "to", "float", "type_as", "contiguous", "clone", "masked_fill", "where",
     "nan_to_num"}
)  # fmt: skip


def _hide_again(op: Op, weights: Node, scores: Scores) -> None:
    """Weights set to 0 where the scores were filled: rows that see nothing get zeros then."""
    for filled, condition, hides, with_what in fill_choices(op):
        if filled is not weights or not is_number(with_what) or with_what != 0:
            continue
        if len(scores.fills) == 1:
            mask, hid, _ = scores.fills[0]
            if mask == Mask(condition, None) and hid == hides:
                scores.fills[0] = (mask, hid, -math.inf)
                return
    raise NotAttentionError("its weights are filled where its scores are not")


def _check_tensors(editor: Editor, product: Product, values: Node) -> None:
    kinds = {dtype(n) for n in (product.left, product.right, values)}
    if len(kinds) > 1 and not editor.has_autocast():
        raise NotAttentionError("queries, keys and values have several dtypes")
    if any(kind is None or not kind.is_floating_point for kind in kinds):
        raise NotAttentionError("queries, keys and values are not floating-point tensors")
    ranks = {rank(n) for n in (product.left, product.right, values)}
    if len(ranks) > 1:
        raise NotAttentionError("queries, keys and values have different numbers of dimensions")


def _masks(
    editor: Editor, scores: Scores, softmax: Node, before: Node
) -> tuple[Node | None, Node | None]:
    """The prepared masks: what hides, and what is added."""
    dimensions = rank(softmax)

    def shared(function: Callable[..., Any], *arguments: Any) -> Node:
        return editor.shared(function, arguments, before)

    def spread(mask: Mask) -> Node:
        if mask.order:
            return shared(run_time.reorder, mask.node, mask.order)
        if mask.over is None:
            return mask.node
        return shared(run_time.spread, mask.node, mask.over, scores.shape)

    hidden: Node | None = None
    if scores.fills:
        mask, hides, fill = scores.fills[0]
        condition = spread(mask)
        if len(scores.fills) > 1:
            condition, hides = _any_hides(scores, spread, shared), True
        hidden = shared(run_time.prepare_hidden, condition, hides, fill, dimensions)
    added: Node | None = None
    for mask, factor in scores.added:
        term = spread(mask) if factor == 1.0 else shared(torch.mul, spread(mask), factor)
        added = term if added is None else shared(torch.add, added, term)
    if added is not None:
        added = shared(run_time.prepare_added, added, dimensions)
    return hidden, added


def _any_hides(scores: Scores, spread: Callable[[Mask], Node], shared: Callable[..., Node]) -> Node:
    """Where any of several fills hides."""
    total: Node | None = None
    for mask, hides, _ in scores.fills:
        term = spread(mask)
        if dtype(mask.node) != torch.bool:
            term = shared(torch.ne, term, 0)
        if not hides:
            term = shared(torch.logical_not, term)
        total = term if total is None else shared(torch.logical_or, total, term)
    assert total is not None
    return total
