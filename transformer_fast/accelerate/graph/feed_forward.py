"""Recognising feed-forward networks, and what is left of linear maps with activations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ... import functional
from ...dispatch import checked_call, select
from ...functional._operator import Operator
from ...functional.feed_forward import PACKED as FEED_FORWARD
from ...functional.linear import CODES
from ...functional.linear import PACKED as LINEAR
from .activation import activation_of
from .editor import Editor
from .nodes import dtype, is_number, only_user, rank, shape, value
from .ops import read


def name_linear(editor: Editor) -> None:
    """Products with an (in, out) parameter as linear maps: Conv1D of transformers, ``x @ W``.

    For inference: nothing keeps a packed copy in training, and packing such a matrix takes longer.
    """
    if torch.is_grad_enabled():
        return
    for node in list(editor.graph.nodes):
        found = _product(node)
        if found is None:
            continue
        x, weight, bias = found
        # Two dimensions, for addmm, of which only the ends know.
        whole, last = _flattened(x), only_user(node)
        if whole is None or last is None or not _unflattens(last, whole, weight):
            whole, last = x, node
        if not editor.memory.may_replace(node, [whole, weight, bias]):
            continue
        with editor.graph.inserting_before(node):
            turned = editor.graph.call_method("t", (weight,))
        turned.meta = {"example_value": value(weight).t()}
        new = editor.call(node, F.linear, whole, turned, bias, like=last)
        last.replace_all_uses_with(new)
        editor.remove([last, node, x])


def _product(node: Node) -> tuple[Node, Node, Node | None] | None:
    """x, the parameter and the bias."""
    op = read(node)
    if op is None or not node.users:
        return None
    if op.name == "addmm" and len(op.args) == 3:
        x, weight, bias = op["mat1"], op["mat2"], op["input"]
    elif op.name == "matmul":
        x, weight, bias = op["input"], op["other"], None
    else:
        return None
    is_matrix = isinstance(value(weight), torch.nn.Parameter) and rank(weight) == 2
    if not is_matrix or (rank(x) or 0) < 2 or dtype(x) != dtype(weight):
        return None
    fits = bias is None or shape(bias) == value(weight).shape[1:]
    return (x, weight, bias) if fits else None


def _flattened(x: Node) -> Node | None:
    """What ``x``, of two dimensions, is a view of."""
    whole = x.args[0] if _is_reshaped(x) else None
    return whole if isinstance(whole, Node) and (rank(whole) or 0) > 2 else None


def _unflattens(last: Node, whole: Node, weight: Node) -> bool:
    """Whether it gives the product with ``weight`` the leading dimensions of ``whole``."""
    before: Any = shape(whole)
    after: Any = shape(last)
    rows, columns = value(weight).shape
    if not _is_reshaped(last) or len(before) != len(after):
        return False
    # Comparing symbolic sizes would be a guard of the program's.
    pairs = zip((*before, columns), (*after[:-1], rows, after[-1]), strict=True)
    return all(statically_known_true(one == other) for one, other in pairs)


def _is_reshaped(node: Node) -> bool:
    return node.op == "call_method" and node.target in ("view", "reshape")


def rewrite_feed_forward(editor: Editor) -> None:
    """``linear2(dropout(activation(linear1(x))))`` as one call."""
    for node in list(editor.graph.nodes):
        op = read(node)
        if op is None or op.name != "linear" or not node.users:
            continue
        hidden, p = _dropped(op["input"])
        found = activation_of(hidden)
        if found is None or hidden is None or only_user(hidden) is None:
            continue
        name, before = found
        first = read(before)
        if first is None or first.name != "linear" or only_user(before) is None:
            continue
        if not all(map(_is_row, (first["bias"], op["bias"]), (first["weight"], op["weight"]))):
            continue
        inputs = [first[n] for n in ("input", "weight", "bias")] + [op["weight"], op["bias"]]
        if not editor.memory.may_replace(node, inputs):
            editor.left("feed_forward", node, "something is written in place between its parts")
            continue
        new = editor.call(
            node, functional.feed_forward, first["input"], first["weight"], first["bias"],
            op["weight"], op["bias"], activation=name, dropout_p=p, like=node,
        )  # fmt: skip
        node.replace_all_uses_with(new)
        editor.remove([node, op["input"], hidden, before])
        editor.found("feed_forward", node)


def _is_row(bias: object, weight: object) -> bool:
    """Whether there is a bias for each row of the weight, or none; F.linear lets it broadcast."""
    return bias is None or shape(bias) == (shape(weight) or ())[:1]


def _dropped(node: object) -> tuple[Node | None, float]:
    """What is dropped with which probability, if only the caller sees it."""
    if not isinstance(node, Node):
        return None, 0.0
    op = read(node)
    if op is None or op.name != "dropout":
        return node, 0.0
    found = dropout_of(node)
    if found is None or only_user(node) is None:
        return None, 0.0
    return found


def dropout_of(node: Node) -> tuple[Node, float] | None:
    """The input of a dropout and its probability, 0 if it does nothing; None: no such thing."""
    op = read(node)
    if op is None or op.name != "dropout" or not isinstance(op["input"], Node):
        return None
    p, training = op.args.get("p", 0.5), op.args.get("training", True)
    if not is_number(p) or not isinstance(training, bool):
        return None
    return op["input"], float(p) if training else 0.0


def rewrite_linear(editor: Editor) -> None:
    """The linear maps that are left, with the activation behind them."""
    for node in list(editor.graph.nodes):
        op = read(node)
        if op is None or op.name != "linear" or not node.users or rank(op["input"]) is None:
            continue
        weight, activation, last = op["weight"], None, node
        if dtype(weight) != dtype(op["input"]) and not editor.has_autocast():
            continue
        user = only_user(node)
        found = activation_of(user)
        if user is not None and found is not None:
            activation, last = found[0], user
        new = editor.call(
            node, functional.linear, op["input"], weight, op["bias"], activation=activation,
            like=last,
        )  # fmt: skip
        last.replace_all_uses_with(new)
        editor.remove([last, node])
        editor.found("linear", node)


#: Where the operators have weights; behind each its packed copy.
PLACES = {LINEAR.name: (1,), FEED_FORWARD.name: (1, 4)}


def packed_call(node: Node) -> tuple[Operator, list[Any], int] | None:
    """The operator that reads packed weights on the CPU, its arguments without those, and the number
    of rows, of a linear map or a feed-forward network; None for others."""
    activation: Any = node.kwargs.get("activation")
    if node.target is functional.linear and len(node.args) == 3:
        operator, others = LINEAR, {"activation"}
    elif node.target is functional.feed_forward and len(node.args) == 5:
        operator, others = FEED_FORWARD, {"activation", "dropout_p"}
    else:
        return None
    given = [value(each) for each in node.args]
    if (
        not node.kwargs.keys() <= others
        or node.kwargs.get("dropout_p", 0.0) != 0.0
        or activation not in CODES
        or given[1].dim() != 2
        or not all(x is None or all(isinstance(n, int) for n in x.shape) for x in given)
    ):
        return None
    call = checked_call(node.target, *given, activation=activation)
    # A bias that broadcasts was made a row.
    same = all(one is other for one, other in zip(call.tensors, given, strict=False))
    if not same or select(call).backend != "cpu":
        return None
    arguments: list[Any] = list(node.args)
    for place in PLACES[operator.name]:
        arguments.insert(place + 1, None)
    arguments += [None] * (operator is LINEAR)  # no residual
    rows = given[0].numel() // max(1, given[0].shape[-1])
    return operator, [*arguments, CODES[activation]], rows
