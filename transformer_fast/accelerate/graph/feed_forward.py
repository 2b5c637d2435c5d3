"""Recognising feed-forward networks, and what is left of linear maps with activations."""

from __future__ import annotations

from torch.fx import Node

from ... import functional
from .activation import activation_of
from .editor import Editor
from .nodes import dtype, is_number, only_user, rank
from .ops import read


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
