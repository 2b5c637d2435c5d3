"""Fusion of inner modules, and reading of Transformer layers, torch.nn's and ours.

A module that is hooked, replaced, parametrised, quantised or compiled on its own is called. A layer is
read only if calling its modules would do nothing else; `Unreadable` gives the reason why not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from .. import functional
from ..functional.layer_norm import annotated_layer_norm
from ..recipe import NO_NORM, Kind, Layer, Linear, Norm, NormKind, Place, Sublayer
from ..reference.linear import activate
from . import ops
from .drop_in import note_methods
from .guard import ABSENT, Guard
from .guard import Part as Part
from .guard import Unreadable as Unreadable
from .guard import a_kind as a_kind
from .guard import is_unhooked as is_unhooked
from .int8 import INT8, run_feed_forward, run_linear

LINEAR = (ops.Linear, torch.nn.Linear, NonDynamicallyQuantizableLinear)
LAYER_NORM = (ops.LayerNorm, torch.nn.LayerNorm)
DROPOUT = (torch.nn.Dropout,)
_DROPOUT = (*DROPOUT, torch.nn.Identity)
_ACTIVATIONS = (torch.nn.ReLU, torch.nn.SiLU, torch.nn.GELU)
for _kind in (*LINEAR[1:], *LAYER_NORM[1:], *_DROPOUT, *_ACTIVATIONS):
    note_methods(_kind)
#: Class of a layer, and the names of its attentions, norms, dropouts and overridable methods.
_ENCODER = (
    torch.nn.TransformerEncoderLayer, ("self_attn",), ("norm1", "norm2"), ("dropout1", "dropout2"),
    ("_sa_block",),
)  # fmt: skip
_DECODER = (
    torch.nn.TransformerDecoderLayer, ("self_attn", "multihead_attn"), ("norm1", "norm2", "norm3"),
    ("dropout1", "dropout2", "dropout3"), ("_sa_block", "_mha_block"),
)  # fmt: skip


def affine(
    module: torch.nn.Module, weight: str = "weight", bias: str = "bias"
) -> tuple[Any, Tensor | None]:
    """Returns (weight, bias), a quantised weight as `Int8Weight`.

    Module.__getattr__ would take ten times as long.
    """
    parameters = module._parameters
    record = module.__dict__.get(INT8)
    if record is not None and weight in record.names:
        found = record.of(module, weight)
        return found, parameters[bias] if bias in parameters else getattr(module, bias, None)
    if weight in parameters and bias in parameters:
        return parameters[weight], parameters[bias]
    return getattr(module, weight), getattr(module, bias)


def overridden(layer: torch.nn.Module, name: str, base: type) -> bool:
    """True if a subclass, or the instance itself, replaces the method ``name`` of ``base``."""
    return getattr(type(layer), name) is not getattr(base, name) or name in layer.__dict__


def activation_name(activation: Any) -> str | None:
    """Returns the kernels' name of an activation, or None if they do not support it."""
    if activation is F.relu or activation is torch.relu:
        return "relu"
    if activation is F.gelu:
        return "gelu"
    if activation is F.silu:
        return "silu"
    if isinstance(activation, torch.nn.Module):
        if is_unhooked(activation, (torch.nn.ReLU,)):
            return "relu"
        if is_unhooked(activation, (torch.nn.SiLU,)):
            return "silu"
        if is_unhooked(activation, (torch.nn.GELU,)):
            return "gelu_tanh" if activation.approximate == "tanh" else "gelu"
    if (
        type(activation) is functools.partial
        and activation.func is F.gelu
        and not activation.args
        and activation.keywords == {"approximate": "tanh"}
    ):
        return "gelu_tanh"
    return None


def read_norm(module: Any, path: str, width: int, guard: Guard) -> Norm[Place]:
    """Returns the recipe of a norm over ``width`` features; other modules are called."""
    if module is None:
        raise Unreadable("norm is no module")
    if is_unhooked(module, LAYER_NORM):
        guard.unhooked(module, path)
        if guard.attribute(module, "normalized_shape") == (width,):
            weight, bias = Place(path, "weight"), Place(path, "bias")
            return Norm(NormKind.LAYER, weight, bias, guard.attribute(module, "eps"))
    return replace(NO_NORM, module=Place(path, ""))


