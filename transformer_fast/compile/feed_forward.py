"""Recognises linear maps and feed-forward networks.

They consist of products or convolutions, and of activations, PyTorch's or hand-written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.fx import Node

from .. import _native, functional
from .._context import is_functorch_wrapped
from ..dispatch import select
from ..functional._checked_call import checked_call
from ..nn.int8 import FLOATS as INT8_DTYPES
from ..ops.feed_forward import PACKED as FEED_FORWARD
from ..ops.linear import CODES
from ..ops.linear import PACKED as LINEAR
from ..ops.operator import Operator
from ..reference.linear import ACTIVATIONS
from . import run_time
from .aliasing import is_fresh
from .editor import Editor
from .nodes import dtype, is_number, is_same, only_user, rank, shape, value
from .ops import Op, calls, is_view, permutation, read, viewed
from .values import formula_of, inputs_by_value

#: Names of ops in hand-written activations. A formula has at least one of the latter.
_GATES = frozenset({"erf", "tanh", "sigmoid"})
_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "neg", "pow", "sqrt", *_GATES})
#: Activations that are recognised in hand-written form.
_BY_HAND = {name: ACTIVATIONS[name] for name in ("gelu", "gelu_tanh", "silu")}
#: Tolerance of the comparison: relative for numbers below 1, absolute above, and exact at 0.
#: Hand-written constants have five digits or more. (The two GELUs differ by 5e-4.)
_ROUNDING = 3e-5
#: Inputs at which activations are compared.
_NUMBERS = (0.0, 0.01, -0.01, *(i / 3 for i in (1, -1, 2, -2, 4, -4, 7, -7, 11, -11)))


def rewrite_activations(editor: Editor) -> None:
    """Replaces hand-written activations with PyTorch's, which `rewrite_feed_forward` recognises."""
    for node, _ in calls(editor.graph, "mul", "div"):
        name, x = _by_hand(node) or ("", node)
        if not name or editor.obstacle(node, [x]) is not None:
            continue
        if name == "silu":
            new = editor.call(node, F.silu, x, like=node)
        else:
            approximate = "tanh" if name == "gelu_tanh" else "none"
            new = editor.call(node, F.gelu, x, approximate=approximate, like=node)
        editor.replace(node, new)


def _by_hand(node: Node) -> tuple[str, Node] | None:
    """Returns (name, input) of the activation of ``node``, found by its values; or None."""
    formula = formula_of(node, _ARITHMETIC)
    if _GATES.isdisjoint(op.name for each in formula if (op := read(each)) is not None):
        return None
    numbers = torch.tensor(_NUMBERS, dtype=torch.float64)
    for x, values in inputs_by_value(node, formula, numbers):
        for name, activation in _BY_HAND.items():
            errors = (values - activation(numbers)).abs()
            if bool((errors <= _ROUNDING * numbers.abs().clamp(max=1.0)).all()):
                return name, x
    return None


def activation_of(node: object) -> tuple[str, Node] | None:
    """Returns (the kernels' name of an activation, its input), or None."""
    op = read(node)
    if op is None or not isinstance(op["input"], Node):
        return None
    if op.name in ("relu", "silu"):
        return op.name, op["input"]
    if op.name == "gelu" and op.args.get("approximate", "none") in ("none", "tanh"):
        return ("gelu_tanh" if op["approximate"] == "tanh" else "gelu"), op["input"]
    return None


def canonicalize_linear(editor: Editor) -> None:
    """Replaces products with an (in, out) parameter by `F.linear`: ``x @ W``, and Conv1D of
    transformers.

    For inference only: in training no packed copy is cached, and packing such a matrix takes
    longer.
    """
    for node, op in calls(editor.graph, "addmm", "matmul"):
        found = _product(op)
        if found is None or editor.modes.at(node).grad:
            continue
        x, weight, bias = found
        # addmm takes matrices: only views before and after it show all dimensions of x.
        whole, last = _flattened(x), only_user(node)
        if whole is None or last is None or not _unflattens(last, whole, weight):
            whole, last = x, node
        if editor.obstacle(node, [whole, weight, bias]) or not editor.modes.same([node, last]):
            continue
        transposed = editor.method(node, "t", weight)
        new = editor.call(node, F.linear, whole, transposed, bias, like=last)
        editor.replace(last, new, node, x)


