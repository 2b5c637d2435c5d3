"""Reads the ops of a captured graph: all spellings of an op get one name.

``scores / 8``, ``torch.div(scores, 8)`` and ``scores.div_(8)`` are all read as
``Op("div", {"input": scores, "other": 8})``.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from ..ops.layer_norm import NORMS
from .nodes import is_number, rank, value


@dataclass(frozen=True)
class Op:
    """A call of an op; ``op["other"]`` is the argument ``other``, or None if it is absent."""

    name: str
    args: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.args.get(name)


#: Op name: (parameters, further functions, further methods). The functions of this name in torch
#: and torch.nn.functional, and the method of torch.Tensor, are implied.
OPS: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "matmul": ("input other", (torch.bmm, operator.matmul), "bmm __matmul__"),
    "baddbmm": ("input batch1 batch2 beta alpha", (), ""),
    "addmm": ("input mat1 mat2", (), ""),
    "add": ("input other alpha", (operator.add, operator.iadd), "add_ __add__ __radd__"),
    "sub": (
        "input other alpha", (torch.subtract, operator.sub, operator.isub), "sub_ subtract"
    ),
    "mul": ("input other", (torch.multiply, operator.mul, operator.imul), "mul_ multiply"),
    "div": (
        "input other rounding_mode",
        (torch.true_divide, torch.divide, operator.truediv, operator.itruediv),
        "div_ divide true_divide",
    ),
    "neg": ("input", (operator.neg,), ""),
    "softmax": ("input dim dtype", (torch.special.softmax,), ""),
    "masked_fill": ("input mask value", (), "masked_fill_"),
    "dropout": ("input p training inplace", (), ""),
    "linear": ("input weight bias", (), ""),
    "conv": (
        "input weight bias stride padding dilation groups",
        (torch.conv1d, torch.conv2d, torch.conv3d), "",
    ),
    "relu": ("input inplace", (F.relu_, torch.relu_), "relu_"),
    "clamp": ("input min max", (torch.clip,), "clamp_ clip"),
    "clamp_min": ("input min", (), ""),
    "gelu": ("input approximate", (), ""),
    "silu": ("input inplace", (), ""),
    "transpose": (
        "input dim0 dim1", (torch.swapaxes, torch.swapdims), "swapaxes swapdims"
    ),
    **dict.fromkeys(("mean", "sum"), ("input dim keepdim dtype", (), "")),
    **dict.fromkeys(
        ("std", "var", "std_mean", "var_mean"), ("input dim unbiased keepdim correction", (), "")
    ),
    **dict.fromkeys(("max", "amax"), ("input dim keepdim", (), "")),
    **dict.fromkeys(
        ("sigmoid", "tanh", "exp", "detach", "sqrt", "rsqrt", "square", "bool", "contiguous",
         "clone", "float", "ones_like", "zeros_like"),
        ("input", (), ""),
    ),
    "erf": ("input", (torch.special.erf,), ""),
    "pow": ("input exponent", (operator.pow,), "__pow__"),
    "eq": ("input other", (operator.eq,), "__eq__"),
    "ne": ("input other", (operator.ne,), "__ne__"),
    "not": (
        "input", (torch.logical_not, torch.bitwise_not, operator.invert), "logical_not"
    ),
    "unsqueeze": ("input dim", (), ""),
    "type_as": ("input other", (), ""),
    "to": ("input dtype", (), "type"),
    "tensor": ("value dtype device", (), ""),
    "full": ("size value", (), ""),
    "full_like": ("input value", (), ""),
    "nan_to_num": ("input nan posinf neginf", (), ""),
    **{
        name: (" ".join(inspect.signature(theirs).parameters), (), "")
        for name, (_, theirs, *_) in NORMS.items()
    },
    "attention": (
        "query key value attn_mask dropout_p is_causal scale enable_gqa",
        (F.scaled_dot_product_attention,), "",
    ),
    "setitem": ("input index value", (operator.setitem,), ""),
    "getitem": ("input index", (operator.getitem,), ""),
}  # fmt: skip
_FUNCTIONS: dict[Any, tuple[str, tuple[str, ...]]] = {}
_METHODS: dict[str, tuple[str, tuple[str, ...]]] = {}
for _name, (_parameters, _functions, _methods) in OPS.items():
    _entry = _name, tuple(_parameters.split())
    _same = (getattr(module, _name, None) for module in (torch, F))
    _FUNCTIONS.update({f: _entry for f in (*_same, *_functions) if callable(f)})
    _METHODS.update({m: _entry for m in (_name, *_methods.split()) if hasattr(torch.Tensor, m)})
#: Variants with a different parameter order.
_FUNCTIONS[F.softmax] = ("softmax", ("input", "dim", "_stacklevel", "dtype"))
_FUNCTIONS[torch.where] = ("where", ("condition", "input", "other"))
_METHODS["where"] = ("where", ("input", "condition", "other"))
_ALIASES = {"self": "input", "axis": "dim", "tensor": "input", "fill_value": "value"}

#: Methods that return the same elements with other sizes or another order of dimensions.
_VIEWS = frozenset(
    {"view", "reshape", "t", "transpose", "permute", "swapaxes", "swapdims", "unflatten", "flatten",
     "contiguous", "unsqueeze", "squeeze"}
)  # fmt: skip


def read(node: Any) -> Op | None:
    """Returns the op of a call node; None for other objects and for unrecognised calls."""
    if not isinstance(node, Node):
        return None
    if node.op == "call_function":
        special = _SPECIAL.get(node.target)
        if special is not None:
            return special(node)
        entry = _FUNCTIONS.get(node.target)
    elif node.op == "call_method":
        if node.target == "permute":
            return _read_permute(node)
        entry = _METHODS.get(str(node.target))
    else:
        return None
    if entry is None:
        return None
    name, parameters = entry
    if len(node.args) > len(parameters):
        return None
    args = dict(zip(parameters, node.args, strict=False))
    for key, given in node.kwargs.items():
        args[_ALIASES.get(key, key)] = given
    return _checked(name, args)


def _checked(name: str, args: dict[str, Any]) -> Op | None:
    """Returns the op, or None for argument values that change its meaning."""
    if name in ("add", "sub") and args.get("alpha", 1) != 1:
        return None
    if name == "div" and args.get("rounding_mode") is not None:
        return None
    if name == "to" and not isinstance(args.get("dtype"), torch.dtype):
        return None
    if name == "clamp":
        return Op("relu", args) if args.get("min") == 0 and args.get("max") is None else None
    if name == "clamp_min":
        return Op("relu", args) if args.get("min") == 0 else None
    if name == "square":
        return Op("pow", {**args, "exponent": 2})
    return Op(name, args)


def _read_einsum(node: Node) -> Op | None:
    equation, *operands = node.args
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or node.kwargs:
        return None
    equation = equation.replace(" ", "")
    if "..." in equation:
        equation = _without_dots(equation, operands)
    if "->" not in equation or "." in equation:
        return None
    return Op("einsum", {"equation": equation, "input": operands[0], "other": operands[1]})


def _without_dots(equation: str, operands: list[Any]) -> str:
    """Replaces ``...`` by letters if all operands have equally many such dimensions."""
    inputs = equation.split("->")[0].split(",")
    if len(inputs) != len(operands) or any(x.count("...") != 1 for x in inputs):
        return equation
    ranks = [rank(n) for n in operands]
    counts = {None if r is None else r - len(x) + 3 for r, x in zip(ranks, inputs, strict=True)}
    if len(counts) != 1 or None in counts:
        return equation
    unused = [c for c in "ABCDEFGHIJ" if c not in equation]
    return equation.replace("...", "".join(unused[: counts.pop()]))


def _read_transposed(node: Node) -> Op | None:
    """Reads ``x.mT``, and ``x.T``, ``x.mH`` and ``x.H`` where they are the same."""
    x = node.args[0]
    name = node.args[1] if node.target is builtins.getattr else getattr(node.target, "__name__", "")
    if node.target is builtins.getattr and name not in _TRANSPOSED:
        return None
    if name != "mT":
        found = value(x)
        if not isinstance(found, torch.Tensor) or (name != "mH" and found.dim() != 2):
            return None
        if name in ("mH", "H", "matrix_H") and found.is_complex():
            return None
    return Op("transpose", {"input": x, "dim0": -2, "dim1": -1})


def _read_permute(node: Node) -> Op | None:
    dims = node.args[1] if len(node.args) == 2 else node.args[1:]
    return Op("permute", {"input": node.args[0], "dims": node.kwargs.get("dims", dims)})


#: Attributes of a tensor that transpose it -> the operators that Dynamo writes for them, from torch
#: 2.14 on for mT and mH, too.
_TRANSPOSED: dict[str, Any] = {
    "mT": torch.ops.aten.mT,
    "mH": torch.ops.aten.mH,
    "T": torch.ops.aten.numpy_T,
    "H": torch.ops.aten.matrix_H,
}
_SPECIAL: dict[Any, Callable[[Node], Op | None]] = {
    torch.einsum: _read_einsum,
    builtins.getattr: _read_transposed,
    torch.permute: _read_permute,
    **dict.fromkeys(_TRANSPOSED.values(), _read_transposed),
}


def calls(graph: Graph, *names: str) -> Iterator[tuple[Node, Op]]:
    """Yields the calls of these ops with a used result, from a snapshot of the graph's nodes."""
    for node in list(graph.nodes):
        op = read(node)
        if op is not None and op.name in names and node.users:
            yield node, op


