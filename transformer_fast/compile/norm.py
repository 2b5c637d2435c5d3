"""Recognises norms: PyTorch's, the usual hand-written definitions, and ``norm(x + dropout(y))``."""

from __future__ import annotations

import inspect
import itertools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .. import functional
from ..functional.layer_norm import add_annotated_layer_norm, annotated_layer_norm
from ..ops.layer_norm import ANNOTATED, ANNOTATED_BIASED, NORMS, RMS
from .editor import Editor
from .feed_forward import dropout_of
from .nodes import dtype, is_same, only_user, rank, shape, value
from .ops import calls, mutates, plus, read
from .values import UnknownValueError, evaluate, formula_of

#: Function of this library: (name in the report, variant with a residual sum before it).
_FUSED: dict[Any, tuple[str, Any]] = {
    getattr(functional, op): (op, getattr(functional, f"add_{op}")) for op in NORMS
}
_FUSED[annotated_layer_norm] = "layer_norm", add_annotated_layer_norm


@dataclass
class _NormPattern:
    """``(x - mean(x)) / spread * weight + bias``, or ``x / spread * weight`` for RMS norms."""

    input: Node
    #: True if eps is under the root; False if it is added to the standard deviation.
    inside: bool
    unbiased: bool
    eps: float
    op: str = "layer_norm"
    weight: Node | None = None
    bias: Node | None = None


def rewrite_norms(editor: Editor) -> None:
    """Replaces each norm with a call of this library's norm or of the Annotated Transformer's."""
    for node, op in calls(editor.graph, *NORMS):
        sizes = op["normalized_shape"]
        if not (isinstance(sizes, (tuple, list)) and all(isinstance(n, int) for n in sizes)):
            continue
        parameters = inspect.signature(NORMS[op.name].pytorch).parameters.values()
        arguments = [op.args.get(each.name, each.default) for each in parameters]
        ours = getattr(functional, op.name)
        reason = editor.refusal(node, ours, *arguments)
        if reason is None:
            editor.replace(node, editor.call(node, ours, *arguments, like=node))
        else:
            editor.report_left(op.name, node, reason)
    # The last node first: before it, there may be a norm without the weight and the bias.
    for node, op in reversed([*calls(editor.graph, "add", "mul", "div", "to", "float")]):
        is_sum = op.name == "add" and is_same(shape(op["input"]), shape(op["other"]))
        if node.users and not is_sum and (norm := _match_norm(node)) is not None:
            _replace(editor, node, norm)


def _replace(editor: Editor, last: Node, norm: _NormPattern) -> None:
    width: int = shape(last)[-1]  # type: ignore[index]
    reason = editor.obstacle(last, [norm.input, norm.weight, norm.bias])
    if reason is not None:
        editor.report_left(norm.op, last, reason)
        return
    for name in ("weight", "bias"):
        parameter = getattr(norm, name)
        if parameter is not None and shape(parameter) != (width,):  # one value for all features
            setattr(norm, name, editor.method(last, "expand", parameter, width))
    if norm.inside:
        weight: Any = norm.weight
        eps = norm.eps
        if norm.unbiased:
            # sqrt(v n / (n - 1) + eps) = sqrt(n / (n - 1)) sqrt(v + eps (n - 1) / n)
            eps *= (width - 1) / width
            ratio = math.sqrt((width - 1) / width)
            if weight is None:
                weight = editor.call(last, torch.full, (width,), ratio, like=last)
                weight.kwargs = {"dtype": dtype(last), "device": value(last).device}
            else:
                weight = editor.call(last, torch.mul, weight, ratio, like=weight)
        rest = (norm.bias, eps) if NORMS[norm.op].has_bias else (eps,)
        ours = getattr(functional, norm.op)
        new = editor.call(last, ours, norm.input, (width,), weight, *rest, like=last)
    else:
        arguments = (norm.weight, norm.bias, norm.eps, norm.unbiased)
        new = editor.call(last, annotated_layer_norm, norm.input, *arguments, like=last)
    editor.replace(last, new)


