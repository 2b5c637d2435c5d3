"""Layers bound to their tensors: recipes whose parameters are looked up once, and reused.

`Bound` is read from one or several layers. It keeps the lists that kernels for layers take, and a `Guard`
with all that these depend on. Tensors may change: kernels, packed copies and int8 weights find changes of
their values, `dispatch` checks dtypes and devices in each call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from .. import memory
from .._context import dispatch_modes
from ..ops.arguments import LayerArguments, LayerStack
from ..ops.autograd import wants_grad
from ..recipe import Kind, Layer, Place
from .guard import ABSENT, Guard, Unreadable
from .int8 import (
    INT8,
    FreedWeight,
    Int8Weight,
    Int8Weights,
    Weight,
    snapshot_of,
    unchanged,
)


class Parameters:
    """The tensors of one module's recipes, and the data by which `are_current` checks them."""

    def __init__(self, owner: torch.nn.Module, guard: Guard) -> None:
        #: Set to None once the tensors are looked up: it would be a cycle of references.
        self.owner: Any = owner
        self.guard = guard
        #: All tensors that are parameters of the modules.
        self.tensors: list[Tensor] = []
        #: For each quantised weight: the function that returns it, its last result and its snapshot, and
        #: (the float weight, twice, and its state).
        self.quantized: list[tuple[Callable[..., Weight], Weight, Any]] = []
        self.states: list[tuple[Tensor, Tensor, tuple[Any, ...]]] = []
        #: Freed weights, whose values and scales are written in place, and their factors.
        self.freed: list[tuple[FreedWeight, Tensor | None]] = []
        #: Parameters that kernels read through views, and their addresses.
        self.viewed: list[tuple[Tensor, int]] = []
        #: False if the tensors must be looked up in each call.
        self.is_reusable = True

    def __call__(self, place: Place) -> Any:
        """Returns the tensor at a place, or None; the module if ``place.name`` is empty.

        Raises `Unreadable` if the module, or one around it, must be called.
        """
        module, guard = self.owner, self.guard
        names = place.module.split(".") if place.module else []
        for index, name in enumerate(names):
            module = guard.entry(module, "_modules", name)
            if place.name:
                guard.unhooked(module, ".".join(names[: index + 1]))
        if not place.name:
            self.is_reusable = False  # the guard would miss that the module can be fused again
            return module
        found = guard.entry(module, "_parameters", place.name)
        if found is ABSENT:  # torch.nn.utils has replaced it
            found = guard.attribute(module, place.name)
        if found is None:
            return None
        self.tensors.append(found)
        record = guard.value(module.__dict__, INT8)
        if record is not ABSENT and place.name in record.names:
            found = self._quantized(module, place.name, record)
        elif place.transposed or place.rows is not None:
            self.viewed.append((found, found.data_ptr()))
            found = found.t() if place.transposed else found
        return found if place.rows is None else found[slice(*place.rows)]

    def _quantized(self, module: torch.nn.Module, name: str, record: Int8Weights) -> Weight:
        read = functools.partial(record.of, module, name)
        weight, parameter = read(), cast(Any, module._parameters.get(name))
        if type(parameter) is FreedWeight:
            self.freed.append((parameter, parameter.factors))
        elif module is self.owner or not isinstance(weight, Int8Weight) or weight.scale is None:
            # The result depends on the weight's dtype, device and mode, which no guard checks.
            self.is_reusable = False
        else:
            assert parameter is not None
            factors = self.guard.value(record.factors, name)
            factors = None if factors is ABSENT else factors
            snapshot = snapshot_of(parameter, record.transposed, factors)
            self.quantized.append((read, weight, snapshot))
            self.states.append((parameter, parameter, memory.state_of(parameter, parameter)))
        return weight

    def are_current(self) -> bool:
        """True if the quantised weights, factors and views that were returned are still valid."""
        for tensor, address in self.viewed:
            if tensor.data_ptr() != address:
                return False
        for freed, factors in self.freed:
            if freed.held.factors is not factors:
                return False
        later, is_same = [], True
        # A loop, as in `PackedWeights`. The guard has checked that parameters and factors are the same.
        for _, _, x in self.quantized:
            later.append(x)
            is_same = is_same and x is not None and x.alive and x.storage() is not None
        if torch.is_grad_enabled():
            is_same = is_same and not any(x.requires_grad for x, *_ in self.states)
        if not (is_same and memory.are_unchanged(self.states)):
            later = []
            if any(read(later) is not before for read, before, _ in self.quantized):
                return False
        return not later or unchanged(later)

    def dropout_p(self, path: str) -> float:
        """Returns the probability of a module's dropout; 0 if it is not active."""
        module, guard = self.owner.get_submodule(path), self.guard
        name = "p" if isinstance(module, torch.nn.Dropout) else "dropout"
        if not guard.attribute(module, "training") or not hasattr(module, name):
            return 0.0
        return guard.attribute(module, name)  # type: ignore[no-any-return]