def constant(x: Any) -> float | None:
    """Returns a number known at compile time, also one wrapped in a tensor; else None."""
    if is_number(x):
        return float(x)
    op = read(x)
    if op is None:
        return None
    if op.name in ("tensor", "full", "full_like"):
        return float(op["value"]) if is_number(op["value"]) else None
    if op.name in ("ones_like", "zeros_like"):
        return float(op.name == "ones_like")
    if op.name not in ("neg", "sqrt", "mul") or (one := constant(op["input"])) is None:
        return None
    if op.name == "neg":
        return -one
    if op.name == "sqrt":
        return one**0.5 if one >= 0 else None
    other = constant(op["other"])
    return None if other is None else one * other


def plus(node: object) -> tuple[float, Node] | None:
    """Returns ``(c, x)`` if the node computes ``x + c`` with a number c, else None."""
    op = read(node)
    if op is None or op.name != "add":
        return None
    for x, number in ((op["input"], op["other"]), (op["other"], op["input"])):
        if is_number(number) and isinstance(x, Node):
            return float(number), x
    return None


def permutation(op: Op, size: int | None) -> list[int] | None:
    """Returns the source of each dimension of a permutation; None for other ops."""
    if size is None:
        return None
    if op.name == "transpose":
        there = list(range(size))
        a, b = op["dim0"], op["dim1"]
        if not (isinstance(a, int) and isinstance(b, int)):
            return None
        there[a], there[b] = there[b], there[a]
        return there
    if op.name == "permute" and isinstance(op["dims"], (tuple, list)):
        return [d % size for d in op["dims"]]
    return None


