"""Recognising the residual connection in front of a norm: ``norm(x + dropout(y))``."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ... import functional
from ...functional.annotated_layer_norm import add_annotated_layer_norm, annotated_layer_norm
from .editor import Editor
from .feed_forward import dropout_of
from .nodes import dtype, only_user, shape
from .ops import mutates, read

#: How each norm is reported, and the same behind a residual connection.
_NORMS: dict[Any, tuple[str, str]] = {
    functional.layer_norm: ("layer_norm", "add_layer_norm"),
    functional.rms_norm: ("rms_norm", "add_rms_norm"),
    annotated_layer_norm: ("layer_norm", "add_layer_norm"),
}


def rewrite_add_norm(editor: Editor) -> None:
    """One call for sum and norm; the sum stays available, for pre-norm models."""
    for node in list(editor.graph.nodes):
        if node.target not in _NORMS or not node.users:
            continue
        total = node.args[0]
        op = read(total)
        if not isinstance(total, Node) or op is None or op.name != "add" or mutates(total):
            continue
        terms = op["input"], op["other"]
        if not all(isinstance(t, Node) and _fits(t, total) for t in terms):
            continue
        parameters = [n for n in node.all_input_nodes if n is not total]
        if editor.last([total, *parameters]) is not total:
            continue
        input, residual, p = _split(*terms)  # type: ignore[arg-type]
        quiet = editor.memory.may_replace(total, [input, residual])
        if quiet and editor.memory.is_quiet([total, *parameters], total, node):
            _rewrite(editor, node, total, input, residual, p)
    for node in editor.graph.nodes:
        if node.target in _NORMS:
            editor.found(_NORMS[node.target][0], node)


def _fits(term: Node, total: Node) -> bool:
    return shape(term) == shape(total) and dtype(term) == dtype(total)


def _rewrite(
    editor: Editor, norm: Node, total: Node, input: Node, residual: Node, p: float
) -> None:
    _, *rest = norm.args
    if norm.target is annotated_layer_norm:
        both = editor.call(total, add_annotated_layer_norm, input, residual, *rest, p, like=norm)
    else:
        fused = getattr(functional, _NORMS[norm.target][1])
        both = editor.call(total, fused, input, residual, *rest, dropout_p=p, like=norm)
    terms = total.all_input_nodes
    norm.replace_all_uses_with(editor.item(both, 0, norm))
    total.replace_all_uses_with(editor.item(both, 1, total))
    editor.remove([norm, total, *terms])
    editor.found(_NORMS[norm.target][1], norm)


def _split(first: Node, second: Node) -> tuple[Node, Node, float]:
    """Which term is the sub-layer's output, and its dropout if nobody else sees that."""
    for term, other in ((second, first), (first, second)):
        found = dropout_of(term)
        if found is not None and only_user(term) is not None and term is not other:
            return found[0], other, found[1]
    return second, first, 0.0