#: Names of ops in hand-written norms. A formula has a mean, and a root of a mean.
_MEANS = frozenset({"mean", "std", "var", "std_mean", "var_mean"})
_ROOTS = frozenset({"std", "std_mean", "sqrt", "rsqrt", "pow"})
_ARITHMETIC = frozenset({
    "add", "sub", "mul", "div", "neg", "getitem", "unsqueeze", "to", "float", "detach", *_MEANS, *_ROOTS
})  # fmt: skip
#: Maximum number of nodes that are tried as a norm's input, nearest first.
_CANDIDATES = 8
#: Differences of float64 results above this are no rounding errors.
_ROUNDING = 1e-9


def _match_norm(node: Node) -> _NormPattern | None:
    """Returns the norm over the last dimension that the node computes, found by its values, or None."""
    formula = formula_of(node, _ARITHMETIC)
    names = {op.name for each in formula if (op := read(each)) is not None}
    width = (shape(node) or (None,))[-1]
    if _MEANS.isdisjoint(names) or _ROOTS.isdisjoint(names):
        return None
    if not isinstance(width, int) or width < 2:
        return None
    epsilons = [found[0] for each in formula if (found := plus(each)) is not None]
    inputs = {n: None for each in formula for n in (each, *each.all_input_nodes) if n is not node}
    # Kernels convert bfloat16 and float16 to float32 themselves.
    rows_of = [
        x for x in inputs
        if is_same(shape(x), shape(node)) and dtype(x) == dtype(node)
        and value(x).device == value(node).device
    ][:_CANDIDATES]  # fmt: skip
    rms = None
    for x in rows_of:
        norm = _norm_of(node, x, formula, (*epsilons, 0.0))
        if norm is not None and norm.op == "layer_norm":
            return norm  # an RMS norm of the centred row also matches
        rms = rms or norm
    return rms


def _norm_of(
    node: Node, x: Node, formula: list[Node], epsilons: tuple[float, ...]
) -> _NormPattern | None:
    """Returns the norm of x, with or without weight and bias, that the node computes; else None."""
    width, lead = shape(node)[-1], (2,) * ((rank(node) or 1) - 1)  # type: ignore[index]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((*lead, width), generator=generator, dtype=torch.float64) + 0.3
    # Rows of several magnitudes, since eps has an effect on small values only.
    rows = rows.view(-1, width) * 10.0 ** -(2 * torch.arange(2 ** len(lead))[:, None] % 8)
    known, y = {x: rows.view(*lead, width)}, None
    sizes = (width,), (1,), ()
    while y is None:
        try:
            y = evaluate(node, known, formula).reshape(-1, width)
        except UnknownValueError as unknown:
            parameter = unknown.args[0]
            while (user := only_user(parameter)) in formula and shape(user) in sizes:
                parameter = user  # such as ``1 + weight``
            if len(known) > 2 or shape(parameter) not in sizes:
                return None
            size: Any = shape(parameter)
            known[parameter] = 0.5 + torch.rand(size, generator=generator).double()
        except (RuntimeError, TypeError):
            return None
    if y.shape != rows.shape:
        return None
    centred = rows - rows.mean(-1, keepdim=True)
    forms = [
        *(
            ("layer_norm", inside, unbiased)
            for inside in (True, False)
            for unbiased in (False, True)
        ),
        ("rms_norm", True, False),
    ]
    parameters = [*known][1:]
    for (op, inside, unbiased), eps in itertools.product(forms, epsilons):
        top = centred if op == "layer_norm" else rows
        square = top.square().sum(-1, keepdim=True) / (width - unbiased)
        wanted = top / ((square + eps).sqrt() if inside else square.sqrt() + eps)
        limit = _ROUNDING * wanted.abs().amax(-1)
        for weight, bias in itertools.permutations([*parameters, None, None][:2]):
            if bias is not None and not NORMS[op].has_bias:
                continue
            plain = y if bias is None else y - known[bias]
            plain = plain if weight is None else plain / known[weight]
            if bool(((plain - wanted).abs().amax(-1) <= limit).all()):
                return _NormPattern(x, inside, unbiased, eps, op, weight, bias)
    return None