def read_layer(
    layer: Any,
    attentions: tuple[type, ...],
    guard: Guard,
    network: bool = True,
    path: str = "",
) -> Layer[Place]:
    """Returns the recipe of an encoder or decoder layer; the caller checks the layer's own class.

    Args:
        attentions: the classes that its attentions may have.
        guard: records what the recipe depends on.
        network: False leaves the last sub-layer out.
        path: of the layer in the owner of the guard, with a dot at the end, or "".

    Raises:
        Unreadable: no kernel computes what the layer computes.
    """
    crossed = isinstance(layer, torch.nn.TransformerDecoderLayer)
    base, names, norms, dropouts, methods = _DECODER if crossed else _ENCODER
    for method in (*methods, "_ff_block") if network else methods:
        guard.method(layer, method, base)
    read, child = guard.attribute, guard.child
    for name in names:
        attention = child(layer, name, name, attentions)
        child(attention, "out_proj", f"{name}.out_proj", LINEAR)
    dropouts = ("dropout", *dropouts) if network else dropouts[:-1]
    for name in dropouts:
        child(layer, name, name, _DROPOUT)
    if network:
        one, two = (child(layer, name, name, LINEAR) for name in ("linear1", "linear2"))
    width = read(layer._modules[names[0]], "embed_dim")

    def place(module: str, name: str) -> Place:
        return Place(path + module, name)

    def map_of(module: str, weight: str = "weight", bias: str = "bias") -> Linear[Place]:
        return Linear(place(module, weight), place(module, bias))

    def norm(name: str) -> Norm[Place]:
        module = guard.entry(layer, "_modules", name)
        return read_norm(None if module is ABSENT else module, path + name, width, guard)

    sublayers = []
    for kind, name, after in zip(Kind, names, norms, strict=False):
        attention = layer._modules[name]
        if not read(attention, "_qkv_same_embed_dim") or read(attention, "embed_dim") != width:
            raise Unreadable(f"{name} has keys or values of another size")
        if (
            read(attention, "bias_k") is not None
            or read(attention, "bias_v") is not None
            or read(attention, "add_zero_attn")
        ):
            raise Unreadable(f"{name} appends keys")
        maps = map_of(name, "in_proj_weight", "in_proj_bias"), map_of(f"{name}.out_proj")
        heads, batch_first = read(attention, "num_heads"), bool(read(attention, "batch_first"))
        sublayers.append(Sublayer(kind, maps, norm(after), heads, batch_first))
    activation = None
    if network:
        sizes = read(one, "in_features"), read(two, "out_features")
        if not sizes == (width, width) or read(one, "out_features") != read(two, "in_features"):
            raise Unreadable("linear1 and linear2 have sizes that do not fit")
        activation = read(layer, "activation")
        if (found := activation_name(activation)) is not None:
            if isinstance(activation, torch.nn.Module):
                guard.unhooked(activation, "activation")
                guard.value(activation.__dict__, "approximate")
            activation = found
        maps = map_of("linear1"), map_of("linear2")
        sublayers.append(Sublayer(Kind.FEED_FORWARD, maps, norm(norms[-1])))
    # Each sub-layer has an inner and an outer dropout. The inner one of the network is ``dropout``.
    inner, outer = (*names, *dropouts[:1]) if network else names, dropouts[int(network) :]
    places = tuple(path + name for both in zip(inner, outer, strict=True) for name in both)
    return Layer(tuple(sublayers), bool(read(layer, "norm_first")), activation, places)


def linear(module: torch.nn.Module, input: Tensor) -> Tensor:
    """Returns ``module(input)``."""
    if is_unhooked(module, LINEAR):
        return run_linear(input, *affine(module))
    return module(input)


def feed_forward(
    input: Tensor,
    linear1: torch.nn.Module,
    activation: Callable[[Tensor], Tensor],
    dropout: torch.nn.Module,
    linear2: torch.nn.Module,
) -> Tensor:
    """Returns ``linear2(dropout(activation(linear1(input))))``."""
    name = activation_name(activation)
    if (
        name is not None
        and is_unhooked(linear1, LINEAR)
        and is_unhooked(dropout, DROPOUT)
        and is_unhooked(linear2, LINEAR)
    ):
        p: Any = dropout.p if dropout.training else 0.0
        return run_feed_forward(input, *affine(linear1), *affine(linear2), name, p)
    return linear(linear2, dropout(activation(linear(linear1, input))))


def add_norm(
    input: Tensor, dropout: torch.nn.Module | None, residual: Tensor, norm: torch.nn.Module
) -> tuple[Tensor, Tensor]:
    """Returns ``(norm(sum), sum)`` with ``sum = residual + dropout(input)``; no dropout if None."""
    if (
        is_unhooked(norm, LAYER_NORM)
        and (dropout is None or is_unhooked(dropout, DROPOUT))
        and input.shape == residual.shape
    ):
        return functional.add_layer_norm(
            input,
            residual,
            norm.normalized_shape,  # type: ignore[arg-type]
            *affine(norm),
            norm.eps,  # type: ignore[arg-type]
            dropout_p=dropout.p if dropout is not None and dropout.training else 0.0,  # type: ignore[arg-type]
        )
    total = residual + (input if dropout is None else dropout(input))
    return norm(total), total