class Group:
    """Layers with the same options, in the form in which one kernel call runs them."""

    def __init__(self, layers: Sequence[Layer[Weight]], dropout_p: float) -> None:
        kinds, norms, heads, batch_first, scale = _options(layers[0])
        pairs = [pair for layer in layers for one in layer.sublayers for pair in one.in_pairs()]
        given: list[Any] = []
        for _, first, second, norm in pairs:
            if norm.module is not None:
                raise Unreadable("norm is hooked, replaced or of other sizes")
            given += first.weight, first.bias, second.weight, second.bias, norm.weight, norm.bias
        weights = given[0::6], given[2::6]
        is_int8 = [[isinstance(weight, Int8Weight) for weight in each] for each in weights]
        gated = 0
        for index, (kind, first, _, _) in enumerate(pairs):
            if kind is not Kind.GATED_FEED_FORWARD:
                continue
            if pairs[index - 1][0] is not Kind.GATE or index == 0:
                gated = first.weight.shape[0]
            elif weights[0][index - 1].shape != first.weight.shape:
                raise Unreadable("gate has other sizes than what it multiplies")
            elif is_int8[0][index - 1] != is_int8[0][index]:
                raise Unreadable("weights are int8 in part")
        if is_int8[0] != is_int8[1]:
            raise Unreadable("weights are int8 in part")
        #: The floating-point tensors, and those of the int8 weights.
        self.floats = [p for p in given if not isinstance(p, Int8Weight)]
        int8 = [p for p in given if isinstance(p, Int8Weight)]
        quantized = [tensor for weight in int8 for tensor in (weight.values, weight.scale)]
        scales: list[Tensor | None] = []
        for both in zip(*weights, strict=True) if int8 else ():
            scales += [getattr(weight, "scale", None) for weight in both]
            scales += [getattr(weight, "factors", None) for weight in both]
        self.width: int = given[2].shape[0]
        activation = layers[0].activation
        for_steps = any(one.is_for_steps for layer in layers for one in layer.sublayers)
        self.arguments = LayerArguments(dropout_p, activation, quantized, gated, for_steps)  # type: ignore[arg-type]
        self.stack = LayerStack(
            kinds, layers[0].norm_first, norms, heads, batch_first, activation,
            [p.values if isinstance(p, Int8Weight) else p for p in given], scales,
            [norm.eps for *_, norm in pairs], scale,
        )  # fmt: skip


def _options(layer: Layer[Weight]) -> tuple[list[int], list[int], int, bool, float | None]:
    """Returns the kinds of a layer's sub-layers and norms, ``heads``, ``batch_first`` and ``scale``."""
    pairs = [pair for one in layer.sublayers for pair in one.in_pairs()]
    ways = {
        (one.heads, one.batch_first, one.scale) for one in layer.sublayers if one.kind.is_attention
    }
    if len(ways) > 1:
        raise Unreadable("attentions differ in heads, in batch_first or in the scores' factor")
    kinds, norms = [int(kind) for kind, *_ in pairs], [int(norm.kind) for *_, norm in pairs]
    return (kinds, norms, *(ways.pop() if ways else (1, True, None)))


class Bound:
    """The layers of a module, bound to their tensors.

    Args:
        layers: with the tensors in place of the parameters.
        parameters: the look-up of the tensors; None: the caller checks whether they are current.
        dropouts: for each layer the probabilities of `Layer.dropouts`; 0: it is not active.
    """

    def __init__(
        self,
        layers: Sequence[Layer[Weight]],
        parameters: Parameters | None = None,
        dropouts: Sequence[Sequence[float]] = ((),),
    ) -> None:
        self.layers, self.parameters, self.dropouts = layers, parameters, dropouts

    @functools.cached_property
    def groups(self) -> list[Group]:
        """Returns groups of layers, one kernel call each. Raises `Unreadable` if no kernel fits."""
        same: list[tuple[Any, list[Layer[Weight]], list[float]]] = []
        for layer, p in zip(self.layers, self.dropouts, strict=True):
            options = _options(layer), layer.norm_first, layer.activation
            if not same or same[-1][0] != options:
                same.append((options, [], []))
            same[-1][1].append(layer)
            same[-1][2].append(max(p, default=0.0))
        return [Group(alike, max(p)) for _, alike, p in same]

    @functools.cached_property
    def active_dropouts(self) -> list[float]:
        """Returns the probabilities of all layers; empty if none is active."""
        found = [p for each in self.dropouts for p in each]
        return found if any(found) else []

    def needs_grad(self) -> bool:
        """True if a parameter is trained."""
        if self.parameters is not None:
            return wants_grad(*self.parameters.tensors)
        return wants_grad(*self.groups[0].floats)


#: Module -> key -> the module's layers, bound to their tensors.
_kept: WeakKeyDictionary[torch.nn.Module, dict[Any, Bound]] = WeakKeyDictionary()


def bound_to(
    owner: torch.nn.Module, key: Any, read: Callable[[Guard], Sequence[Layer[Place]]]
) -> Bound:
    """Returns the layers of a module, bound to their tensors, read again if they have changed.

    Args:
        owner: a layer, or a module that contains layers.
        key: identifies ``read``, whose results are cached.
        read: returns the recipes of the owner's layers; the guard records what they depend on.

    Raises:
        Unreadable: a module must be called.
    """
    # Not cached under a dispatch mode, where tensors may be fake.
    kept = {} if dispatch_modes() else _kept.get(owner)
    if kept is None:
        kept = _kept[owner] = {}
    bound = kept.get(key)
    if bound is not None:
        found = bound.parameters
        assert found is not None
        if found.guard.holds(owner) and (
            not (found.quantized or found.viewed or found.freed) or found.are_current()
        ):
            return bound
    guard = Guard(owner)
    recipes = read(guard)
    parameters = Parameters(owner, guard)
    layers = [recipe.each(parameters) for recipe in recipes]
    dropouts = [[*map(parameters.dropout_p, recipe.dropouts)] for recipe in recipes]
    parameters.owner = None
    bound = Bound(layers, parameters, dropouts)
    if parameters.is_reusable:
        kept[key] = bound
    return bound