def is_view(node: Node) -> bool:
    return node.op == "call_method" and str(node.target) in _VIEWS


def viewed(node: Any) -> Any:
    """Returns the node that this one is a view of, through any number of views; else itself."""
    while isinstance(node, Node) and is_view(node) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def is_copy(node: Node) -> bool:
    """True for a method call that copies a tensor whose memory is in another order."""
    return node.op == "call_method" and node.target in ("contiguous", "reshape", "flatten")


def mutates(node: Node) -> bool:
    """True if the call writes to one of its arguments."""
    return written(node) is not None


def written(node: Node) -> list[Any] | None:
    """Returns the arguments whose memory the call may change, or None if it writes to none."""
    if node.op == "call_method":
        name = str(node.target)
        writes = name in _IN_PLACE_METHODS or (name.endswith("_") and not name.endswith("__"))
        return list(node.args[:1]) if writes else None
    if node.op != "call_function":
        return None
    if any(each.op == "get_attr" and _body_writes(each) for each in node.all_input_nodes):
        return list(node.all_input_nodes)
    schemas = _schemas(node.target)
    if schemas:
        places = {
            (index, argument.name)
            for schema in schemas
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        given = [_given(node, index, name) for index, name in places]
        return [each for each in given if each is not None] or None
    first = [node.kwargs.get("out"), *node.args[:1], node.kwargs.get("input")]
    name = getattr(node.target, "__name__", "")
    if node.target in _IN_PLACE or "out" in node.kwargs:
        return first
    if name.endswith("_") and not name.endswith("__") and node.target not in _NOT_IN_PLACE:
        return first
    parameters = _positions(node.target)
    if _given(node, parameters.get("inplace"), "inplace") is True:
        return first
    # With max_norm, embeddings rescale rows of their weight in place.
    if _given(node, parameters.get("max_norm"), "max_norm") is not None and "weight" in parameters:
        return [_given(node, parameters["weight"], "weight"), *node.args[:1]]
    return None


def _given(node: Node, index: int | None, name: str) -> Any:
    """Returns an argument by its name or position; None if it is absent."""
    if index is not None and index < len(node.args):
        return node.args[index]
    return node.kwargs.get(name)


def _schemas(target: Any) -> list[Any]:
    """Returns the schemas of an operator; none for other functions."""
    target = getattr(target, "_opoverload", target)  # torch.library.custom_op wraps the operator
    if isinstance(target, torch._ops.OpOverload):
        return [target._schema]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name)._schema for name in target.overloads()]
    return []


@functools.cache
def _positions(target: Any) -> Mapping[str, int]:
    """Returns the positions of the parameters of a function by their names."""
    try:
        return {name: i for i, name in enumerate(inspect.signature(target).parameters)}
    except (TypeError, ValueError):  # a builtin function
        return {}


def _body_writes(node: Node) -> bool:
    """True if the node may be the body of a branch or a checkpoint that writes to its arguments."""
    owner = node.graph.owning_module
    if owner is None:  # the graph is a copy without its bodies
        return not isinstance(value(node), torch.Tensor)
    body = operator.attrgetter(str(node.target))(owner)
    return isinstance(body, GraphModule) and any(mutates(each) for each in body.graph.nodes)


_IN_PLACE = frozenset(
    {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem,
     operator.ipow, operator.iand, operator.ior, operator.imatmul, operator.ifloordiv,
     operator.imod, operator.ixor, operator.ilshift, operator.irshift}
)  # fmt: skip
_IN_PLACE_METHODS = frozenset({f"__{each.__name__}__" for each in _IN_PLACE})
#: Functions whose names end with "_" only because the name without it is a keyword of Python.
_NOT_IN_PLACE = frozenset({operator.and_, operator.or_, operator.not_, operator.is_})
