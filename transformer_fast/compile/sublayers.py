"""Runs consecutive sub-layers of a graph in one call, for inference, and for training if small.

A sub-layer is attention with its projections, or a feed-forward network, with the residual sum and
the norm: ``norm(x + f(x))``, or ``x + f(norm(x))``. The call runs the kernel for whole layers, or with
gradients and dropout the entry for small layers.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import _native
from .._context import is_traced
from ..nn import fused_layers
from ..nn.bound import Bound
from ..nn.int8 import quantized, unchanged
from ..recipe import Kind, Layer, Linear, Norm, NormKind, Sublayer
from . import run_time
from .aliasing import NO_MEMORY
from .attention import NO_MASKS, Masks, heads_and_masks
from .editor import Editor, number
from .feed_forward import (
    PARAMETER,
    Map,
    dropout_of,
    gated_network,
    int8_weights,
    linear_map,
    network,
)
from .nodes import dtype, is_same, only_user, rank, shape, value
from .norm import NormCall, norm_of
from .ops import calls, is_view, mutates, permutation, read, viewed
from .values import UnknownValueError, evaluate


class _Block(NamedTuple):
    """The function ``f`` that a sub-layer applies to its input."""

    kind: Kind
    input: Node
    #: Feed-forward: two maps. Attention: maps of queries, keys, values (or one of all), and output.
    maps: list[Map]
    #: Network only.
    activation: str | None = None
    #: Attention only.
    heads: int = 0
    masks: Masks = NO_MASKS
    memory: Node | None = None
    #: Cosines and sines by which queries and keys are rotated.
    rotation: tuple[Node, ...] = ()
    #: Probability of dropout of the weights of attention, or of the hidden units.
    dropout_p: float = 0.0
    #: Attention only: as in `recipe.Sublayer`.
    scale: float | None = None
    key_heads: int = 0
    head_size: int = 0


@dataclass
class SublayerNodes:
    block: _Block
    norm: NormCall
    norm_first: bool
    x: Node
    y: Node
    #: The nodes that compute y from x and `given`.
    nodes: set[Node] = field(default_factory=set)
    #: Probability of dropout of the function's result.
    dropout_p: float = 0.0

    def given(self) -> set[Node | None]:
        """Returns the memory, masks and parameters."""
        parameters = [p for pair in self.block.maps for p in pair]
        hidden, added, _ = self.block.masks
        norm = self.norm.weight, self.norm.bias
        return {self.block.memory, hidden, added, *norm, *parameters, *self.block.rotation}

    def recipe(self) -> Sublayer[Node]:
        block, norm = self.block, self.norm
        return Sublayer(
            block.kind,
            tuple(Linear(*each) for each in block.maps),
            Norm(NormKind(norm.kind), norm.weight, norm.bias, norm.eps),
            block.heads,
            scale=block.scale,
            key_heads=block.key_heads,
            head_size=block.head_size,
            is_rotated=bool(block.rotation),
        )


def rewrite_sublayers(editor: Editor, stacks: Iterable[list[SublayerNodes]] | None = None) -> None:
    """Replaces each stack of sub-layers, or each of ``stacks``, with one call of `Sublayers`."""
    for stack in find_stacks(editor) if stacks is None else stacks:
        _replace(editor, stack)


def find_stacks(editor: Editor) -> list[list[SublayerNodes]]:
    """Returns the stacks of sub-layers that one call can run and that contain attention."""
    if _native.module is None or _native.why_unproven() is not None:
        return []
    _share_sizes(editor.graph)
    stacks: list[list[SublayerNodes]] = []
    ends: dict[Node, list[SublayerNodes]] = {}
    for node, _ in calls(editor.graph, "add"):
        one = None if mutates(node) else match_sublayer(editor, node)
        if one is None:
            continue
        stack = ends.get(one.x)
        if stack is None or not _continues(editor, stack, one):
            stack = []
            stacks.append(stack)
        stack.append(one)
        ends[one.y] = stack
    return [
        stack for stack in stacks if any(one.block.kind is not Kind.FEED_FORWARD for one in stack)
    ]


def nodes_of(stacks: Iterable[list[SublayerNodes]]) -> set[Node]:
    return {node for stack in stacks for one in stack for node in one.nodes}


def _share_sizes(graph: Graph) -> None:
    """Reads equal sizes from one tensor, so that no sub-layer computes sizes for another."""
    if any(_name(node) in _RESHAPE_IN_PLACE for node in graph.nodes):
        return
    first: dict[Any, Node] = {}
    for node in graph.nodes:
        if node.op == "call_method" and node.target == "size":
            of = node.args[0]
            node.replace_input_with(of, first.get(_expressions(of), of))
        if shape(node) is not None:
            first.setdefault(_expressions(node), node)


_RESHAPE_IN_PLACE = frozenset(
    {"as_strided_", "resize_", "resize_as_", "set_", "squeeze_", "swapaxes_", "swapdims_", "t_",
     "transpose_", "unsqueeze_"}
)  # fmt: skip


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _expressions(node: Any) -> tuple[Any, ...] | None:
    """Returns the sizes of a tensor, with formulas in place of symbols; comparing them adds no guard."""
    sizes = shape(node)
    if sizes is None:
        return None
    return tuple(n if isinstance(n, int) else getattr(n.node, "expr", n.node) for n in sizes)


def match_sublayer(
    editor: Editor, total: Node, rotation: tuple[Node, ...] | None = None
) -> SublayerNodes | None:
    """Returns the sub-layer with the residual sum ``total``, or None.

    rotation: None, or the cosines and sines by which a layer may rotate its queries and keys, if any.
    With it, sub-layers without a norm, gated networks, and attention with another factor, grouped heads
    or heads of other sizes match, too.
    """
    op = read(total)
    assert op is not None
    is_whole = rotation is not None
    for x, f in ((op["input"], op["other"]), (op["other"], op["input"])):
        if not all(isinstance(n, Node) and _is_like(n, total) for n in (x, f)):
            continue
        if rank(x) != 3 and not (is_whole and rank(x) == 2):
            continue
        f, dropout_p = dropout_of(f) or (f, 0.0)
        block = _network_block(f, is_whole) or _attention(f, rotation)
        if block is None or not _is_like(block.input, x):
            continue
        last = only_user(total)
        before, after = norm_of(block.input), None if last is None else norm_of(last)
        if before is not None and before.x is x:
            one = SublayerNodes(block, before, True, x, total)
        elif block.input is x and last is not None and after is not None and after.x is total:
            one = SublayerNodes(block, after, False, x, last)
        elif block.input is x and is_whole:
            one = SublayerNodes(block, NormCall(x, None, None, 0.0, NormKind.NONE), True, x, total)
        else:
            continue
        one.dropout_p = dropout_p
        if _is_contiguous(one.y) and _set_nodes(one) and _has_kernel(editor, one):
            return one
    return None


def _is_like(one: Node, other: Node) -> bool:
    return dtype(one) == dtype(other) and is_same(shape(one), shape(other))


def _is_contiguous(node: Node) -> bool:
    """True if the result is contiguous, as the kernel's is: views of it may depend on that."""
    x = value(node)
    *_, length, width = x.shape
    return _has_strides(x, (length * width, width, 1)[-x.dim() :])


