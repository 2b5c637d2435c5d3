"""Encoder layers of transformers that run as one call in inference.

`prove` runs a layer in float64 on random tokens, with attention that returns its values, and compares all
its results with one of two formulas. With v = value(x), or value(norm1(x)) in pre-norm layers:

    post-norm: norm2(y + network(y)),         y = norm1(x + output(v))
    pre-norm:  y + network(norm2(y)),         y = x + output(v)
    network:   second(activation(first(y)))
    gated:     second(activation(gate(y)) * up(y))

Queries, keys and values are three linear maps, or parts of one; gate and up are two, or parts of one.
Queries and keys may be rotated by rotary position embeddings. A pre-norm layer may lack norm1.

The `Formula` has names of modules, so that it also describes a copy of the layer. A layer is bound to it
(`nn.bound`) as long as it is what it was when the formula was proven: modules, classes, attributes.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from .._context import are_plain_on_cpu
from ..compile.capture import tensors_of
from ..nn import fused_layers
from ..nn.bound import bound_to
from ..nn.drop_in import RECORD, original_class
from ..nn.fusion import LAYER_NORM, LINEAR, read_norm
from ..nn.guard import Guard, Unreadable
from ..nn.int8 import INT8
from ..recipe import NO_NORM, Kind, Layer, Linear, Norm, Place, Sublayer
from ..reference import ACTIVATIONS
from .parts import NAME_OF_ATTENTION, is_ours

#: Some layers clamp their result in float16.
_DTYPES = (torch.float32, torch.bfloat16)


class Trial(NamedTuple):
    """A call of a layer whose attention returned its values."""

    output: Any
    #: The module that called attention, with queries, keys and values (1, H, T, D).
    caller: torch.nn.Module
    heads: tuple[Tensor, Tensor, Tensor]
    #: Factor of the scores; None: 1 / sqrt(D).
    scale: float | None


Of = TypeVar("Of")


class Parts(NamedTuple, Generic[Of]):
    """The parts of a layer: modules, or their names."""

    #: The maps of queries, keys and values, or one joint map.
    projections: tuple[Of, ...]
    output: Of
    #: None: the layer lacks it.
    norm1: Of | None
    #: First and second. If gated: gate, up and second, or a joint map of gate and up, and second.
    network: tuple[Of, ...]
    norm2: Of

    def each(self, function: Callable[[Of], Any]) -> Parts[Any]:
        """Returns what the function returns for each part."""
        projections, output, norm1, network, norm2 = self
        return Parts(
            tuple(map(function, projections)), function(output),
            None if norm1 is None else function(norm1), tuple(map(function, network)),
            function(norm2),
        )  # fmt: skip


class Formula(NamedTuple):
    """The formula that a layer was proven to compute."""

    #: Name of the module that calls attention.
    caller: str
    parts: Parts[str]
    heads: int
    activation: str
    norm_first: bool
    is_gated: bool
    #: True if queries and keys are rotated by the layer's position embeddings.
    rotates: bool
    #: Number of values that the layer returns in a tuple, None but the first; 0: it returns a tensor.
    returned: int
    #: Names of arguments that do not change the result.
    ignored: frozenset[str]
    #: See `content`.
    content: tuple[Any, ...]

    def run(
        self, layer: torch.nn.Module, x: Any, starts: Tensor | None, mask: Tensor | None = None,
        rotation: Any = (),
    ) -> Any:  # fmt: skip
        """Returns the layer's result for (B, T, M), or None if the layer must be called.

        The caller has checked that no hook, tracer or transform is active.

        Args:
            starts: x is (1, rows, M), and sequence b is rows starts[b] to starts[b + 1].
            mask: True where a token may attend, broadcastable to (B, H, T, T).
            rotation: the position embeddings (1 or B, T, channels), if the layer rotates.
        """
        if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.dim() != 3:
            return None
        if layer.training or (self.rotates and not _is_rotation(rotation, self.heads, x)):
            return None
        if not are_plain_on_cpu((x, *rotation)):
            return None
        try:
            bound = bound_to(layer, Formula, functools.partial(self._read, layer))
        except Unreadable:
            return None
        y = fused_layers.try_run_bound(bound, x, starts, (mask, False), rotation=rotation)
        if y is None or not self.returned:
            return y
        return (y, *[None] * (self.returned - 1))

    def _read(self, layer: torch.nn.Module, guard: Guard) -> list[Layer[Place]]:
        guard.whole(layer)
        if any(m.training for m in layer.modules()) or content(layer) != self.content:
            raise Unreadable("layer was changed")
        config = layer.get_submodule(self.caller).config
        guard.value(vars(config), NAME_OF_ATTENTION)
        if not is_ours(config):
            raise Unreadable("attention is not ours")
        projections, output, norm1, network, norm2 = self.parts
        width = layer.get_submodule(output).out_features

        def maps(*names: str) -> tuple[Linear[Place], ...]:
            return tuple(Linear(Place(name, "weight"), Place(name, "bias")) for name in names)

        def norm(name: str) -> Norm[Place]:
            return read_norm(layer.get_submodule(name), name, width, guard)  # type: ignore[arg-type]

        kind = Kind.GATED_FEED_FORWARD if self.is_gated else Kind.FEED_FORWARD
        before = NO_NORM if norm1 is None else norm(norm1)
        own = Sublayer(Kind.SELF_ATTENTION, maps(*projections, output), before, self.heads)
        last = Sublayer(kind, maps(*network), norm(norm2))
        return [Layer((own, last), self.norm_first, self.activation)]


def _is_rotation(found: Any, heads: int, x: Tensor) -> bool:
    """True if these are the kernel's cosines and sines for x with this number of heads."""
    if not isinstance(found, tuple) or len(found) != 2:
        return False
    return all(
        isinstance(table, Tensor)
        and table.dtype in (torch.float32, x.dtype)
        and table.dtype == found[0].dtype
        and table.shape == found[0].shape
        and table.dim() == 3
        and table.shape[0] in (1, x.shape[0])
        and table.shape[1] == x.shape[1]
        and table.shape[2] % 2 == 0
        and table.shape[2] * heads <= x.shape[2]
        for table in found
    )