def _product(op: Op) -> tuple[Node, Node, Node | None] | None:
    """Returns x, the parameter and the bias of a product with a parameter, or None."""
    if op.name == "matmul":
        x, weight, bias = op["input"], op["other"], None
    elif len(op.args) == 3:
        x, weight, bias = op["mat1"], op["mat2"], op["input"]
    else:
        return None
    is_matrix = isinstance(value(weight), torch.nn.Parameter) and rank(weight) == 2
    if not is_matrix or (rank(x) or 0) < 2 or dtype(x) != dtype(weight):
        return None
    fits = bias is None or shape(bias) == value(weight).shape[1:]
    return (x, weight, bias) if fits else None


def _flattened(x: Node) -> Node | None:
    """Returns the tensor of higher rank that ``x`` is a two-dimensional view of, or None."""
    whole = x.args[0] if _is_reshaped(x) else None
    return whole if isinstance(whole, Node) and (rank(whole) or 0) > 2 else None


def _unflattens(last: Node, whole: Node, weight: Node) -> bool:
    """True if ``last`` restores the leading dimensions of ``whole`` after the product."""
    before: Any = shape(whole)
    after: Any = shape(last)
    rows, columns = value(weight).shape
    if not _is_reshaped(last) or len(before) != len(after):
        return False
    return is_same((*before, columns), (*after[:-1], rows, after[-1]))


#: (weight, bias) of a linear map.
Map = tuple[Node, Node | None]


class LinearMap(NamedTuple):
    x: Node
    map: Map


def linear_map(node: Node) -> LinearMap | None:
    """Returns the linear map of `F.linear` that the node computes, or None."""
    op = read(node)
    if op is None or op.name != "linear":
        return None
    found = _map(op["weight"], op["bias"])
    return LinearMap(op["input"], found) if found and isinstance(op["input"], Node) else None


def _map(weight: Any, bias: Any) -> Map | None:
    """Returns a linear map whose bias, if any, has an element for each output; else None."""
    is_matrix = isinstance(weight, Node) and rank(weight) == 2
    fits = is_matrix and (bias is None or is_same(shape(bias), shape(weight)[:1]))  # type: ignore[index]
    return (weight, bias) if fits else None


def network(node: Node) -> tuple[Node, list[Map], str, float] | None:
    """Returns input, linear maps, activation and dropout_p of a rewritten network, or None."""
    if node.target is not functional.feed_forward or len(node.args) != 5:
        return None
    x, *parameters = node.args
    activation = node.kwargs.get("activation", "relu")
    maps = [_map(*parameters[:2]), _map(*parameters[2:])]
    dropout_p, plain = node.kwargs.get("dropout_p", 0.0), activation in CODES and None not in maps
    return (x, maps, activation, dropout_p) if plain else None  # type: ignore[return-value]


def gated_network(node: Node) -> tuple[Node, list[Map], str] | None:
    """Returns input, linear maps and activation of ``second(activation(gate(x)) * up(x))``, or None.

    The maps are [gate, up, second], or [gate and up stacked by rows, second].
    """
    second = linear_map(node)
    product = None if second is None else read(second.x)
    if second is None or product is None or product.name != "mul":
        return None
    for one, up in ((product["input"], product["other"]), (product["other"], product["input"])):
        found = activation_of(one)
        if found is None or found[0] not in CODES or not isinstance(up, Node):
            continue
        name, gate = found
        first, other = linear_map(gate), linear_map(up)
        if first is not None and other is not None and first.x is other.x:
            return first.x, [first.map, other.map, second.map], name
        joined = _halves(gate, up)
        if joined is not None:
            return joined.x, [joined.map, second.map], name
    return None