def _has_strides(x: Tensor, wanted: tuple[Any, ...]) -> bool:
    """True if the tensor has these strides, except in dimensions of size 1."""
    return all(
        statically_known_true(own == stride) or statically_known_true(size == 1)
        for size, own, stride in zip(x.shape, x.stride(), wanted, strict=True)
    )


def _network_block(node: Node, or_gated: bool = False) -> _Block | None:
    found = network(node)
    if found is not None:
        return _Block(Kind.FEED_FORWARD, *found[:3], dropout_p=found[3])
    gated = gated_network(node) if or_gated else None
    return None if gated is None else _Block(Kind.GATED_FEED_FORWARD, *gated)


def _attention(node: Node, rotation: tuple[Node, ...] | None = None) -> _Block | None:
    """Returns the attention with this node as its output projection, or None.

    rotation: as in `match_sublayer`.
    """
    out = linear_map(node)
    if out is None:
        return None
    joined: Any = out.x
    while keeps_order(joined):
        joined = joined.args[0]
    swap = read(joined)
    if swap is None or permutation(swap, rank(joined)) != [0, 2, 1, 3]:
        return None
    attended = swap["input"]
    while keeps_order(attended) and is_same(shape(attended), shape(attended.args[0])):
        attended = attended.args[0]
    found = heads_and_masks(attended, rotation is not None)
    if found is None:
        return None
    heads, masks, factor, dropout_p = found
    each = [_projection(one) for one in heads]
    if rotation is not None and None in each:
        each = [one or _computed(head, rotation) for one, head in zip(each, heads, strict=True)]
    if None in each:
        return None
    q, k, v = each
    factors = [one.factor for one in each]  # type: ignore[union-attr]
    factor *= factors[0] * factors[1]
    if abs(factors[2] - 1.0) > 1e-5:
        return None
    turned = [one.is_rotated for one in each]  # type: ignore[union-attr]
    if turned[0] != turned[1] or turned[2] or turned[0] != bool(rotation):
        return None
    sources = [one.input for one in each]  # type: ignore[union-attr]
    (_, number, _, size), (_, of_keys, *_) = (shape(each) for each in heads[:2])  # type: ignore[misc]
    width = (shape(sources[0]) or (None,))[-1]
    starts, weights = [one.start for one in each], [one.map[0] for one in each]  # type: ignore[union-attr]
    if (
        not all(isinstance(n, int) for n in (width, number, of_keys))
        or sources[1] is not sources[2]
    ):
        return None
    of_query, of_key = number * size, of_keys * size
    options = (
        None if abs(factor - 1.0) <= 1e-5 else factor * size**-0.5,
        0 if of_keys == number else of_keys,
        0 if of_query == width else size,
    )
    if rotation is None and options != (None, 0, 0):
        return None
    if q.node is k.node is v.node:  # type: ignore[union-attr]
        maps, wanted = [q.map], [0, of_query, of_query + of_key]  # type: ignore[union-attr]
        rows = [of_query + 2 * of_key] * 3
    else:
        maps, wanted = [one.map for one in each], [0, 0, 0]  # type: ignore[union-attr]
        rows = [of_query, of_key, of_key]
    sizes = [(n, width) for n in rows]
    if not is_same(starts, wanted) or [shape(weight) for weight in weights] != sizes:
        return None
    maps.append(out.map)
    kind, memory = Kind.SELF_ATTENTION, None
    if sources[0] is not sources[1]:
        kind, memory = Kind.CROSS_ATTENTION, sources[1]
        of_x, of_memory = (shape(each) or () for each in sources[:2])
        if rotation or options[1] or len(of_memory) != 3 or not is_same(of_memory[::2], of_x[::2]):
            return None
    rest = None, number, masks, memory, rotation or (), dropout_p, *options
    return _Block(kind, sources[0], maps, *rest)