#: Attributes that do not describe what a module computes: those of any module, and ours.
_OF_ANY_MODULE = frozenset({*vars(torch.nn.Module()), "_is_hf_initialized", INT8, RECORD})
_PLAIN = (
    bool, int, float, str, type(None), types.FunctionType, types.BuiltinFunctionType,
    functools.partial,
)  # fmt: skip


def content(layer: torch.nn.Module, without: str = "training") -> tuple[Any, ...]:
    """Returns each module's name, its class before `accelerate`, and its attributes.

    An attribute that is neither a plain value nor a function is represented by its type, so that
    copies are equal.
    without: name of an attribute that may differ.
    """
    return tuple(
        (
            name,
            original_class(module),
            frozenset(
                (key, value if isinstance(value, _PLAIN) else type(value))
                for key, value in vars(module).items()
                if key not in _OF_ANY_MODULE and key != without
            ),
        )
        for name, module in layer.named_modules()
    )


def prove(
    layer: torch.nn.Module, width: int, call: Callable[..., Trial | str], others: dict[str, Any],
    rotation: tuple[Tensor, ...] = (),
) -> Formula | str:  # fmt: skip
    """Returns the formula of a layer, or the reason why it has none.

    The layer must run no `classes.code_of_others`: a few tokens would prove nothing about it.

    Args:
        call: takes a function like the layer, hidden states (1, `TOKENS`, width) and other arguments, and
            calls the function; returns the reason if no kernel for layers supports the attention.
        others: other arguments, which may change the result or not.
        rotation: the position embeddings (1, `TOKENS`, channels) that ``call`` passes; empty: none.
    """
    dtypes = {parameter.dtype for parameter in layer.parameters()}
    if len(dtypes) != 1 or not dtypes <= {*_DTYPES}:
        return "its weights are not all float32, or all bfloat16"
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, TOKENS, width, generator=generator, dtype=torch.float64)
    seen: list[tuple[torch.nn.Module, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda module, _, y: seen.append((module, y)))
        for module in layer.modules()
        if type(module) in (*LINEAR, *LAYER_NORM)
    ]
    in_float64 = _in_float64(layer)
    run = in_float64(layer)
    try:
        trial = call(run, x)
    finally:
        for hook in hooks:
            hook.remove()
    if isinstance(trial, str):
        return trial
    first, *rest = trial.output if isinstance(trial.output, tuple) else (trial.output,)
    ignored = frozenset(n for n, value in others.items() if _same(trial, call, run, x, {n: value}))
    modules = {module for module, _ in seen}
    maps = [module for module, _ in seen if type(module) in LINEAR]
    norms = [module for module, _ in seen if type(module) in LAYER_NORM]
    if (
        not 4 <= len(maps) <= 7
        or len(norms) not in (1, 2)
        or len(modules) != len(seen)
        or any(value is not None for value in rest)
    ):
        return "it does not have the parts of an encoder layer: 4 to 7 linear layers, 1 or 2 norms"
    if {*tensors_of(layer).values()} != {x for m in modules for x in tensors_of(m).values()}:
        # Changed values of these parameters must change the result, whatever the values are now.
        return "it has parameters or buffers besides those of its linear maps and layer norms"
    size = trial.heads[0].shape[3]
    query, key, value = trial.heads
    if trial.scale is not None:  # the kernel's is 1 / sqrt(D)
        query = query * (trial.scale * size**0.5)
    steps = _Steps(in_float64, x, (query, key, value), rotation)
    inner = steps.projections({module: y for module, y in seen if module in maps})
    if not inner:
        scaled = "rotated and scaled" if rotation else "scaled"
        return f"its queries, keys and values are not linear projections, {scaled} by 1 / sqrt(D)"
    last, *network = [module for module in maps if module not in inner]
    orders = [network]
    if len(network) == 3:  # gate, up and second, or up first
        orders.append([network[1], network[0], network[2]])
    before = norms[0] if len(norms) == 2 else None
    found = [
        (parts, *one)
        for order in orders
        for parts in [Parts(tuple(inner), last, before, tuple(order), norms[-1])]
        for one in steps.agreeing(first, parts)
    ]
    if len(found) != 1:
        return "its output matches neither a pre-norm nor a post-norm encoder layer"
    parts, norm_first, is_gated, activation = found[0]
    names = {module: name for name, module in layer.named_modules()}
    return Formula(
        names[trial.caller], parts.each(names.__getitem__), trial.heads[0].shape[1], activation,
        norm_first, is_gated, bool(rotation), 1 + len(rest) if isinstance(trial.output, tuple) else 0,
        ignored, content(layer),
    )  # fmt: skip