def compose(
    layer: Any,
    x: Tensor,
    attentions: Sequence[Callable[[Tensor], tuple[Tensor, torch.nn.Module | None]]],
) -> Tensor:
    """Returns the output of an encoder or decoder layer, composed of ops.

    ``attentions``: the layer's last attentions; x is the input of the first of these. Each returns its
    output, and the dropout that must still be applied to it.
    """
    crossed = isinstance(layer, torch.nn.TransformerDecoderLayer)
    base, _, names, dropouts, _ = _DECODER if crossed else _ENCODER
    norms = names[-1 - len(attentions) :]

    def network(x: Tensor) -> tuple[Tensor, torch.nn.Module | None]:
        if overridden(layer, "_ff_block", base):
            return layer._ff_block(x), None
        y = feed_forward(x, layer.linear1, layer.activation, layer.dropout, layer.linear2)
        return y, getattr(layer, dropouts[-1])

    if layer.norm_first:
        y = getattr(layer, norms[0])(x)
        for attend, norm in zip(attentions, norms[1:], strict=True):
            y, x = add_norm(*attend(y), x, getattr(layer, norm))
        y, dropout = network(y)
        return x + (y if dropout is None else dropout(y))
    for attend, norm in zip(attentions, norms, strict=False):
        x, _ = add_norm(*attend(x), x, getattr(layer, norm))
    return add_norm(*network(x), x, getattr(layer, norms[-1]))[0]


def compose_bound(
    layer: Layer[Any],
    dropouts: Sequence[float],
    x: Tensor,
    attend: Callable[[Tensor, Sublayer[Any], float], Tensor],
) -> Tensor:
    """Returns the output of a layer of this recipe, composed of ops.

    Args:
        layer: with the tensors of its parameters.
        dropouts: two probabilities for each sub-layer: within it, and of its output; empty: zeros.
        attend: maps the input of the projections (..., M), the sub-layer, and the probability of dropout
            to the joined heads of attention (..., M).
    """
    given = iter(dropouts or (0.0,) * (2 * len(layer.sublayers)))
    norm = layer.sublayers[0].norm
    inside = normed(norm, x, norm.weight, norm.bias) if layer.norm_first else x
    for one, after in zip(layer.sublayers, (*layer.sublayers[1:], None), strict=True):
        p, p_of_output = next(given), next(given)
        if one.kind.is_attention:
            out = one.maps[-1]
            y = run_linear(attend(inside, one, p), out.weight, out.bias)
        else:
            y = _network(one, layer.activation, inside, p)
        if not layer.norm_first:
            x = inside = _add_normed(one.norm, y, x, p_of_output)[0]
        elif after is not None:
            inside, x = _add_normed(after.norm, y, x, p_of_output)
        else:
            x = x + F.dropout(y, p_of_output)
    return x


def _network(one: Sublayer[Any], activation: Any, x: Tensor, dropout_p: float) -> Tensor:
    *firsts, second = one.maps
    if one.kind is Kind.GATED_FEED_FORWARD:
        found = [run_linear(x, first.weight, first.bias) for first in firsts]
        gate, up = found if len(found) == 2 else found[0].chunk(2, -1)
        x = F.dropout(activate(gate, activation) * up, dropout_p)
    elif isinstance(activation, str):
        maps = firsts[0].weight, firsts[0].bias, second.weight, second.bias
        return run_feed_forward(x, *maps, activation, dropout_p)
    else:
        x = F.dropout(
            activate(run_linear(x, firsts[0].weight, firsts[0].bias), activation), dropout_p
        )
    return run_linear(x, second.weight, second.bias)


def projections(one: Sublayer[Any], x: Tensor, memory: Tensor | None = None) -> list[Tensor]:
    """Returns queries of x (B, T, M), keys and values of memory or x, all (B, heads, T, D)."""
    size = one.head_size or x.shape[-1] // one.heads
    counts = [one.heads, *[one.key_heads or one.heads] * 2]
    rows = [size * count for count in counts]
    maps: Sequence[Linear[Any]] = one.maps[:-1]
    if len(maps) == 1 and memory is None:
        found = run_linear(x, maps[0].weight, maps[0].bias).split(rows, -1)
    else:
        if len(maps) == 1:
            biases = [None] * 3 if maps[0].bias is None else maps[0].bias.split(rows)
            maps = [*map(Linear, maps[0].weight.split(rows), biases)]
        inputs = x, *[x if memory is None else memory] * 2
        found = tuple(
            run_linear(each, one.weight, one.bias) for each, one in zip(inputs, maps, strict=True)
        )
    return [y.unflatten(-1, (-1, size)).transpose(1, 2) for y in found]


def normed(norm: Norm[Any], x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Returns the norm of x with these parameters."""
    if norm.kind is NormKind.LAYER:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, norm.eps)
    if norm.kind is NormKind.RMS:
        return functional.rms_norm(x, x.shape[-1:], weight, norm.eps)
    if norm.kind is NormKind.NONE:
        return x
    return annotated_layer_norm(x, weight, bias, norm.eps, norm.kind is NormKind.ANNOTATED)


def _add_normed(
    norm: Norm[Any], x: Tensor, residual: Tensor, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """Returns ``(norm(sum), sum)`` with ``sum = residual + dropout(x)``."""
    if norm.kind is NormKind.LAYER:
        return functional.add_layer_norm(
            x, residual, x.shape[-1:], norm.weight, norm.bias, norm.eps, dropout_p=dropout_p
        )
    if norm.kind is NormKind.RMS:
        return functional.add_rms_norm(
            x, residual, x.shape[-1:], norm.weight, norm.eps, dropout_p=dropout_p
        )
    total = residual + F.dropout(x, dropout_p)
    return normed(norm, total, norm.weight, norm.bias), total
