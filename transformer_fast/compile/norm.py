"""Recognises norms: PyTorch's, the usual hand-written definitions, and ``norm(x + dropout(y))``."""

from __future__ import annotations

import inspect
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
from .ops import Op, calls, mutates, plus, read

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
    for node, op in calls(editor.graph, *NORMS, "div", "mul"):
        if op.name in NORMS:
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
        elif (norm := _match_norm(op)) is not None:
            _replace(editor, node, norm)


def _replace(editor: Editor, core: Node, norm: _NormPattern) -> None:
    core = _skip_casts(core, norm)
    width = shape(norm.input)[-1]  # type: ignore[index]
    if not isinstance(width, int) or width < 2 or dtype(norm.input) != dtype(core):
        return
    last = _with_affine(core, norm, width)
    for name in ("weight", "bias"):
        parameter = getattr(norm, name)
        if parameter is not None and shape(parameter) != (width,):  # one value for all features
            setattr(norm, name, editor.method(last, "expand", parameter, width))
    reason = editor.obstacle(last, [norm.input, norm.weight, norm.bias])
    if reason is not None:
        editor.report_left(norm.op, last, reason)
        return
    if norm.inside:
        weight: Any = norm.weight
        eps = norm.eps
        if norm.unbiased:
            # sqrt(v n / (n - 1) + eps) = sqrt(n / (n - 1)) sqrt(v + eps (n - 1) / n)
            eps *= (width - 1) / width
            ratio = math.sqrt((width - 1) / width)
            if weight is None:
                weight = editor.call(last, torch.full, (width,), ratio, like=last)
                weight.kwargs = {"dtype": dtype(core), "device": core.meta["example_value"].device}
            else:
                weight = editor.call(last, torch.mul, weight, ratio, like=weight)
        rest = (norm.bias, eps) if NORMS[norm.op].has_bias else (eps,)
        ours = getattr(functional, norm.op)
        new = editor.call(last, ours, norm.input, (width,), weight, *rest, like=last)
    else:
        arguments = (norm.weight, norm.bias, norm.eps, norm.unbiased)
        new = editor.call(last, annotated_layer_norm, norm.input, *arguments, like=last)
    editor.replace(last, new)


def _skip_casts(core: Node, norm: _NormPattern) -> Node:
    """Removes a cast to float32 before the norm; returns the node with the original dtype after it.

    Kernels convert bfloat16 and float16 to float32 themselves.
    """
    inner = _before_cast(norm.input)
    back = core if dtype(inner) == dtype(core) else only_user(core)
    if back is None or dtype(back) != dtype(inner) or shape(back) != shape(inner):
        return core
    op = read(back)
    if back is not core and (op is None or op.name not in ("to", "type_as")):
        return core
    if value(back).device != value(inner).device:
        return core
    norm.input = inner
    return back


def _before_cast(node: Any) -> Any:
    """Returns the input of a cast to float32 or to the same dtype; else the node itself."""
    op = read(node)
    if op is None or op.name not in ("to", "float"):
        return node
    wide, narrow = dtype(node), dtype(op["input"])
    lowp = (torch.bfloat16, torch.float16)
    widens = wide == narrow or (wide == torch.float32 and narrow in lowp)
    return op["input"] if widens else node


def _with_affine(core: Node, norm: _NormPattern, width: int) -> Node:
    """Sets weight and bias of the norm; returns the node after them."""
    last = core
    while True:
        user = only_user(last)
        op = read(user)
        if user is None or op is None or shape(user) != shape(core) or dtype(user) != dtype(core):
            return last
        other = op["other"] if op["input"] is last else op["input"]
        sizes = (width,), (1,), ()
        if other is last or not isinstance(other, Node) or shape(other) not in sizes:
            return last
        if op.name == "mul" and norm.weight is None and norm.bias is None:
            norm.weight = other
        elif op.name == "add" and norm.bias is None and NORMS[norm.op].has_bias:
            norm.bias = other
        else:
            return last
        last = user


def _match_norm(op: Op) -> _NormPattern | None:
    """Returns the norm with the division ``op`` (or multiplication by a reciprocal), or None."""
    one, other = op["input"], op["other"]
    if op.name == "div":
        if (sum := plus(other)) is not None and (deviation := _deviation(sum[1])) is not None:
            return _centred(one, *deviation, False, sum[0])
        sides = [(one, _under(other, "sqrt", 0.5))]
    else:
        sides = [(one, _under(other, "rsqrt", -0.5)), (other, _under(one, "rsqrt", -0.5))]
    for top, square in sides:
        eps, of = plus(square) or (0.0, None)
        if (norm := _rms(top, of, eps)) is not None:
            return norm
        if (variance := _variance(of)) is not None:
            return _centred(top, *variance, True, eps)
    return None


def _under(node: Any, name: str, exponent: float) -> Any:
    """Returns x if the node computes ``root(x)`` or ``x ** exponent``, else None."""
    op = read(node)
    if op is None or not (op.name == name or op["exponent"] == exponent):
        return None
    return op["input"]


