"""Layers and stacks in one call each, where nobody could tell the difference.

`read_layer` and its like give None where a layer has to be composed of ops or modules: gradients,
active dropout, hooks, replaced modules, dtypes or devices other than the blocks' own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import cpu_blocks
from ..backends.cpu_blocks import Kind, Sight, Sublayer
from . import bypass, masks
from .multihead_attention import MultiheadAttention

#: Cross-attention takes queries and keys from parts of one packed weight, cut between panels.
_PANEL = 32


class Layers(NamedTuple):
    """What one call runs: one or several layers, or a part of one."""

    sublayers: list[Sublayer]
    #: Sub-layers of a layer.
    each: int
    norm_first: bool
    heads: int
    batch_first: bool
    #: Of the networks, if any.
    activation: str | None


class TorchMasks(NamedTuple):
    """What a layer is told about the keys of an attention, in torch.nn's polarity."""

    attention: Tensor | None
    key_padding: Tensor | None
    is_causal: bool


def _part(module: torch.nn.Module, name: str) -> torch.nn.Module:
    # Module.__getattr__ takes ten times as long, and there are three dozen to get.
    return module._modules.get(name) or getattr(module, name)


def _parameter(module: torch.nn.Module, name: str) -> Tensor | None:
    parameters = module._parameters
    return parameters[name] if name in parameters else getattr(module, name)


def _read_norm(norm: torch.nn.Module, width: int) -> tuple[Tensor | None, Tensor | None] | None:
    if not bypass.is_plain(norm, bypass.LAYER_NORM) or norm.normalized_shape != (width,):
        return None
    return _parameter(norm, "weight"), _parameter(norm, "bias")


def _inactive(dropout: torch.nn.Module) -> bool:
    return bypass.is_plain(dropout, bypass.DROPOUT) and (
        not dropout.training or bool(dropout.p == 0.0)
    )


def read_attention(
    layer: torch.nn.Module, attention: str, dropout: str, norm: str, x: Tensor, cross: bool = False
) -> Sublayer | None:
    """The sub-layer made of the layer's modules of these names, if it can be run on x."""
    module, width = _part(layer, attention), x.shape[-1]
    if not (
        bypass.is_plain(module, (MultiheadAttention,))
        and isinstance(module, MultiheadAttention)
        and module.embed_dim == width
        and module._qkv_same_embed_dim
        and module.bias_k is None
        and not module.add_zero_attn
        and (not module.training or module.dropout == 0.0)
        and _inactive(_part(layer, dropout))
        and (not cross or width % _PANEL == 0)
    ):
        return None
    out, norm_module = _part(module, "out_proj"), _part(layer, norm)
    last = _read_norm(norm_module, width)
    if last is None or not bypass.is_plain(out, bypass.LINEAR):
        return None
    parameters = (
        _parameter(module, "in_proj_weight"), _parameter(module, "in_proj_bias"),
        _parameter(out, "weight"), _parameter(out, "bias"), *last,
    )  # fmt: skip
    kind = Kind.CROSS_ATTENTION if cross else Kind.SELF_ATTENTION
    if not cpu_blocks.fits(x, *parameters):
        return None
    return Sublayer(kind, parameters, norm_module.eps)  # type: ignore[arg-type]


def read_feed_forward(
    layer: torch.nn.Module, dropout: str, norm: str, x: Tensor
) -> Sublayer | None:
    """The network, if it can be run on x; ``dropout`` is the name of the last one."""
    linear1, linear2 = _part(layer, "linear1"), _part(layer, "linear2")
    norm_module, width = _part(layer, norm), x.shape[-1]
    last = _read_norm(norm_module, width)
    if not (
        last is not None
        and bypass.activation_name(layer.activation) is not None
        and bypass.is_plain(linear1, bypass.LINEAR)
        and bypass.is_plain(linear2, bypass.LINEAR)
        and _inactive(_part(layer, "dropout"))
        and _inactive(_part(layer, dropout))
        and width == linear1.in_features == linear2.out_features
        and linear1.out_features == linear2.in_features
    ):
        return None
    parameters = (
        _parameter(linear1, "weight"), _parameter(linear1, "bias"),
        _parameter(linear2, "weight"), _parameter(linear2, "bias"), *last,
    )  # fmt: skip
    if not cpu_blocks.fits(x, *parameters):
        return None
    return Sublayer(Kind.FEED_FORWARD, parameters, norm_module.eps)  # type: ignore[arg-type]


def of_layer(layer: torch.nn.Module, sublayers: Sequence[Sublayer | None]) -> Layers | None:
    """What runs these sub-layers of the layer; None unless all could be read."""
    found = [sublayer for sublayer in sublayers if sublayer is not None]
    if len(found) < len(sublayers):
        return None
    attention = _part(layer, "self_attn")
    return Layers(
        found,
        len(found),
        layer.norm_first,  # type: ignore[arg-type]
        attention.num_heads,  # type: ignore[arg-type]
        attention.batch_first,  # type: ignore[arg-type]
        bypass.activation_name(layer.activation),
    )


def of_stack(layers: Iterable[Layers | None]) -> Layers | None:
    """What runs all of them, one after the other; None unless all could be read and are alike."""
    sublayers: list[Sublayer] = []
    first = None
    for layer in layers:
        if layer is None or (first is not None and layer[1:] != first[1:]):
            return None
        first = first or layer
        sublayers += layer.sublayers
    return None if first is None else first._replace(sublayers=sublayers)


def _sight(layers: Layers, given: TorchMasks, x: Tensor, source: Tensor) -> Sight | None:
    """None where the masks have to be obeyed, or refused, by modules."""
    mask, padding, is_causal = given
    if mask is None and padding is None:
        return None if is_causal else Sight()
    if (is_causal and mask is None) or (
        mask is not None and padding is not None and mask.dtype != padding.dtype
    ):
        return None
    combined = masks.for_attend(
        None if is_causal else mask, padding, x, source, 1 if layers.batch_first else 0,
        layers.heads,
    )  # fmt: skip
    return Sight(combined, is_causal)


def run(
    owner: torch.nn.Module,
    layers: Layers | None,
    x: Tensor,
    own: TorchMasks,
    memory: Tensor | None = None,
    cross: TorchMasks | None = None,
) -> Tensor | None:
    """x through all of them, or None where that is not one call's business.

    Args:
        owner: the module that was called.
        own: masks of self-attention; cross: of attention to the memory.
    """
    if layers is None or x.dim() != 3:
        return None
    sight: Sight | None = _sight(layers, own, x, x)
    memory_sight: Sight | None = Sight()
    if memory is not None and cross is not None:
        batch_dim = 0 if layers.batch_first else 1
        if (
            memory.dim() != 3
            or memory.shape[2] != x.shape[2]
            or memory.shape[batch_dim] != x.shape[batch_dim]
            or not cpu_blocks.fits(x, memory)
        ):
            return None
        memory_sight = _sight(layers, cross, x, memory)
    if sight is None or memory_sight is None:
        return None
    return cpu_blocks.layers(owner, *layers, x, sight, memory, memory_sight)


def run_rows(
    owner: torch.nn.Module,
    layers: Layers,
    x: Tensor,
    starts: Tensor,
    is_causal: bool,
    memory: Tensor | None = None,
    memory_starts: Tensor | None = None,
) -> Tensor:
    """Ragged: (rows, M), batch element b being rows starts[b] to starts[b + 1]."""
    return cpu_blocks.layers(
        owner, *layers, x, Sight(None, is_causal), memory, Sight(), starts, memory_starts
    )