def _same(
    trial: Trial, call: Callable[..., Trial | str], run: Any, x: Tensor, given: dict[str, Any]
) -> bool:
    """True if the layer has the same result with this argument."""
    try:
        again = call(run, x, **given)
    except Exception:  # the layer uses the argument
        return False
    if isinstance(again, str) or type(again.output) is not type(trial.output):
        return False
    pairs = (t.output if isinstance(t.output, tuple) else (t.output,) for t in (again, trial))
    return all(one is two or torch.equal(one, two) for one, two in zip(*pairs, strict=True))


#: Number of tokens in a trial.
TOKENS = 5


def _in_float64(layer: torch.nn.Module) -> Callable[[torch.nn.Module], Callable[..., Any]]:
    """Returns a function from a module in the layer to one that calls it with its weights in float64."""
    wide = {x: x.double() for x in tensors_of(layer).values() if x.is_floating_point()}

    def of(module: torch.nn.Module) -> Callable[..., Any]:
        weights = {name: wide[x] for name, x in tensors_of(module).items() if x in wide}
        # With tie_weights a module under two names would be left with float64 weights.
        return lambda *args, **kwargs: torch.func.functional_call(
            module, weights, args, kwargs, tie_weights=False
        )

    return of


class _Steps(NamedTuple):
    """What a trial of a layer computed, and functions of its steps."""

    in_float64: Callable[[torch.nn.Module], Callable[..., Any]]
    x: Tensor
    #: Queries, scaled, keys and values (1, H, T, D).
    heads: tuple[Tensor, ...]
    rotation: tuple[Tensor, ...]

    def _are_heads(self, projected: Sequence[Tensor]) -> bool:
        """True if queries, keys and values (1, T, M) are those of the trial, before the rotation."""
        for place, (y, wanted) in enumerate(zip(projected, self.heads, strict=True)):
            if not self._is(y, wanted, place < 2):
                return False
        return True

    def _is(self, y: Tensor, heads: Tensor, rotates: bool) -> bool:
        if y.dtype != heads.dtype or y.shape != heads.transpose(1, 2).flatten(2).shape:
            return False
        y = y.unflatten(2, (heads.shape[1], -1)).transpose(1, 2)
        if not (self.rotation and rotates):
            return _agree(y, heads)
        cos, sin = (table[:, None] for table in self.rotation)
        turned, rest = y.split([cos.shape[-1], y.shape[-1] - cos.shape[-1]], -1)
        a, b = turned.chunk(2, -1)
        turned = turned * cos + torch.cat([-b, a], -1) * sin
        # Models rotate in float32.
        return _agree(torch.cat([turned, rest], -1), heads, 1e-6)

    def projections(self, maps: dict[torch.nn.Module, Tensor]) -> list[torch.nn.Module]:
        """Returns the linear maps of queries, keys and values, or the one of all; else an empty list."""
        for module, y in maps.items():
            if y.shape[-1] % 3 == 0 and self._are_heads(y.chunk(3, -1)):
                return [module]
        inner = []
        for place, wanted in enumerate(self.heads):
            same = [module for module, y in maps.items() if self._is(y, wanted, place < 2)]
            if len(same) != 1:
                return []
            inner += same
        return inner

    def agreeing(
        self, output: Tensor, parts: Parts[torch.nn.Module]
    ) -> list[tuple[bool, bool, str]]:
        """Returns ``norm_first``, ``is_gated`` and the activation of each formula that agrees."""
        x = self.x
        projections, last, norm1, network, norm2 = parts.each(self.in_float64)
        *firsts, second = network
        features: Any = parts.network[-1].in_features
        found = []
        for norm_first in (True,) if norm1 is None else (False, True):
            normed = norm1(x) if norm_first and norm1 is not None else x
            try:
                own = [project(normed) for project in projections]
                own = own if len(own) == 3 else own[0].chunk(3, -1)
                y = x + last(own[2])
                y = y if norm_first or norm1 is None else norm1(y)
                inside = norm2(y) if norm_first else y
                hidden = torch.cat([one(inside) for one in firsts], -1)
                is_gated = hidden.shape[-1] == 2 * features
                a, b = hidden.chunk(2, -1) if is_gated else (hidden, 1.0)
                ends = {name: y + second(of(a) * b) for name, of in ACTIVATIONS.items()}
            except RuntimeError:  # the sizes do not match
                continue
            if self._are_heads(own):
                for name, end in ends.items():
                    if _agree(end if norm_first else norm2(end), output):
                        found.append((norm_first, is_gated, name))
        return found


def _agree(x: Tensor, y: Tensor, tolerance: float = 1e-10) -> bool:
    """True if the tensors are equal up to rounding, in float64 unless a tolerance is given."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return bool((x - y).abs().max() <= tolerance * y.abs().max())