def keeps_order(node: Any) -> bool:
    """True for a method call that keeps the elements in row-major order."""
    return (
        isinstance(node, Node)
        and node.op == "call_method"
        and node.target in ("contiguous", "flatten", "reshape", "view")
        and isinstance(node.args[0], Node)
        and isinstance(value(node), Tensor)
        and value(node).dtype == value(node.args[0]).dtype
    )


#: Functions and methods whose results are views of parts of their first argument.
_PARTS = frozenset({"chunk", "getitem", "narrow", "select", "split", "unbind", "tensor_split"})


class _Projection(NamedTuple):
    node: Node
    input: Node
    map: Map
    #: First column of the heads in the output of the linear map.
    start: Any
    #: The heads are the columns of the output times this factor, and rotated if ``is_rotated``.
    factor: float = 1.0
    is_rotated: bool = False


def _projection(node: Any) -> _Projection | None:
    """Returns the linear map if heads (B, H, T, D) are a view of its output, else None."""
    while isinstance(node, Node) and node.op == "call_method" and node.target == "contiguous":
        node = node.args[0]
    heads, base = value(node), node
    while isinstance(base, Node) and (found := linear_map(base)) is None:
        base = base.args[0] if is_view(base) or _name(base) in _PARTS else None
    y = value(base)
    if not isinstance(base, Node) or not isinstance(y, Tensor) or not isinstance(heads, Tensor):
        return None
    if found is None or y.dim() != 3 or heads.dim() != 4 or y.dtype != heads.dtype:
        return None
    # In shared memory, the strides show which elements of the output the heads are.
    if y.untyped_storage()._cdata != heads.untyped_storage()._cdata:
        return None
    batch, _, length, size = heads.shape
    columns = y.shape[2]
    is_split = _has_strides(heads, (length * columns, size, columns, 1))
    if not is_same((batch, length), y.shape[:2]) or not is_split:
        return None
    if not is_same(y.stride(), (length * columns, columns, 1)) or y.storage_offset() != 0:
        return None
    return _Projection(base, found.x, found.map, heads.storage_offset())


