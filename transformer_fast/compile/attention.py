"""Recognises hand-written attention: the ops around a softmax over keys.

Before the softmax, it matches scaling, masks and biases, back to the product of queries and keys.
After it, it matches dropout, the product with the values, and other users of the weights.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Node

from .. import functional
from . import run_time
from .aliasing import between
from .editor import Editor
from .modes import Modes
from .nodes import dtype, is_number, is_same, is_single, only_user, rank, shape
from .ops import OPS, Op, calls, constant, is_copy, is_view, mutates, permutation, read
from .values import formula_of, inputs_by_value

#: Fills up to this value mask a key out: exp of the difference to any usual score is 0.
_HIDING_FILL = -9000.0


class NotAttentionError(Exception):
    """Raised if a softmax is not part of a supported attention; the message is the reason."""


#: Names of ops in a softmax that is written by hand.
_OF_SOFTMAX = frozenset({"exp", "sub", "div", "sum", "max", "amax", "detach", "getitem"})


def rewrite_softmax(editor: Editor) -> None:
    """Replaces a softmax that is written by hand, found by its values, with torch.softmax."""
    for node, _ in calls(editor.graph, "div"):
        formula, dimensions = formula_of(node, _OF_SOFTMAX), rank(node)
        names = {op.name for each in formula if (op := read(each)) is not None}
        if not {"exp", "sum"} <= names or dimensions not in (2, 3, 4):
            continue
        numbers = torch.linspace(-3.0, 3.0, 120, dtype=torch.float64).sin().view(2, 3, 4, 5)
        numbers = numbers[(0,) * (4 - dimensions)]
        # The first input that matches: later ones may have their maximum subtracted already.
        for x, values in [*inputs_by_value(node, formula, numbers)][::-1]:
            dims = [d for d in range(numbers.dim()) if values.allclose(numbers.softmax(d), 1e-9)]
            if dims and editor.obstacle(node, [x]) is None:
                editor.replace(node, editor.call(node, torch.softmax, x, dims[0], like=node))
                break


class Mask(NamedTuple):
    node: Node
    #: Shape that the mask broadcasts to, if it is not that of the scores.
    over: tuple[Any, ...] | None
    #: Permutation to the dimensions of the scores; empty if there is none.
    order: tuple[int, ...] = ()


@dataclass
class Scores:
    """The ops between the product of queries and keys and the softmax."""

    product: Product
    #: Shape of the product.
    shape: tuple[Any, ...] | None
    nodes: set[Node] = field(default_factory=set)
    scale: float = 1.0
    #: Further factors, not known at compile time: (node, whether it divides).
    factors: list[tuple[Node, bool]] = field(default_factory=list)
    #: Added tensors, and the number that each is multiplied by.
    added: list[tuple[Mask, float]] = field(default_factory=list)
    #: Fills: (condition, whether True or False masks out, fill value).
    fills: list[tuple[Mask, bool, float]] = field(default_factory=list)
    #: Shape of a view in which the masks are applied, if it is not the product's.
    viewed_as: tuple[Any, ...] | None = None

    def inputs(self) -> list[Node]:
        """Returns the nodes of masks, biases and factors."""
        masks = [mask for mask, _ in self.added] + [mask for mask, *_ in self.fills]
        return [mask.node for mask in masks] + [node for node, _ in self.factors]

    def mask(self, node: Node, order: tuple[int, ...]) -> Mask:
        return Mask(node, self.viewed_as, order)


def peel(node: Any, after: float, order: tuple[int, ...] = ()) -> Scores:
    """Matches the ops from ``node`` back to the product of queries and keys.

    ``after``: factor that multiplies the node before the softmax. ``order``: permutation of the
    node's dimensions to those of the softmax; empty if there is none.

    Raises:
        NotAttentionError: if an op is not supported here.
    """
    if not isinstance(node, Node):
        raise NotAttentionError("its input is not computed from queries and keys")
    product = _split_product(node)
    if product is not None:
        if order != tuple(range(len(order))):
            raise NotAttentionError("its scores are permuted")
        scores = Scores(product, shape(node), {node}, after * product.scale)
        if product.added is not None:
            scores.added.append((scores.mask(product.added, ()), after))
        _require_one_user(node)
        return scores
    op = read(node)
    if op is None and not is_view(node):
        raise NotAttentionError(f"its scores come from {_name(node)}")
    _require_one_user(node)
    if op is None and order:
        raise NotAttentionError("its scores are reshaped while they are permuted")
    scores = _peel_view(node, after) if op is None else _peel_op(node, op, after, order)
    scores.nodes.add(node)
    return scores


def _peel_view(node: Node, after: float) -> Scores:
    """Matches a reshape of the scores that leaves the keys in the last dimension."""
    before = node.args[0]
    now, then = shape(node), shape(before)
    if str(node.target) not in ("view", "reshape") or not now or not then or now[-1] != then[-1]:
        raise NotAttentionError(f"its scores come from {_name(node)}")
    if not all(isinstance(size, int) for size in (*now, *then)):
        raise NotAttentionError("its scores are reshaped to sizes that vary")
    scores = peel(before, after)
    scores.viewed_as = None if now == scores.shape else now
    return scores


def _require_one_user(node: Node) -> None:
    if only_user(node) is None:
        raise NotAttentionError("its scores are used elsewhere too")


def _peel_op(node: Node, op: Op, after: float, order: tuple[int, ...]) -> Scores:
    if op.name in ("float", "to", "type_as", "contiguous", "clone"):
        if dtype(node) not in (dtype(op["input"]), torch.float32):
            raise NotAttentionError(f"its scores are converted to {dtype(node)}")
        return peel(op["input"], after, order)
    if op.name in ("mul", "div"):
        return _peel_factor(node, op, after, order)
    if op.name in ("add", "sub"):
        return _peel_added(node, op, after, order)
    if op.name in ("masked_fill", "where"):
        return _peel_fill(node, op, after, order)
    dims = permutation(op, rank(node))
    if dims is not None:
        found = peel(op["input"], after, tuple(dims[i] for i in order or range(len(dims))))
        if found.viewed_as is not None:
            raise NotAttentionError("its scores are reshaped while they are permuted")
        return found
    raise NotAttentionError(f"its scores come from {_name(node)}")


def _peel_factor(node: Node, op: Op, after: float, order: tuple[int, ...]) -> Scores:
    divides = op.name == "div"
    for scores, factor in _sides(op, both=not divides):
        number = factor if is_number(factor) else _filled_with(factor)
        if number is not None:
            if number == 0:
                break
            return peel(scores, after / number if divides else after * number, order)
        can_scale_queries = is_single(factor) if order else _is_constant_over_keys(factor, node)
        if can_scale_queries and shape(scores) == shape(node):
            found = peel(scores, after, order)
            if found.added or found.fills:
                raise NotAttentionError("a tensor scales its scores after they are masked")
            if found.viewed_as is not None:
                raise NotAttentionError("a tensor scales its scores while they are reshaped")
            found.factors.append((factor, divides))
            return found
    raise NotAttentionError("its scores are multiplied by a tensor")


def _is_constant_over_keys(factor: Any, scores: Node) -> bool:
    """True if the factor is the same for all keys, so that it can multiply the queries instead."""
    if is_single(factor):
        return True
    sizes, dimensions = shape(factor), rank(scores)
    if sizes is None or dimensions is None or not 0 < len(sizes) <= dimensions:
        return False
    return isinstance(sizes[-1], int) and sizes[-1] == 1


def _peel_added(node: Node, op: Op, after: float, order: tuple[int, ...]) -> Scores:
    reason = NotAttentionError("its scores are a sum of unrecognised terms")
    for scores, added in _sides(op, both=op.name == "add"):
        if shape(scores) != shape(node) or not isinstance(added, Node):
            continue
        kind = dtype(added)
        if kind is None or not kind.is_floating_point or (rank(added) or 0) > (rank(node) or 0):
            continue
        try:
            found = peel(scores, after, order)
        except NotAttentionError as why:
            reason = why
            continue
        if any(math.isfinite(value) for *_, value in found.fills):
            raise NotAttentionError(
                "a bias is added to its scores after a finite fill: add it before, or fill with -inf"
            )
        found.added.append((found.mask(added, order), after if op.name == "add" else -after))
        return found
    raise reason


def fill_choices(op: Op) -> list[tuple[Any, Any, bool, Any]]:
    """Returns the possible readings: (filled tensor, condition, whether True fills, fill value)."""
    if op.name == "masked_fill":
        return [(op["input"], op["mask"], True, op["value"])]
    return [
        (op["input"], op["condition"], False, op["other"]),
        (op["other"], op["condition"], True, op["input"]),
    ]


def _peel_fill(node: Node, op: Op, after: float, order: tuple[int, ...]) -> Scores:
    for scores, condition, hides, filled in fill_choices(op):
        number = _filled_with(filled)
        if number is None or not isinstance(condition, Node) or shape(scores) != shape(node):
            continue
        if (rank(condition) or 0) > (rank(node) or 0):
            continue
        if not number * after <= _HIDING_FILL:
            raise NotAttentionError(
                f"its scores are filled with {number:g}, which does not mask them out"
            )
        found = peel(scores, after, order)
        if found.factors and after < 0:
            break
        others = {value for *_, value in found.fills}
        if others - {number * after}:
            raise NotAttentionError("its scores are filled with several values")
        found.fills.append((found.mask(condition, order), hides, number * after))
        return found
    raise NotAttentionError("the fill value of its scores is not known at compile time")


def _filled_with(x: Any) -> float | None:
    """Returns the number if it is known at compile time; None for tensors of several elements."""
    if isinstance(x, Node) and (not is_single(x) or any(mutates(user) for user in x.users)):
        return None
    return constant(x)


def _sides(op: Op, both: bool) -> Iterator[tuple[Any, Any]]:
    yield op["input"], op["other"]
    if both:
        yield op["other"], op["input"]


def _name(node: Node) -> str:
    if node.op == "placeholder":
        return "outside this graph"
    target = node.target
    return f"{target if isinstance(target, str) else getattr(target, '__name__', target)}"


# The products with keys and with values, written as matmul, bmm, baddbmm or einsum.


@dataclass
class Operand:
    """Queries, keys or values, and the permutation of their dimensions to (..., length, size)."""

    node: Node
    order: tuple[int, ...]

    def put(self, editor: Editor, before: Node) -> Node:
        """Returns the node, permuted if needed by a call inserted before ``before``."""
        if self.order == tuple(range(len(self.order))):
            return self.node
        op = read(self.node)
        there = None if op is None else permutation(op, len(self.order))
        undone = there is not None and [there[d] for d in self.order] == sorted(there)
        if op is not None and undone and editor.modes.same([self.node, before]):
            inner: Node = op["input"]
            return inner
        return editor.call(before, torch.permute, self.node, self.order, like=self.node)


@dataclass
class Product:
    """The product ``scale * queries keys^T + added``."""

    queries: Operand
    keys: Operand
    scale: float = 1.0
    added: Node | None = None


def _split_product(node: Node) -> Product | None:
    """Returns the queries and keys of a product that may be scores, or None."""
    op = read(node)
    if op is None:
        return None
    beta, scale, added = 0, 1.0, None
    if op.name == "baddbmm":
        beta, scale, added = op.args.get("beta", 1), op.args.get("alpha", 1), op["input"]
        op = Op("matmul", {"input": op["batch1"], "other": op["batch2"]})
    letters = _letters(op)
    if letters is None or not is_number(scale) or beta not in (0, 1):
        return None
    one, two, result = letters
    first, second = op["input"], op["other"]
    if len(result) < 2:
        return None
    *batch, q, k = list(result)
    if k in one and k not in two:  # the keys are the first operand
        one, two, first, second = two, one, second, first
    summed = [letter for letter in one if letter in two and letter not in result]
    if len(summed) != 1 or set(one) != {*batch, q, *summed} or set(two) != {*batch, k, *summed}:
        return None
    return Product(
        Operand(first, _order(one, [*batch, q, *summed])),
        Operand(second, _order(two, [*batch, k, *summed])),
        float(scale),
        added if beta else None,
    )


def _expands_to(one: tuple[Any, ...] | None, over: tuple[Any, ...] | None) -> bool:
    """True if keys or values broadcast to the batches and heads of the queries."""
    if one is None or over is None or not 2 <= len(one) == len(over):
        return False
    pairs = zip(one[:-2], over[:-2], strict=True)
    return all(a == b or (isinstance(a, int) and a == 1) for a, b in pairs)


def _letters(op: Op) -> tuple[str, str, str] | None:
    """Returns the subscripts of a product, as of an einsum: (first, second, result).

    None for other ops, and if a letter repeats. In a matmul, the second operand may broadcast.
    """
    if op.name == "matmul":
        sizes = shape(op["input"]), shape(op["other"])
        batch = string.ascii_uppercase[: len(sizes[0] or ()) - 2]
        return (f"{batch}ij", f"{batch}jk", f"{batch}ik") if _expands_to(*sizes[::-1]) else None
    if op.name != "einsum":
        return None
    inputs, result = op["equation"].split("->")
    one, two = inputs.split(",")
    return (one, two, result) if all(len(set(x)) == len(x) for x in (one, two, result)) else None


def _order(have: Sequence[str], want: Sequence[str]) -> tuple[int, ...]:
    return tuple(have.index(letter) for letter in want)


def _weighted_sum(node: Node, weights: Node) -> tuple[Operand, tuple[int, ...]] | None:
    """Returns (values, order of the result's dimensions) of ``weights @ values``, or None."""
    op = read(node)
    if op is None or op["input"] is op["other"]:
        return None
    values = op["other"] if op["input"] is weights else op["input"]
    if not isinstance(values, Node):
        return None
    letters = _letters(op)
    if letters is None:
        return None
    one, two, result = letters
    if op["other"] is weights:
        one, two = two, one
    *batch, q, k = list(one)
    size = [letter for letter in two if letter not in one]
    if k in result or len(size) != 1 or set(two) != {*batch, k, *size}:
        return None
    ours = [*batch, q, *size]
    if set(result) != set(ours):
        return None
    return Operand(values, _order(two, [*batch, k, *size])), _order(ours, result)


def _remove_input_scaling(editor: Editor, product: Product, last: Node) -> float:
    """Removes scaling of queries and keys by numbers, as in ``q / sqrt(d)``; returns the factor.

    ``last``: the call that will read the product's inputs.
    """
    scale = 1.0
    for side in (product.queries, product.keys):
        while (found := _scaling(side.node)) is not None:
            node, inner, factor = found
            if editor.obstacle(side.node, [inner], last) is not None:
                break
            scale *= factor
            if node is side.node:
                side.node = inner
            else:
                editor.replace(node, inner)
    return scale


def _scaling(node: Node) -> tuple[Node, Node, float] | None:
    """Returns the nearest scaling before ``node``: (scaling node, its input, factor), or None.

    Only views with a single user may be between them.
    """
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


# The rewrite.


def rewrite_attention(editor: Editor) -> None:
    """Replaces every recognised attention of the graph; reports each softmax that is left."""
    for node, op in calls(editor.graph, "softmax"):
        try:
            _rewrite(editor, node, op)
        except NotAttentionError as reason:
            editor.report_left("softmax", node, str(reason))


def _rewrite(editor: Editor, softmax: Node, op: Op) -> None:
    if op["dtype"] not in (None, dtype(softmax), torch.float32):
        raise NotAttentionError(f"it is computed in {op['dtype']}")
    if op["dim"] not in (-1, (rank(softmax) or 0) - 1):
        raise NotAttentionError("it is not over the last dimension")
    if rank(softmax) not in (2, 3, 4):
        raise NotAttentionError("its scores have neither 2, 3 nor 4 dimensions")
    scores = peel(op["input"], 1.0)
    if scores.viewed_as is not None:
        raise NotAttentionError("its scores are reshaped before it")
    nodes = scores.nodes | {softmax}
    weights, dropout_p, dropped = _match_after_softmax(softmax, nodes, scores)
    sums = ((u, *found) for u in weights.users if (found := _weighted_sum(u, weights)) is not None)
    product, values, result_order = next(sums, (None, None, ()))
    if product is None or values is None:
        raise NotAttentionError("its result is not multiplied with values")
    nodes |= {product}
    operands = [scores.product.queries, scores.product.keys, values]
    inputs = [each.node for each in operands]
    if (reason := editor.obstacle(product, [*inputs, *scores.inputs()])) is not None:
        raise NotAttentionError(reason)
    _check_tensors(inputs, editor.modes.at(product))

    # As early as possible, since other nodes may use the weights before the product with the
    # values.
    point = softmax if editor.last([softmax, values.node]) is softmax else product
    later_users = [u for u in weights.users if u is not product]
    users_before_dropout = [u for u in softmax.users if u not in nodes] if dropped else []
    if point is product and (later_users or users_before_dropout):
        raise NotAttentionError("its weights are used before its values are computed")
    scale = scores.scale * _remove_input_scaling(editor, scores.product, product)
    query, key, value = (each.put(editor, point) for each in operands)
    for factor, divides in scores.factors:
        function = torch.div if divides else torch.mul
        query = editor.call(point, function, query, factor, like=query)
    hidden, added = _masks(editor, scores, softmax, point)
    permuted = result_order != tuple(sorted(result_order))
    contiguous = not _is_copied(product, permuted)

    def attention_call(p: float, need_weights: bool) -> Node:
        arguments = (query, key, value, hidden, added, scale, p, need_weights, contiguous)
        return editor.call(point, run_time.attention, *arguments, like=product)

    both = attention_call(dropout_p, bool(later_users))
    output = editor.item(both, 0, product)
    if permuted:
        output = editor.call(output.next, torch.permute, output, result_order, like=product)
    product.replace_all_uses_with(output)
    if later_users:
        user_weights = _weights_for_users(editor, both, weights, product)
        for user in later_users:
            user.replace_input_with(weights, user_weights)
    if users_before_dropout:
        # The weights before dropout are used as well: a second attention without dropout computes
        # them.
        user_weights = _weights_for_users(editor, attention_call(0.0, True), softmax, product)
        for user in users_before_dropout:
            user.replace_input_with(softmax, user_weights)
    editor.remove(nodes)
    editor.report_rewritten("attention", product)


class Masks(NamedTuple):
    """The mask arguments of a rewritten attention: those of `run_time.attention`, and ``is_causal``."""

    hidden: Node | None
    added: Node | None
    is_causal: bool


NO_MASKS = Masks(None, None, False)


def heads_and_masks(
    node: Any, or_grouped: bool = False
) -> tuple[list[Node], Masks, float, float] | None:
    """Returns queries, keys and values (B, H, T, D) of a plain attention with a softmax, or None.

    The numbers are the factor of the scores, relative to 1 / sqrt(D), and the probability of dropout.
    or_grouped: keys and values may have fewer heads than queries.
    """
    op = read(node)
    call = op["input"] if op is not None and op.name == "getitem" and op["index"] == 0 else node
    if not isinstance(call, Node):
        return None
    if call.target is run_time.attention and call is not node:
        *heads, hidden, added, scale, dropout_p, _, _ = call.args
        masks, plain = Masks(hidden, added, False), True  # type: ignore[arg-type]
    elif call.target is functional.scaled_dot_product_attention:
        names = OPS["attention"][0].split()
        given = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        if not given.keys() <= {*names}:
            return None
        heads, scale = [given[name] for name in names[:3]], given.get("scale")  # type: ignore[assignment]
        dropout_p = given.get("dropout_p", 0.0)
        plain = or_grouped or not given.get("enable_gqa", False)
        is_causal = given.get("is_causal", False)
        plain = plain and isinstance(is_causal, bool)
        masks = Masks(None, given.get("attn_mask"), is_causal)  # type: ignore[arg-type]
    else:
        return None
    sizes = [shape(one) for one in heads]
    if not plain or not is_number(dropout_p) or any(s is None or len(s) != 4 for s in sizes):
        return None
    query, key, values = sizes
    size = query[3]  # type: ignore[index]
    if not isinstance(size, int) or not is_same(key, values) or not is_same(key[:1], query[:1]):  # type: ignore[index]
        return None
    if not (or_grouped or is_same(key[1:2], query[1:2])):  # type: ignore[index]
        return None
    if scale is not None and not isinstance(scale, float):
        return None
    factor = 1.0 if scale is None else scale * size**0.5
    return heads, masks, factor, float(dropout_p)  # type: ignore[return-value,arg-type]


def share_heads(editor: Editor) -> None:
    """Passes keys and values to attention with ``enable_gqa`` instead of repeating their heads."""
    for node, op in calls(editor.graph, "attention"):
        query, mask = op["query"], op["attn_mask"]
        key, value = (_before_repeat(op[name]) for name in ("key", "value"))
        if key is None or value is None or op["enable_gqa"] or rank(query) != 4:
            continue
        heads, repeated = shape(query)[1], shape(op["key"])[1]  # type: ignore[index]
        if not isinstance(heads, int) or heads != repeated or shape(key)[1] != shape(value)[1]:  # type: ignore[index]
            continue
        given = {**op.args, "key": key, "value": value, "enable_gqa": True}
        if (
            editor.obstacle(node, [query, key, value, mask]) is None
            and editor.refusal(node, functional.scaled_dot_product_attention, **given) is None
        ):
            call = editor.call(node, F.scaled_dot_product_attention, like=node, **given)
            editor.replace(node, call, *between({key, value, query, mask}, node))


def _before_repeat(node: Any) -> Node | None:
    """Returns x (B, H, S, D) if the node repeats each of its heads: (B, H * n, S, D); else None.

    That is ``x[:, :, None].expand(B, H, n, S, D).reshape(B, H * n, S, D)``.
    """
    expanded = _input_of(node, "reshape")
    op = read(_input_of(expanded, "expand"))
    x = None if op is None else op["input"]
    if op is None or rank(x) != 4 or rank(expanded) != 5 or rank(node) != 4:
        return None
    every = slice(None)
    if (op.name, op["dim"]) != ("unsqueeze", 2) and (op.name, op["index"]) not in (
        ("getitem", (every, every, None)),
        ("getitem", (every, every, None, every, every)),
    ):
        return None
    b, h, s, d = shape(x)  # type: ignore[misc]
    n = shape(expanded)[2]  # type: ignore[index]
    if not isinstance(h, int) or not isinstance(n, int):
        return None
    # As text, since comparing symbolic sizes would add guards.
    same = str(shape(expanded)) == str((b, h, n, s, d)) and str(shape(node)) == str(
        (b, h * n, s, d)
    )
    return x if same else None


def _input_of(node: Any, method: str) -> Any:
    """Returns the tensor whose method the node calls; None for other nodes."""
    return node.args[0] if isinstance(node, Node) and node.target == method else None


def _is_copied(output: Node, permuted: bool) -> bool:
    """True if all users permute the attention's output and copy it, to merge the heads.

    The output's memory may then be in any order. ``permuted``: the output itself is already
    permuted, relative to (B, H, T, Dv).
    """
    for user in output.users:
        op = read(user)
        if op is not None and op.name in ("transpose", "permute"):
            if not all(is_copy(one) for one in user.users):
                return False
        elif not (permuted and is_copy(user)):
            return False
    return True


def _weights_for_users(editor: Editor, both: Node, weights: Node, output: Node) -> Node:
    """Returns the weights in the dtype of the user's program."""
    node = editor.item(both, 1, weights)
    if dtype(weights) != dtype(output):
        node = editor.method(node.next, "to", node, dtype(weights))
    return node


def _match_after_softmax(
    softmax: Node, nodes: set[Node], scores: Scores
) -> tuple[Node, float, bool]:
    """Returns (node multiplied with the values, dropout probability, whether there is dropout)."""
    weights, dropout_p, dropped = softmax, 0.0, False
    while True:
        step = [
            (u, op) for u in weights.users if (op := read(u)) is not None and op.name in _WEIGHT_OPS
        ]
        if not step:
            return weights, dropout_p, dropped
        if len(step) > 1 or (weights is not softmax and len(weights.users) > 1):
            raise NotAttentionError("its weights are also used elsewhere")
        user, op = step[0]
        if op.name == "dropout":
            p, training = op.args.get("p", 0.5), op.args.get("training", True)
            if not is_number(p) or not isinstance(training, bool) or dropped:
                raise NotAttentionError("its dropout probability is not known at compile time")
            dropout_p, dropped = float(p), True
        elif len(weights.users) > 1:
            raise NotAttentionError("its weights are also used elsewhere")
        elif op.name in ("masked_fill", "where"):
            _match_masked_weights(op, weights, scores)
        nodes.add(user)
        weights = user


#: Ops allowed between the softmax and the values. nan_to_num is one, since fully masked rows
#: contain no NaN here.
_WEIGHT_OPS = frozenset(
    {"dropout", "to", "float", "type_as", "contiguous", "clone", "masked_fill", "where",
     "nan_to_num"}
)  # fmt: skip


def _match_masked_weights(op: Op, weights: Node, scores: Scores) -> None:
    """Matches weights set to 0 where the scores were filled, which makes fully masked rows 0."""
    for filled, condition, hides, with_what in fill_choices(op):
        if filled is not weights or not is_number(with_what) or with_what != 0:
            continue
        if len(scores.fills) == 1:
            mask, hid, _ = scores.fills[0]
            if mask == Mask(condition, None) and hid == hides:
                scores.fills[0] = (mask, hid, -math.inf)
                return
    raise NotAttentionError("its weights are masked where its scores are not")


def _check_tensors(operands: list[Node], modes: Modes) -> None:
    kinds = {dtype(n) for n in operands}
    if len(kinds) > 1 and not modes.has_autocast:
        raise NotAttentionError("queries, keys and values have several dtypes")
    if any(kind is None or not kind.is_floating_point for kind in kinds):
        raise NotAttentionError("queries, keys and values are not floating-point tensors")
    if len({rank(n) for n in operands}) > 1:
        raise NotAttentionError("queries, keys and values have different numbers of dimensions")


def _masks(
    editor: Editor, scores: Scores, softmax: Node, before: Node
) -> tuple[Node | None, Node | None]:
    """Inserts the preparation of the masks; returns (mask of the fills, additive mask)."""
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
    """Inserts the disjunction of all fills' conditions: True where any of them masks out."""
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