def _rms(top: Any, square: Any, eps: float) -> _NormPattern | None:
    """Returns the RMS norm ``top / sqrt(square + eps)``, ``square`` being ``mean(top^2)``, or None."""
    mean = read(square)
    if mean is None or mean.name != "mean" or not _is_last(mean):
        return None
    row = _squared(mean["input"])
    if row is None or not isinstance(top, Node):
        return None
    if (row is not top and _before_cast(row) is not top) or _minus_mean(top) is not None:
        return None  # a centred row makes it a layer norm
    return _NormPattern(top, True, False, eps, "rms_norm")


def _spread(node: Any, name: str) -> tuple[Node, bool] | None:
    """Returns (x, unbiased) of ``std(x)`` or ``var(x)`` over the last dimension, or None."""
    op = _statistic(node)
    if op is None or op.name != name or (unbiased := _over_last(op)) is None:
        return None
    return op["input"], unbiased


def _deviation(node: Any) -> tuple[Node, bool] | None:
    """Returns (x, unbiased) of the standard deviation of x, or None."""
    return _spread(node, "std") or _variance(_under(node, "sqrt", 0.5))


def _variance(node: Any) -> tuple[Node, bool] | None:
    """Returns x and whether it is unbiased if the node is the variance of x, else None."""
    found = _spread(node, "var")
    op = _statistic(node)
    if found is not None or op is None:
        return found
    if op.name == "pow" and op["exponent"] == 2:
        return _spread(op["input"], "std")
    if op.name == "mean" and _is_last(op):
        input = _minus_mean(_squared(op["input"]))
        return None if input is None else (input, False)
    return None


def _squared(node: Any) -> Any:
    """Returns x if the node computes ``x * x`` or ``x ** 2``, else None."""
    op = read(node)
    if op is None:
        return None
    doubled = op.name == "mul" and op["input"] is op["other"]
    return op["input"] if doubled or op["exponent"] == 2 else None


def _statistic(node: Any) -> Op | None:
    """Returns the node's op, where equivalent forms of a mean, std or var become one op with
    ``keepdim``.

    These forms are an element of ``std_mean`` or ``var_mean``, and a reduction followed by an
    unsqueeze.
    """
    op = read(node)
    if op is None:
        return None
    if op.name == "getitem" and op["index"] in (0, 1):
        pair = read(op["input"])
        if pair is None or pair.name not in ("std_mean", "var_mean"):
            return None
        return Op(pair.name[:3] if op["index"] == 0 else "mean", pair.args)
    back = op.name == "unsqueeze" and op["dim"] in (-1, rank(op["input"]))
    index = op["index"] if op.name == "getitem" else None
    back |= isinstance(index, tuple) and index == (..., None)
    if back:
        inner = read(op["input"])
        if inner is None or inner["keepdim"] not in (None, False):
            return None
        return Op(inner.name, {**inner.args, "keepdim": True})
    return op


def _is_last(op: Op) -> bool:
    dim = op["dim"]
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int) or op["keepdim"] is not True or op["dtype"] is not None:
        return False
    sizes = shape(op["input"])
    return sizes is not None and dim in (-1, len(sizes) - 1)


def _over_last(op: Op) -> bool | None:
    """True if a std or var over the last dimension is unbiased, False if biased; else None."""
    if not _is_last(op):
        return None
    if op["correction"] is not None:
        return {0: False, 1: True}.get(op["correction"])
    unbiased = op.args.get("unbiased", True)
    return unbiased if isinstance(unbiased, bool) else None


def _minus_mean(node: Any) -> Node | None:
    """Returns x if the node computes ``x - mean(x)``, else None."""
    op = read(node)
    if op is None or op.name != "sub" or not isinstance(op["input"], Node):
        return None
    mean = _statistic(op["other"])
    if mean is None or mean.name != "mean" or not _is_last(mean):
        return None
    return op["input"] if mean["input"] is op["input"] else None


def _centred(top: Any, of: Node, unbiased: bool, inside: bool, eps: float) -> _NormPattern | None:
    """Returns the norm with the numerator ``top``: ``x - mean(x)``, or that times the weight."""
    if not isinstance(top, Node):
        return None
    input = _minus_mean(top)
    if input is of:
        return _NormPattern(of, inside, unbiased, eps)
    op = read(top)
    if op is None or op.name != "mul" or only_user(top) is None:
        return None
    sizes = shape(of)
    for weight, centred in ((op["input"], op["other"]), (op["other"], op["input"])):
        if sizes is None or shape(weight) not in (sizes[-1:], (1,), ()):
            continue
        if isinstance(weight, Node) and _minus_mean(centred) is of:
            return _NormPattern(of, inside, unbiased, eps, weight=weight)
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
        if not all(isinstance(t, Node) and _same_shape_and_dtype(t, total) for t in terms):
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


def _same_shape_and_dtype(term: Node, total: Node) -> bool:
    return shape(term) == shape(total) and dtype(term) == dtype(total)


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