def _computed(head: Node, rotation: tuple[Node, ...]) -> _Projection | None:
    """Returns the linear map whose columns, scaled or rotated, are heads (B, H, T, D), or None.

    Models write rotations in many ways, so they are recognised by their results on random numbers.
    """
    nodes = [head]
    for node in nodes:
        if node not in rotation and linear_map(node) is None:
            nodes += [each for each in node.all_input_nodes if each not in nodes]
    base = next((node for node in nodes if linear_map(node) is not None), None)
    if base is None:
        return None
    generator = torch.Generator().manual_seed(0)
    values = {
        node: torch.randn(
            [number(size) for size in value(node).shape], generator=generator, dtype=torch.float64
        )
        for node in (base, *rotation)
    }
    try:
        found = evaluate(head, values)
    except (UnknownValueError, RuntimeError):
        return None
    source = linear_map(base)
    if source is None or found.dim() != 4 or values[base].dim() != 3:
        return None
    heads, size = found.shape[1], found.shape[3]
    width, y = heads * size, values[base]
    for start in range(0, y.shape[2] - width + 1, width):
        part = y[:, :, start : start + width].unflatten(2, (heads, size)).transpose(1, 2)
        for turned in (part, rotated(part, *(values[each][:, None] for each in rotation))):
            if turned.shape != found.shape:
                continue
            factor = float((turned * found).sum() / (turned * turned).sum())
            error = (found.double() - factor * turned).abs().max()
            if error <= 1e-5 * abs(factor) * turned.abs().max():  # models rotate in float32
                return _Projection(base, source.x, source.map, start, factor, turned is not part)
    return None


def rotated(heads: Tensor, *tables: Tensor) -> Tensor:
    """Returns heads (B, H, T, D) rotated by cosines and sines (1 or B, 1, T, channels)."""
    if not tables:
        return heads
    cos, sin = tables
    turned, rest = heads.split([cos.shape[-1], heads.shape[-1] - cos.shape[-1]], -1)
    one, other = turned.chunk(2, -1)
    turned = turned * cos + torch.cat([-other, one], -1) * sin
    return torch.cat([turned, rest], -1)


def _set_nodes(one: SublayerNodes) -> bool:
    """Finds the nodes of a sub-layer; False if other nodes use any of them except the last."""
    outside = {one.x, *one.given()}
    todo = [one.y]
    while todo:
        node = todo.pop()
        # Sizes may be used by other sub-layers.
        if node in outside or node in one.nodes or isinstance(value(node), NO_MEMORY):
            continue
        if node.op not in ("call_function", "call_method") or mutates(node):
            return False
        one.nodes.add(node)
        todo += node.all_input_nodes
    return all(user in one.nodes for n in one.nodes if n is not one.y for user in n.users)