def rewrite_add_norm(editor: Editor) -> None:
    """Fuses a residual sum and the norm after it; pre-norm models can still read the sum."""
    for node in list(editor.graph.nodes):
        if node.target not in _FUSED or not node.users:
            continue
        total = node.args[0]
        op = read(total)
        if not isinstance(total, Node) or op is None or op.name != "add" or mutates(total):
            continue
        terms = op["input"], op["other"]
        if not all(
            isinstance(t, Node) and (shape(t), dtype(t)) == (shape(total), dtype(total))
            for t in terms
        ):
            continue
        parameters = [n for n in node.all_input_nodes if n is not total]
        if editor.last([total, *parameters]) is not total:
            continue
        input, residual, p = _split(*terms)  # type: ignore[arg-type]
        obstacle = editor.obstacle(total, [input, residual])
        unwritten = editor.aliases.is_unwritten_between([total, *parameters], total, node)
        if obstacle is None and unwritten and editor.modes.same([total, node]):
            _rewrite_sum(editor, node, total, input, residual, p)
    for node in editor.graph.nodes:
        if node.target in _FUSED:
            editor.report_rewritten(_FUSED[node.target][0], node)


class NormCall(NamedTuple):
    """A norm over the last dimension, after `rewrite_norms`."""

    x: Node
    weight: Node | None
    bias: Node | None
    eps: float
    #: A code of `ops.layer_norm`.
    kind: int


def norm_of(node: Node | None) -> NormCall | None:
    """Returns the norm over the last dimension that the node computes, or None."""
    x = node.args[0] if node is not None and node.args else None
    if node is None or not isinstance(x, Node) or node.kwargs:
        return None
    rest: list[Any] = list(node.args[1:])
    if node.target is annotated_layer_norm:
        kind = ANNOTATED if rest.pop() else ANNOTATED_BIASED
    elif node.target in (functional.layer_norm, functional.rms_norm):
        kind, sizes = NORMS[_FUSED[node.target][0]].kind, rest.pop(0)
        if not is_same(
            sizes if isinstance(sizes, (tuple, list)) else (sizes,), (shape(x) or ())[-1:]
        ):
            return None
    else:
        return None
    if kind == RMS:
        rest.insert(1, None)  # no bias
    if len(rest) != 3 or not isinstance(rest[2], float):
        return None
    width = (shape(x) or (0,))[-1:]
    fits = all(p is None or is_same(shape(p), width) for p in rest[:2])
    return NormCall(x, rest[0], rest[1], rest[2], kind) if fits else None


def _rewrite_sum(
    editor: Editor, norm: Node, total: Node, input: Node, residual: Node, p: float
) -> None:
    _, *rest = norm.args
    op, fused = _FUSED[norm.target]
    both = editor.call(total, fused, input, residual, *rest, dropout_p=p, like=norm)
    terms = total.all_input_nodes
    norm.replace_all_uses_with(editor.item(both, 0, norm))
    total.replace_all_uses_with(editor.item(both, 1, total))
    editor.remove([norm, total, *terms])
    editor.report_rewritten(f"add_{op}", norm)


def _split(first: Node, second: Node) -> tuple[Node, Node, float]:
    """Returns (sub-layer output, residual, probability of a dropout that only this sum uses)."""
    for term, other in ((second, first), (first, second)):
        found = dropout_of(term)
        if found is not None and only_user(term) is not None and term is not other:
            return found[0], other, found[1]
    return second, first, 0.0
