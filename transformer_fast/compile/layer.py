"""Recognises the recipe of a layer in the graph of one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from ..recipe import Kind, Layer, NormKind, Place
from .attention import NO_MASKS, Masks
from .backend import STEPS
from .canonicalize import canonicalize
from .capture import Captured, NotCapturedError
from .editor import Editor
from .graph_report import GraphReport
from .modes import GraphModes
from .nodes import shape
from .ops import calls, mutates
from .sublayers import SublayerNodes, keeps_order, match_sublayer


class NotALayerError(NotCapturedError):
    """Raised with the reason why a graph is not that of an encoder or decoder layer."""


class Found(NamedTuple):
    """The recipe of a layer, its memory, results and masks, as found in the graph of a call."""

    layer: Layer[Place]
    #: Name of the argument (B, S, M) that attention to a memory reads; None: there is no such attention.
    memory: str | None
    #: Length of the tuple that the layer returns; all but the first value are None. 0: a tensor.
    returned: int
    #: The masks, nodes of the graph, of self-attention and of attention to the memory.
    own: Masks
    cross: Masks
    #: Probabilities of dropout of each sub-layer: within it (weights of attention, hidden units), and of
    #: its output.
    dropouts: tuple[float, ...]


def layer_of(
    captured: Captured, x: str, rotation: tuple[str, ...] = (), for_steps: bool = False
) -> Found:
    """Returns the recipe of a graph's layer; the graph is rewritten.

    Args:
        x: name of the argument (B, T, M).
        rotation: names of the arguments with cosines and sines of rotary position embeddings.
        for_steps: True if kernels for decoding steps will run the recipe.

    Raises:
        NotALayerError: the graph computes anything besides a layer, or no kernel would run it.
    """
    graph, inputs = captured.graph, captured.inputs
    modes = GraphModes(graph, captured.modes)
    editor = Editor(graph, GraphReport(), modes, canonicalize(graph, modes))
    for step in STEPS:
        step(editor)
    output: Any = graph.output_node().args[0]
    first, *rest = output if isinstance(output, (tuple, list)) else (output,)
    if any(each is not None for each in rest):
        raise NotALayerError("it returns more than its hidden states")
    given = tuple(inputs[name] for name in rotation)
    ends = {}
    for node, _ in calls(graph, "add"):
        one = None if mutates(node) else match_sublayer(editor, node, given)
        if one is not None:
            ends[one.y] = one
    stack: list[SublayerNodes] = []
    node = _same_rows(first)
    while node is not inputs[x]:
        if node not in ends:
            left = "".join(f"; {each.op}: {each.reason}" for each in editor.report.left)
            raise NotALayerError(
                f"it is not attention and a network, each with a residual sum{left}"
            )
        stack.insert(0, ends[node])
        node = _same_rows(ends[node].x)
    blocks = [one.block for one in stack]
    kinds = [block.kind for block in blocks]
    networks = [block for block in blocks if not block.kind.is_attention]
    attentions = [block for block in blocks if block.kind.is_attention]
    memories = {block.memory for block in attentions if block.memory is not None}
    if (
        len(networks) != 1
        or kinds[0] is not Kind.SELF_ATTENTION
        or len(set(kinds)) != len(kinds)
        or len(kinds) != (3 if memories else 2)
        or len({(block.heads, block.scale) for block in attentions}) != 1
        or len({one.norm_first for one in stack}) != 1
        or any(one.norm.kind == NormKind.NONE for one in stack[1:])
        or len(memories) > 1
    ):
        raise NotALayerError("its sub-layers are in another order")
    places = {node: name for name, node in reversed(inputs.items())}
    memory = next((places.get(node, "") for node in memories), None)
    if memory == "":
        raise NotALayerError("the memory of its attention is computed")

    def place(node: Node) -> Place:
        is_turned = node.op == "call_method" and node.target == "t"
        node = node.args[0] if is_turned else node  # type: ignore[assignment]
        if node.op != "placeholder":
            raise NotALayerError("a parameter is computed")
        module, _, name = places[node].rpartition(".")
        return Place(module, name, transposed=is_turned)

    recipes = tuple(one.recipe() for one in stack)
    layer = Layer(recipes, stack[0].norm_first, networks[0].activation).each(place)
    if not for_steps and any(one.is_for_steps for one in layer.sublayers):
        raise NotALayerError(
            "its heads have other sizes than M / H, keys have fewer heads, or its scores another factor "
            "than 1 / sqrt(D)"
        )
    own, cross = (
        next((block.masks for block in attentions if block.kind is kind), NO_MASKS)
        for kind in (Kind.SELF_ATTENTION, Kind.CROSS_ATTENTION)
    )
    returned = 1 + len(rest) if isinstance(output, (tuple, list)) else 0
    dropouts = tuple(p for one in stack for p in (one.block.dropout_p, one.dropout_p))
    return Found(layer, memory, returned, own, cross, dropouts)


def _same_rows(node: Node) -> Node:
    """Returns the tensor that the node views with the same last dimension; else the node itself."""
    while keeps_order(node) and shape(node)[-1] == shape(node.args[0])[-1]:  # type: ignore[index,arg-type]
        node = node.args[0]  # type: ignore[assignment]
    return node


def masks_of(captured: Captured, found: Found, arguments: Sequence[str]) -> GraphModule:
    """Returns the part of a graph that computes the masks, as a function of ``arguments``.

    It returns ``hidden`` and ``added`` of self-attention, then of attention to the memory; see `Masks`.
    """
    graph = Graph()
    copies = {captured.inputs[name]: graph.placeholder(name) for name in arguments}

    def of(node: Any) -> Any:
        if isinstance(node, Node) and node not in copies:
            if node.op not in ("call_function", "call_method"):
                raise NotALayerError("its mask depends on a parameter or a buffer")
            args, kwargs = map_arg((node.args, node.kwargs), of)
            copies[node] = graph.create_node(node.op, node.target, args, kwargs)
        return copies[node] if isinstance(node, Node) else node

    graph.output(tuple(of(node) for node in (*found.own[:2], *found.cross[:2])))
    return GraphModule({}, graph)


def names_of(layer: Layer[Place]) -> frozenset[str]:
    """Returns the names of all parameters in a recipe."""
    found: set[str] = set()
    layer.each(lambda place: found.add(f"{place.module}.{place.name}".removeprefix(".")))
    return frozenset(found)