def _has_kernel(editor: Editor, one: SublayerNodes) -> bool:
    """True if the kernel for layers supports the sub-layer, and, in training, if it is small."""
    modes = editor.modes.at(one.y)
    inputs = _inputs(one.nodes)
    if modes.has_autocast or editor.obstacle(one.y, inputs) is not None:
        return False
    tensors = [x for x in map(value, inputs) if isinstance(x, Tensor)]
    if not all(x.is_cpu for x in tensors):
        return False
    drops = one.dropout_p + one.block.dropout_p > 0.0
    if not drops and not (modes.grad and any(x.requires_grad for x in tensors)):
        return True
    sizes = [number(size) for size in value(one.x).shape]
    return one.norm.kind == NormKind.LAYER and fused_layers.is_small(sizes, modes.grad)


def _inputs(nodes: Iterable[Node]) -> list[Node]:
    """Returns the nodes outside of these that they read, in a fixed order."""
    nodes = set(nodes)
    found = {each: None for node in nodes for each in node.all_input_nodes if each not in nodes}
    order = {node: i for i, node in enumerate(next(iter(nodes)).graph.nodes)}
    return sorted(found, key=order.__getitem__)


def _continues(editor: Editor, stack: list[SublayerNodes], one: SublayerNodes) -> bool:
    """True if one call can run the sub-layer after those of the stack."""
    first = stack[0]
    if (one.norm_first, one.norm.kind) != (first.norm_first, first.norm.kind):
        return False
    if not all(user in one.nodes for user in stack[-1].y.users):
        return False
    for other in (each.block for each in stack):
        if not _fits(one.block, other):
            return False
    computed = nodes_of([stack])
    if not computed.isdisjoint(one.given()):
        return False
    return editor.obstacle(one.y, _inputs(computed | one.nodes)) is None


def _fits(one: _Block, other: _Block) -> bool:
    """True if one call can run both sub-layers."""
    network = Kind.FEED_FORWARD
    if one.kind is not other.kind:
        return network in (one.kind, other.kind) or one.heads == other.heads
    own = one.activation, one.heads, one.masks, one.memory
    return own == (other.activation, other.heads, other.masks, other.memory)


def _replace(editor: Editor, stack: list[SublayerNodes]) -> None:
    nodes = nodes_of([stack])
    last, inputs = stack[-1].y, _inputs(nodes)
    body = Graph()
    copies: dict[Node, Node] = {}
    for i, node in enumerate(inputs):
        copies[node] = body.placeholder(f"input_{i}")
        copies[node].meta = {**node.meta, PARAMETER: value(viewed(node))}
    in_order = [node for node in editor.graph.nodes if node in nodes]
    for node in in_order:
        copies[node] = body.node_copy(node, copies.__getitem__)
    body.output(copies[last])
    root: Any = editor.graph.owning_module
    places = {node: i for i, node in enumerate(inputs)}
    name = next(name for i in itertools.count() if not hasattr(root, name := f"sublayers_{i}"))
    root.add_module(name, Sublayers(GraphModule({}, body), _plan(stack, places)))
    # Changed in place, because other stacks refer to the node.
    last.op, last.target, last.args, last.kwargs = "call_module", name, tuple(inputs), {}
    for node in reversed(in_order[:-1]):
        editor.graph.erase_node(node)
    editor.report.stacks.append(len(stack))


class _Plan(NamedTuple):
    """A stack of sub-layers; its tensors are indices of the inputs."""

    #: All sub-layers as one layer.
    layer: Layer[int]
    x: int
    #: -1: there is none.
    memory: int
    #: (hidden, added, is_causal) of self-attention and of attention to the memory.
    own: tuple[int, int, bool]
    cross: tuple[int, int, bool]
    #: Probabilities of dropout of each sub-layer: within it, and of its output; empty: none is active.
    dropouts: list[float]


