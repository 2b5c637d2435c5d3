"""Encoder layers of transformers that run as one call in inference.

`prove` runs a layer in float64 on random tokens, with attention that returns its values, and compares all
that it computes with one of two formulas. With v = value(x), or value(norm1(x)) in pre-norm layers:

    post-norm: norm2(y + second(activation(first(y)))),  y = norm1(x + output(v))
    pre-norm:  y + second(activation(first(norm2(y)))),  y = x + output(v)

The `Formula` has names of modules, so that it also describes a copy of the layer. Before a call, the
layer is compared with what it was when the formula was proven: modules, their classes and their
attributes. Weights are read in each call.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._context import are_plain_on_cpu, function_mode_is_active, is_observed
from ..nn import fused_layers
from ..nn.drop_in import RECORD, is_patched, original_class
from ..nn.fusion import LAYER_NORM, LINEAR, Kind, Layer, Norm, Sublayer, affine, read_norm
from ..nn.int8 import INT8, unchanged
from ..reference import ACTIVATIONS
from .parts import FACTORS, is_ours

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


class _Held(NamedTuple):
    """The state of a layer when it was compared with the formula."""

    #: The modules in the layer, without itself: it is the weak key of `_held`.
    inner: list[torch.nn.Module]
    #: Of the layer and of these modules.
    kinds: list[type]
    attributes: list[dict[str, Any]]
    children: list[dict[str, Any]]
    #: The config of the module that calls attention.
    config: Any
    #: The modules named in `Formula.parts`; None: the formula does not hold.
    parts: list[Any] | None

    def is_current(self, layer: torch.nn.Module) -> bool:
        modules = layer, *self.inner
        try:
            for module, kind, attributes, children in zip(
                modules, self.kinds, self.attributes, self.children, strict=True
            ):
                if (
                    type(module) is not kind
                    or module.__dict__ != attributes
                    or module._modules != children
                ):
                    return False
        except (RuntimeError, ValueError):  # an attribute is another tensor, or another array
            return False
        return True


_held: weakref.WeakKeyDictionary[torch.nn.Module, _Held] = weakref.WeakKeyDictionary()


class Formula(NamedTuple):
    """The formula that a layer was proven to compute."""

    #: Name of the module that calls attention.
    caller: str
    #: Names of query, key, value, output, norm1, first, second and norm2.
    parts: tuple[str, ...]
    heads: int
    activation: str
    norm_first: bool
    #: Number of values that the layer returns in a tuple, None but the first; 0: it returns a tensor.
    returned: int
    #: See `content`.
    content: tuple[Any, ...]

    def run(self, layer: torch.nn.Module, x: Any, starts: Tensor | None) -> Any:
        """Returns the layer's result for (B, T, M), or None if the layer must be called.

        starts: x is (1, rows, M), and sequence b is rows starts[b] to starts[b + 1]. The caller has
        checked that no hook, tracer or transform is active.
        """
        if not isinstance(x, Tensor) or x.dtype not in _DTYPES or x.dim() != 3:
            return None
        held = _held.get(layer)
        if held is None or not held.is_current(layer):
            held = _held[layer] = self._hold(layer)
        if (
            held.parts is None
            or not are_plain_on_cpu((x,))
            or not is_ours(held.config)
            or is_patched(*held.kinds)
            or (function_mode_is_active() and is_observed())
        ):
            return None
        query, key, value, output, norm1, first, second, norm2 = held.parts
        if torch.is_grad_enabled() and value.weight.requires_grad:
            return None
        width, of_heads = x.shape[2], (self.heads, True)
        later: list[Any] = []
        maps = [affine(one, later=later) for one in (query, key, value, output, first, second)]
        if later and not unchanged(later):
            return None  # called as a module, it is quantised again
        sublayers = [
            Sublayer(Kind.QUERIES_AND_KEYS, *maps[0], *maps[1], _NO_NORM, *of_heads),
            Sublayer(Kind.SELF_ATTENTION, *maps[2], *maps[3], read_norm(norm1, width), *of_heads),
            Sublayer(Kind.FEED_FORWARD, *maps[4], *maps[5], read_norm(norm2, width)),
        ]
        read = Layer(layer, sublayers, self.norm_first, self.activation, 0.0)
        y = fused_layers.try_run_layer(read, x, starts)
        if y is None or not self.returned:
            return y
        return (y, *[None] * (self.returned - 1))

    def _hold(self, layer: torch.nn.Module) -> _Held:
        modules = [*layer.modules()]
        holds = not any(m.training for m in modules) and content(layer) == self.content
        return _Held(
            modules[1:],
            [type(module) for module in modules],
            [module.__dict__.copy() for module in modules],
            [module._modules.copy() for module in modules],
            layer.get_submodule(self.caller).config if holds else None,
            [layer.get_submodule(name) for name in self.parts] if holds else None,
        )


_NO_NORM = Norm(None, None, 0.0, None)
#: Attributes that do not describe what a module computes: those of any module, and ours.
_OF_ANY_MODULE = frozenset({*vars(torch.nn.Module()), "_is_hf_initialized", FACTORS, INT8, RECORD})
_PLAIN = (
    bool, int, float, str, type(None), types.FunctionType, types.BuiltinFunctionType,
    functools.partial,
)  # fmt: skip


def content(layer: torch.nn.Module, without: str = "training") -> tuple[Any, ...]:
    """Returns each module's name, its class before `accelerate`, and its attributes.

    Of attributes that are neither plain values nor functions the type, so that it is equal for copies.
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
    layer: torch.nn.Module, width: int, call: Callable[..., Trial | str], ignored: dict[str, Any]
) -> Formula | str:
    """Returns the formula of a layer, or the reason why it has none.

    The layer runs no `classes.code_of_others`: results on a few tokens would prove nothing of it.

    Args:
        call: takes a function like the layer, hidden states (1, T, width) and other arguments, and calls
            the function; returns the reason if the attention is none of a kernel for layers.
        ignored: other arguments that must not change the result.
    """
    dtypes = {parameter.dtype for parameter in layer.parameters()}
    if len(dtypes) != 1 or not dtypes <= {*_DTYPES}:
        return "its weights are not all float32, or all bfloat16"
    x = torch.randn(1, 5, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
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
    for name, value in ignored.items():
        again = call(run, x, **{name: value})
        y = again if isinstance(again, str) else again.output
        if type(y) is not type(trial.output) or any(
            not (one is two or torch.equal(one, two))
            for one, two in zip(y if isinstance(y, tuple) else (y,), (first, *rest), strict=True)
        ):
            return f"{name} changes its result"
    query, key, value = (heads.transpose(1, 2).flatten(2) for heads in trial.heads)
    size = trial.heads[0].shape[3]
    if trial.scale is not None:  # the kernel's is 1 / sqrt(D)
        query = query * (trial.scale * size**0.5)
    maps = [(module, y) for module, y in seen if type(module) in LINEAR]
    norms = [module for module, _ in seen if type(module) in LAYER_NORM]
    modules = {module for module, _ in seen}
    if (len(maps), len(norms), len(modules)) != (6, 2, 8) or any(r is not None for r in rest):
        return "it is not six linear maps and two layer norms"
    if {*_tensors(layer).values()} != {x for m in modules for x in _tensors(m).values()}:
        # Whatever their values are now, a change of them must change the result.
        return "it has parameters or buffers besides those of its linear maps and layer norms"
    inner = []
    for wanted in (query, key, value):
        same = [module for module, y in maps if _agree(y, wanted)]
        if len(same) != 1:
            return "its queries, keys and values are not linear maps, scaled by 1 / sqrt(D)"
        inner += same
    outer = [module for module, _ in maps if module not in inner]
    if len(outer) != 3:
        return "its queries, keys and values are not three linear maps"
    found = _agreeing(in_float64, x, (query, key, value), first, inner, outer, norms)
    if len(found) != 1:
        return "it computes neither formula of an encoder layer"
    (norm_first, activation), names = found[0], {m: name for name, m in layer.named_modules()}
    in_order = *inner, outer[0], norms[0], *outer[1:], norms[1]
    return Formula(
        names[trial.caller], tuple(names[module] for module in in_order),
        trial.heads[0].shape[1], activation, norm_first,
        1 + len(rest) if isinstance(trial.output, tuple) else 0, content(layer),
    )  # fmt: skip


def _in_float64(layer: torch.nn.Module) -> Callable[[torch.nn.Module], Callable[..., Any]]:
    """Returns a function from a module in the layer to one that calls it with its weights in float64."""
    wide = {x: x.double() for x in _tensors(layer).values() if x.is_floating_point()}

    def of(module: torch.nn.Module) -> Callable[..., Any]:
        weights = {name: wide[x] for name, x in _tensors(module).items() if x in wide}
        return lambda *args, **kwargs: torch.func.functional_call(module, weights, args, kwargs)

    return of


def _tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers in a module by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _agreeing(
    in_float64: Callable[[torch.nn.Module], Callable[..., Any]], x: Tensor,
    heads: tuple[Tensor, ...], output: Tensor, inner: list[torch.nn.Module],
    outer: list[torch.nn.Module], norms: list[torch.nn.Module],
) -> list[tuple[bool, str]]:  # fmt: skip
    """Returns ``norm_first`` and the activation of each formula that agrees with the layer's results."""
    (last, one, two), (norm1, norm2) = map(in_float64, outer), map(in_float64, norms)
    found = []
    for norm_first in (False, True):
        normed = norm1(x) if norm_first else x
        try:
            own = [in_float64(module)(normed) for module in inner]
            y = x + last(own[2])
            y = y if norm_first else norm1(y)
            hidden = one(norm2(y) if norm_first else y)
            ends = {name: y + two(function(hidden)) for name, function in ACTIVATIONS.items()}
        except RuntimeError:  # sizes that do not fit
            continue
        if all(map(_agree, own, heads)):
            for name, end in ends.items():
                if _agree(end if norm_first else norm2(end), output):
                    found.append((norm_first, name))
    return found


def _agree(x: Tensor, y: Tensor) -> bool:
    """True if the tensors are equal up to rounding in float64."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return False
    return bool((x - y).abs().max() <= 1e-10 * y.abs().max())
