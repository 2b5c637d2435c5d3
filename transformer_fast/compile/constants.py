"""Precomputes the values of a compiled program that depend only on parameters and buffers.

These are packed copies of weights, and expressions of parameters, buffers and numbers (a weight
norm, position tables, relative position biases). They become additional inputs of the program. They
are cached until a tensor that they depend on changes; a compiler that freezes weights would make
them constants for good.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .. import memory
from .._context import are_plain_on_cpu
from .aliasing import AliasAnalysis, is_fresh
from .editor import Editor
from .feed_forward import PLACES, packed_call
from .graph_report import GraphReport
from .modes import GraphModes
from .nodes import value
from .ops import is_view, mutates

#: Pure calls, besides views and calls that return new memory (`is_fresh`). Calls whose names begin
#: with one of `_IMPURE` are never pure.
_PURE = frozenset({"chunk", "expand", "float", "getitem", "int", "long", "split", "to", "unbind"})
_IMPURE = ("dropout", "empty", "rand")
#: Maximum size of a cached value, in bytes.
_LARGEST = 64 << 20


class _Weight(NamedTuple):
    """A weight that a product can read from its packed copy."""

    node: Node
    #: Index of the program input that is the weight, or of which the weight is a view.
    owner: int
    rows: int


class DerivedInputs:
    """Computes the additional inputs of a program: packed weights first, then expression values."""

    def __init__(
        self, given: Sequence[Node], weights: Sequence[_Weight], values: Sequence[Node],
        written: Sequence[int] = (),
    ) -> None:  # fmt: skip
        by_rows: dict[int, list[int]] = {}
        for index, weight in enumerate(weights):
            by_rows.setdefault(weight.rows, []).append(index)
        self._groups = [
            (rows, indices, memory.COPIES["cpu"].packed()) for rows, indices in by_rows.items()
        ]
        self._owners = [weight.owner for weight in weights]
        are_views = any(weight.node is not given[weight.owner] for weight in weights)
        self._views = _program(given, [each.node for each in weights]) if are_views else None
        self._values = _program(given, values)
        roots = _cone(values)
        self._roots = [index for index, node in enumerate(given) if node in roots]
        #: Indices of the inputs that the program writes to, and of those that the values depend on: it
        #: must not write to their memory.
        self._written, self._read = written, {*self._owners, *self._roots}
        #: Key: addresses of the tensors that the values depend on. Entry: the states of those
        #: tensors, and the values. Modules that share a program have separate entries.
        self._kept: dict[tuple[int, ...], tuple[list[Any], Sequence[Tensor]]] = {}
        if values:
            _all.add(self)

    def __call__(self, inputs: Sequence[Any]) -> list[Tensor] | None:
        """Returns the additional inputs for these inputs; None if a copy cannot be cached, or if the
        program would change a value while it runs."""
        if self._written and not _storages(inputs, self._written).isdisjoint(
            _storages(inputs, self._read)
        ):
            return None
        owners = [inputs[index] for index in self._owners]
        weights = owners if self._views is None else self._views(*inputs)
        found: list[Any] = [None] * len(weights)
        for rows, indices, copies in self._groups:
            chosen = [weights[index] for index in indices]
            packed = copies(chosen, rows, [owners[index] for index in indices])
            for index, each in zip(indices, packed, strict=True):
                found[index] = each
        if any(each is None for each in found):
            return None
        return [*found, *self._values_of([inputs[index] for index in self._roots], inputs)]

    def _values_of(self, roots: Sequence[Tensor], inputs: Sequence[Any]) -> Sequence[Tensor]:
        key = tuple(map(Tensor.data_ptr, roots))
        kept = self._kept.get(key)
        if kept is None or not all(
            state.is_unchanged(root) for state, root in zip(kept[0], roots, strict=True)
        ):
            all_kept = self._kept
            # Taken before the computation: the next call then detects a write during it.
            states = [
                memory.COPIES["cpu"].snapshot(root, root, lambda _: all_kept.pop(key, None))
                for root in roots
            ]
            with torch.inference_mode(False), torch.no_grad():
                kept = states, self._values(*inputs)
            all_kept[key] = kept
        return kept[1]

    def held_bytes(self) -> int:
        return sum(each.nbytes for _, values in list(self._kept.values()) for each in values)

    def forget(self) -> None:
        self._kept.clear()


def _storages(inputs: Sequence[Any], indices: Iterable[int]) -> set[int]:
    return {inputs[index].untyped_storage().data_ptr() for index in indices}


#: All instances that cache expression values.
_all: weakref.WeakSet[DerivedInputs] = weakref.WeakSet()


def _forget(module: torch.nn.Module | None) -> None:
    for each in list(_all):
        each.forget()


memory.packings.append((lambda: sum(each.held_bytes() for each in list(_all)), _forget))


def lift(
    module: GraphModule, inputs: Sequence[Any]
) -> tuple[GraphModule, DerivedInputs | None, list[Tensor]] | None:
    """Returns the program with additional inputs, their computation (None: there are none), and their
    values for ``inputs``.

    Products call the CPU operators directly: packed copies are arguments, so nothing is looked up.
    ``inputs``: the tensors that the program was captured with. Returns None if nothing is changed, if
    sizes are known only at run time, or if an input is not a plain tensor in CPU memory.
    """
    if not are_plain_on_cpu(inputs):
        return None
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    aliases = AliasAnalysis(graph, inputs)
    editor = Editor(graph, GraphReport(), GraphModes(graph), aliases)
    given = [node for node in graph.nodes if node.op == "placeholder"]
    has_autocast = editor.modes.any(lambda modes: modes.has_autocast)
    if has_autocast or len(given) != len(inputs) or "cpu" not in memory.COPIES:
        return None
    constant_nodes = _constant_nodes(aliases, given, inputs)
    weights: list[_Weight] = []
    new: list[Node] = []
    is_changed = False
    for node in list(graph.nodes):
        product = packed_call(node)
        if product is None:
            continue
        operator, arguments, rows = product
        is_read_in_place = memory.COPIES["cpu"].is_read_in_place
        places = [
            i for i in PLACES[operator.name] if not is_read_in_place(value(arguments[i]), rows)
        ]
        if any(arguments[i] not in constant_nodes for i in places):
            continue
        packed = {i: _weight(arguments[i], given, inputs, rows) for i in places}
        if None in packed.values():
            continue
        is_changed = True
        for i, one in packed.items():
            weights.append(one)  # type: ignore[arg-type]
            with graph.inserting_after([*given, *new][-1]):
                new.append(graph.placeholder(f"packed_{len(new)}"))
            arguments[i + 1] = new[-1]
        node.replace_all_uses_with(editor.call(node, operator.of["cpu"], *arguments, like=node))
        graph.erase_node(node)
    returned = aliases.shared(next(iter(reversed(graph.nodes))).all_input_nodes)
    values = [
        node
        for node in constant_nodes
        if any(user not in constant_nodes for user in node.users)
        and _is_small(node)
        and not aliases.is_written([node])
        and not aliases.shared([node]) & returned
    ]
    # A view of an input costs nothing: it is not cached.
    own = {x.untyped_storage().data_ptr() for x in inputs}
    found = zip(values, _program(given, values)(*inputs), strict=True)
    values = [node for node, x in found if x.untyped_storage().data_ptr() not in own and x.numel()]
    written = [index for index, node in enumerate(given) if aliases.is_written([node])]
    constants = DerivedInputs(given, weights, values, written)
    first = constants(inputs)
    if first is None or not (first or is_changed):
        return None
    for node in values:
        with graph.inserting_after([*given, *new][-1]):
            new.append(graph.placeholder(f"value_{len(new)}"))
        new[-1].meta = {"example_value": value(node)}
        node.replace_all_uses_with(new[-1])
    for node in reversed(constant_nodes):
        if node.op != "placeholder" and not node.users:
            graph.erase_node(node)
    graph.lint()
    return GraphModule(module, graph), constants if first else None, first


def _constant_nodes(
    writes: AliasAnalysis, given: Sequence[Node], inputs: Sequence[Any]
) -> dict[Node, None]:
    """Returns the nodes that depend on parameters, buffers and numbers alone, in graph order."""
    found: dict[Node, None] = {}
    for node, x in zip(given, inputs, strict=True):
        kept = node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type") is not None
        if (
            (kept or isinstance(x, torch.nn.Parameter))
            and x.is_contiguous()
            and x.numel() > 0
            and not (x.is_inference() or x.is_neg() or writes.is_written([node]))
        ):
            found[node] = None
    if given:
        for node in given[0].graph.nodes:
            if _is_pure(node) and all(each in found for each in node.all_input_nodes):
                found[node] = None
    return found


def _is_pure(node: Node) -> bool:
    if node.op not in ("call_function", "call_method") or mutates(node):
        return False
    found = value(node)
    for each in found if isinstance(found, (tuple, list)) else (found,):
        if not isinstance(each, Tensor) or not all(isinstance(size, int) for size in each.shape):
            return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return not name.startswith(_IMPURE) and (is_view(node) or is_fresh(node) or name in _PURE)


def _is_small(node: Node) -> bool:
    x = value(node)
    return (
        node.op != "placeholder"
        and isinstance(x, Tensor)
        and x.numel() * x.element_size() <= _LARGEST
    )


def _cone(nodes: Iterable[Node]) -> set[Node]:
    """Returns the nodes and all of their transitive inputs."""
    found: set[Node] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found


def _program(given: Sequence[Node], results: Sequence[Node]) -> Callable[..., tuple[Tensor, ...]]:
    """Returns a function that computes the result nodes from the program's inputs."""
    cone, graph = _cone(results), Graph()
    copies = {node: graph.placeholder(f"input_{index}") for index, node in enumerate(given)}
    for node in given[0].graph.nodes if given else ():
        if node in cone and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    return GraphModule({}, graph).forward  # type: ignore[return-value]


def _weight(node: Any, given: Sequence[Node], inputs: Sequence[Any], rows: int) -> _Weight | None:
    """Describes a weight; None if it is no parameter or view of one, or needs no packed copy."""
    cone = _cone([node])
    owners = [index for index, each in enumerate(given) if each in cone]
    if len(owners) != 1:
        return None
    owner = inputs[owners[0]]
    weight = owner if node is given[owners[0]] else _program(given, [node])(*inputs)[0]
    same = weight.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()
    if not same or memory.COPIES["cpu"].packed()([weight], rows, [owner])[0] is None:
        return None
    return _Weight(node, owners[0], rows)