def _plan(stack: list[SublayerNodes], places: dict[Any, int]) -> _Plan:
    def at(*nodes: Node | None) -> tuple[int, ...]:
        return tuple(-1 if node is None else places[node] for node in nodes)

    masks = {Kind.SELF_ATTENTION: (-1, -1, False), Kind.CROSS_ATTENTION: (-1, -1, False)}
    activation, memory = None, None
    for one in stack:
        block = one.block
        if block.kind is Kind.FEED_FORWARD:
            activation = block.activation
        else:
            hidden, added, is_causal = block.masks
            masks[block.kind] = (*at(hidden, added), is_causal)  # type: ignore[assignment]
        memory = memory or block.memory
    x, of_memory = at(stack[0].x, memory)
    own, cross = masks[Kind.SELF_ATTENTION], masks[Kind.CROSS_ATTENTION]
    recipes = tuple(one.recipe().each(places.__getitem__) for one in stack)
    layer = Layer(recipes, stack[0].norm_first, activation)
    dropouts = [p for one in stack for p in (one.block.dropout_p, one.dropout_p)]
    return _Plan(layer, x, of_memory, own, cross, dropouts if any(dropouts) else [])


class Sublayers(torch.nn.Module):
    """A stack of sub-layers in a captured graph: one kernel call, or the nodes that it replaces.

    ``body``: those nodes. They run if no kernel for layers supports the inputs or masks, if a finite
    fill of masked scores hides all keys of a query, and while a program is traced.
    """

    def __init__(self, body: GraphModule, plan: _Plan) -> None:
        super().__init__()
        self.body, self.plan = body, plan
        #: The tensors of the last call's parameters, and the sub-layers bound to them.
        self._kept: tuple[Sequence[Any], Bound | None] = (), None

    def forward(self, *given: Any) -> Tensor:
        y = None if is_traced() else self._in_one_call(given)
        return self.body(*given) if y is None else y

    def _in_one_call(self, given: tuple[Any, ...]) -> Tensor | None:
        plan = self.plan
        inputs = (*given, None)  # place -1
        x: Tensor = inputs[plan.x]
        own, cross = (
            mask_of(x, inputs[hidden], inputs[added], is_causal)
            for hidden, added, is_causal in (plan.own, plan.cross)
        )
        if own is None or cross is None:
            return None
        bound = self._bind(given)
        if bound is None:
            return None
        memory = inputs[plan.memory]
        return fused_layers.try_run_bound(
            bound, x, None, own, memory, cross, dropouts=plan.dropouts
        )

    def _bind(self, given: tuple[Any, ...]) -> Bound | None:
        """Returns the sub-layers, bound to their parameters among the inputs; cached for these."""
        found: Sequence[Any] = [given[place] for place in self._parameters_at]
        if self.int8:
            later: list[Any] = []
            found = [
                quantized(tensor, later) if place in self.int8 else tensor
                for place, tensor in zip(self._parameters_at, found, strict=True)
            ]
            if later and not unchanged(later):
                return None
        kept, bound = self._kept
        if bound is None or not all(map(operator.is_, found, kept)):
            tensors = dict(zip(self._parameters_at, found, strict=True))
            bound = Bound([self.plan.layer.each(tensors.__getitem__)])
            self._kept = found, bound
        return bound

    @functools.cached_property
    def _parameters_at(self) -> list[int]:
        """Indices of the inputs that are parameters."""
        found: dict[int, None] = {}
        self.plan.layer.each(lambda place: found.setdefault(place))
        return [*found]

    @functools.cached_property
    def int8(self) -> frozenset[int]:
        """Indices of the weights that are multiplied in 8 bits."""
        inputs = [node for node in self.body.graph.nodes if node.op == "placeholder"]
        found = {each for node in self.body.graph.nodes for each in int8_weights(node)}
        return frozenset(i for i, node in enumerate(inputs) if node in found)


def mask_of(
    x: Tensor, hidden: Any, added: Any, is_causal: bool
) -> tuple[Tensor | None, bool] | None:
    """Returns (mask, is_causal) for layer kernels; None if they cannot apply the mask.

    x: the input of the layers. The other arguments are values of `attention.Masks`.
    """
    if isinstance(added, run_time.Mask):
        if hidden is not None:
            return None
        hidden, added = added, None
    if hidden is None:
        mask = None if added is None else run_time.to_four(added, 4)
    elif added is not None or hidden.fully_masked is not None:
        return None
    else:
        mask, is_causal = hidden.visible, hidden.is_causal
    if mask is not None and mask.dtype not in (torch.bool, x.dtype):
        return None
    return mask, is_causal