def _halves(first: Node, second: Node) -> LinearMap | None:
    """Returns the linear map whose output has the halves ``first`` and ``second``, or None."""
    base: Any = first
    while isinstance(base, Node) and linear_map(base) is None:
        base = base.args[0] if base.args else None
    whole, parts = value(base), [value(first), value(second)]
    if not all(isinstance(x, torch.Tensor) for x in (whole, *parts)):
        return None
    width = whole.shape[-1]
    for index, part in enumerate(parts):
        wanted = whole.narrow(-1, index * (width // 2), width // 2)
        if (
            part.untyped_storage()._cdata != whole.untyped_storage()._cdata
            or part.storage_offset() != wanted.storage_offset()
            or not is_same(part.shape, wanted.shape)
            or not is_same(part.stride(), wanted.stride())
        ):
            return None
    return linear_map(base)


def int8_weights(node: Node) -> list[Any]:
    """Returns the weights that the node reads in 8 bits."""
    return [
        node.args[place]
        for _, places, target, _ in _INT8.values()
        if target is node.target
        for place in places
        if isinstance(place, int)
    ]


def _is_reshaped(node: Node) -> bool:
    return node.op == "call_method" and node.target in ("view", "reshape")


def rewrite_feed_forward(editor: Editor) -> None:
    """Fuses ``linear2(dropout(activation(linear1(x))))`` to one call."""
    for node, op in calls(editor.graph, "linear"):
        hidden, p = _dropped(op["input"])
        found = activation_of(hidden)
        if found is None or hidden is None or only_user(hidden) is None:
            continue
        name, before = found
        first = read(before)
        if first is None or first.name != "linear" or only_user(before) is None:
            continue
        if not all(
            map(_has_full_bias, (first["bias"], op["bias"]), (first["weight"], op["weight"]))
        ):
            continue
        inputs = [first[n] for n in ("input", "weight", "bias")] + [op["weight"], op["bias"]]
        reason = editor.obstacle(node, inputs)
        reason = reason or editor.refusal(node, functional.feed_forward, *inputs, activation=name)
        if reason is not None:
            editor.report_left("feed_forward", node, reason)
            continue
        new = editor.call(
            node, functional.feed_forward, first["input"], first["weight"], first["bias"],
            op["weight"], op["bias"], activation=name, dropout_p=p, like=node,
        )  # fmt: skip
        editor.replace(node, new, op["input"], hidden, before)
        editor.report_rewritten("feed_forward", node)


def _has_full_bias(bias: object, weight: object) -> bool:
    """True if there is no bias, or one of full size; F.linear also allows one that broadcasts."""
    return bias is None or shape(bias) == (shape(weight) or ())[:1]


def _dropped(node: object) -> tuple[Node | None, float]:
    """Returns the input and the probability of a dropout whose result has one user.

    Any other op is returned with probability 0; for other dropouts, the node is None.
    """
    if not isinstance(node, Node):
        return None, 0.0
    op = read(node)
    if op is None or op.name != "dropout":
        return node, 0.0
    return (dropout_of(node) if only_user(node) is not None else None) or (None, 0.0)


def dropout_of(node: Node) -> tuple[Node, float] | None:
    """Returns (input, probability, 0 outside training) of a dropout, or None."""
    op = read(node)
    if op is None or op.name != "dropout" or not isinstance(op["input"], Node):
        return None
    p, training = op.args.get("p", 0.5), op.args.get("training", True)
    if not is_number(p) or not isinstance(training, bool):
        return None
    return op["input"], float(p) if training else 0.0


def rewrite_linear(editor: Editor) -> None:
    """Replaces the remaining linear maps, fused with the activation after them."""
    for node, op in calls(editor.graph, "linear"):
        if rank(op["input"]) is None:
            continue
        weight, activation, last = op["weight"], None, node
        if dtype(weight) != dtype(op["input"]) and not editor.modes.at(node).has_autocast:
            continue
        user = only_user(node)
        found = activation_of(user)
        reason = editor.refusal(node, functional.linear, op["input"], weight, op["bias"])
        if reason is not None:
            editor.report_left("linear", node, reason)
            continue
        if user is not None and found is not None and editor.modes.same([node, user]):
            activation, last = found[0], user
        new = editor.call(
            node, functional.linear, op["input"], weight, op["bias"], activation=activation,
            like=last,
        )  # fmt: skip
        editor.replace(last, new, node)
        editor.report_rewritten("linear", node)


#: Functions with products of weights -> their name in reports, the positions or names of the weights,
#: the same function with 8-bit products, and its further arguments.
_INT8: dict[Any, tuple[str, tuple[Any, ...], Callable[..., Any], dict[str, Any]]] = {
    functional.linear: ("int8_linear", (1,), run_time.int8_linear, {}),
    functional.feed_forward: ("int8_feed_forward", (1, 3), run_time.int8_feed_forward, {}),
    run_time.encoder_layer: (
        "int8_encoder_layer", ("ffn_weight_1",), run_time.encoder_layer, {"int8": True}
    ),
    run_time.multi_head_attention_forward: (
        "int8_attention", ("out_proj_weight",), run_time.multi_head_attention_forward, {"int8": True},
    ),
}  # fmt: skip


def quantize_products(editor: Editor) -> None:
    """Replaces linear maps and feed-forward networks with their variants for 8-bit products."""
    for node in editor.graph.nodes:
        if node.target not in _INT8:
            continue
        op, places, target, more = _INT8[node.target]
        given = {**dict(enumerate(node.args)), **node.kwargs}
        reason = _why_not_int8(editor, node, [given[place] for place in places])
        if reason is not None:
            editor.report_left(op, node, reason)
            continue
        node.target, node.kwargs = target, {**node.kwargs, **more}
        editor.report_rewritten(op, node)


#: Key in a placeholder's ``meta``: the parameter that it is a view of.
PARAMETER = "parameter"


def _why_not_int8(editor: Editor, node: Node, weights: Sequence[Any]) -> str | None:
    """Returns the reason why products with these weights do not run on 8 bits, or None."""
    if _native.why_not is not None:
        return f"there is no CPU kernel: {_native.why_not}"
    grad = editor.modes.at(node).grad
    for weight in weights:
        root = viewed(weight)
        parameter = root.meta.get(PARAMETER, value(root)) if isinstance(root, Node) else None
        if not isinstance(parameter, torch.nn.Parameter):
            return "its weight is computed, or is no parameter"
        found = value(weight)
        if found.dim() != 2 or not found.is_cpu or found.dtype not in INT8_DTYPES:
            return f"no kernel multiplies {str(found.dtype)[6:]} on {found.device} in 8 bits"
    if grad and any(getattr(value(each), "requires_grad", False) for each in node.all_input_nodes):
        return "it needs gradients"
    if node.kwargs.get("dropout_p", 0.0) != 0.0:
        return "it has dropout"
    bias = node.args[2] if node.target is functional.linear and len(node.args) > 2 else None
    return None if _has_full_bias(bias, weights[0]) else "its bias broadcasts"


#: Positions of the weights among an operator's arguments; the packed copy follows each.
PLACES = {LINEAR.name: (1,), FEED_FORWARD.name: (1, 4)}


def packed_call(node: Node) -> tuple[Operator, list[Any], int] | None:
    """Describes a linear map or a feed-forward network as a call with packed weights on the CPU.

    Returns the operator, its arguments with None in place of the packed weights, and the number of
    rows. Returns None for other calls.
    """
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
    # The check replaces a bias that broadcasts by an expanded one, which the kernel does not support.
    same = all(one is other for one, other in zip(call.tensors, given, strict=False))
    if not same or select(call).backend != "cpu":
        return None
    arguments: list[Any] = list(node.args)
    for place in PLACES[operator.name]:
        arguments.insert(place + 1, None)
    arguments += [None] * (operator is LINEAR)  # no residual
    rows = given[0].numel() // max(1, given[0].shape[-1])
    return operator, [*arguments, CODES[activation]], rows


# Convolutions of kernel size 1, and those whose stride equals the kernel size (patches).

#: Elementwise ops, which commute with a transposition.
_ELEMENTWISE = frozenset({"relu", "gelu", "silu", "dropout"})


def rewrite_convolutions(editor: Editor) -> None:
    """Replaces pairs of convolutions that form a feed-forward network with linear maps."""
    for second, _ in calls(editor.graph, "conv"):
        op = _as_linear(second)
        if op is None:
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
        if editor.obstacle(second, inputs) is None:
            _rewrite(editor, first, between[::-1], op, second)


def rewrite_patches(editor: Editor) -> None:
    """Replaces the convolutions of patch embeddings with linear maps."""
    for node, _ in calls(editor.graph, "conv"):
        op = _side_by_side(node)
        sizes = () if op is None else (*value(op["input"]).shape, *value(op["weight"]).shape)
        if op is None or rank(node) == 3 or not all(isinstance(n, int) for n in sizes):
            continue
        flat = only_user(node)
        tokens = None if flat is None else only_user(flat)
        if flat is None or tokens is None or _unswapped(tokens) is not flat:
            continue
        if not editor.modes.same([node, flat, tokens]):
            continue
        # Users that depend on the memory layout of a convolution's result keep the convolution.
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
            editor.replace(tokens, _linear(editor, node, patches, op), flat, node)


def _patches(
    editor: Editor, before: Node, x: Node, grid: Sequence[int], kernel: Sequence[int]
) -> Node:
    """Reshapes (B, C, H, W) to (B, patches, C * patch height * patch width)."""
    batch, channels, *sizes = value(x).shape
    split = [n for pair in zip(grid, kernel, strict=True) for n in pair]
    dims = range(2, 2 + len(split), 2)
    rows, depth = math.prod(grid), channels * math.prod(kernel)
    steps: list[tuple[Any, ...]] = [
        ("narrow", dim, 0, n * k)
        for dim, (size, n, k) in enumerate(zip(sizes, grid, kernel, strict=True), 2)
        if size != n * k
    ]
    steps += [
        ("reshape", (batch, channels, *split)),
        ("permute", (0, *dims, 1, *(d + 1 for d in dims))),
        # Not a view: inductor would turn it into a division of the index of each element.
        ("contiguous",),
        ("as_strided", (batch, rows, depth), (rows * depth, depth, 1)),
    ]
    for name, *args in steps:
        x = editor.method(before, name, x, *args)
    return x


def _as_linear(node: Any) -> Op | None:
    """Returns the convolution if it is a linear map of each position, else None."""
    op = _side_by_side(node)
    return op if op is not None and rank(node) == 3 and shape(op["weight"])[2] == 1 else None  # type: ignore[index]


def _side_by_side(node: Any) -> Op | None:
    """Returns the convolution of a batch if its stride equals its kernel size, else None."""
    op = read(node)
    if op is None or op.name != "conv":
        return None
    x, weight = value(op["input"]), shape(op["weight"])
    if weight is None or rank(op["input"]) != len(weight):
        return None
    # Tensors under torch.func.vmap have a hidden batch dimension.
    if is_functorch_wrapped(x):
        return None
    # "same" requires a stride of 1, and a kernel of that size needs no padding.
    unpadded = _is(op["padding"], 0) or op["padding"] in ("same", "valid")
    plain = unpadded and all(_is(op[name], 1) for name in ("dilation", "groups"))
    stride, kernel = op["stride"], list(weight[2:])
    strides = [*stride] if isinstance(stride, tuple | list) else [stride or 1] * len(kernel)
    return op if plain and strides == kernel else None


def _is(given: Any, wanted: int) -> bool:
    return given is None or set(given if isinstance(given, tuple | list) else [given]) == {wanted}


def _rewrite(editor: Editor, first: Op, between: list[Node], second: Op, last: Node) -> None:
    x = first["input"]
    unswapped = _unswapped(x) if editor.modes.same([x, last]) else None
    x = unswapped or editor.method(last, "transpose", x, 1, 2)
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
        if _unswapped(user) is last and editor.modes.same([user, last]):
            editor.replace(user, y)
    if last.users:
        # The remaining users may depend on the memory layout of a convolution's result.
        swapped = editor.method(last, "transpose", y, 1, 2)
        last.replace_all_uses_with(editor.method(last, "contiguous", swapped))
    editor.remove([last, *between])


def _linear(editor: Editor, before: Node, x: Node, conv: Op) -> Node:
    weight = editor.method(before, "flatten", conv["weight"], 1)
    y = editor.call(before, F.linear, x, weight, conv["bias"], like=before)
    example = value(x)
    y.meta["example_value"] = example.new_empty((*example.shape[:-1], value(weight).shape[0]))
    return y


def _unswapped(node: Any) -> Node | None:
    """Returns x if the node computes ``x.transpose(1, 2)``, else None."""
    op = read(node)
    if op is None or rank(node) != 3 or permutation(op, 3) != [0, 2, 1]:
        return None
    inner = op["input"]
    return inner if isinstance(inner, Node) else None
