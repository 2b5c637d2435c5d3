"""Layers and stacks in one call each, where nobody could tell the difference.

`read_attention` and `read_feed_forward` give None where a sub-layer has to be composed of ops or
modules: gradients, active dropout, hooks, replaced modules, dtypes or devices other than the blocks'
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .. import dispatch
from ..backends import cpu_blocks
from ..backends.cpu_blocks import Kind, Sight, Sublayer
from . import fusion, masks
from .multihead_attention import MultiheadAttention

#: Cross-attention takes queries and keys from parts of one packed weight, cut between panels.
_PANEL = 32


class Layers(NamedTuple):
    """What one call runs: one or several layers, or a part of one."""

    #: The first layer.
    owner: torch.nn.Module
    sublayers: list[Sublayer]
    #: Sub-layers of a layer.
    each: int
    norm_first: bool
    heads: int
    batch_first: bool
    #: Of the networks, if any.
    activation: str | None

    def options(self) -> tuple[object, ...]:
        """What layers must have in common for one call."""
        return self[2:]


class TorchMasks(NamedTuple):
    """What a layer is told about the keys of an attention, in torch.nn's polarity."""

    attention: Tensor | None
    key_padding: Tensor | None
    is_causal: bool


def _part(module: torch.nn.Module, name: str) -> torch.nn.Module:
    # Module.__getattr__ takes ten times as long, and there are three dozen to get.
    return module._modules.get(name) or getattr(module, name)


def _read_norm(norm: torch.nn.Module, width: int) -> tuple[Tensor | None, Tensor | None] | None:
    if not fusion.is_unhooked(norm, fusion.LAYER_NORM) or norm.normalized_shape != (width,):
        return None
    return fusion.affine(norm)


def _inactive(dropout: torch.nn.Module) -> bool:
    return fusion.is_unhooked(dropout, fusion.DROPOUT) and (
        not dropout.training or bool(dropout.p == 0.0)
    )


def read_attention(
    layer: torch.nn.Module, attention: str, dropout: str, norm: str, x: Tensor, cross: bool = False
) -> Sublayer | None:
    """The sub-layer made of the layer's modules of these names, if it can be run on x."""
    if dispatch.is_traced():
        return None
    module, width = _part(layer, attention), x.shape[-1]
    # In training this is all that there is to see.
    weight = module._parameters.get("in_proj_weight")
    if weight is not None and torch.is_grad_enabled() and weight.requires_grad:
        return None
    if not (
        fusion.is_unhooked(module, (MultiheadAttention,))
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
    if last is None or not fusion.is_unhooked(out, fusion.LINEAR):
        return None
    projection = fusion.affine(module, "in_proj_weight", "in_proj_bias")
    parameters = (*projection, *fusion.affine(out), *last)
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
        and fusion.activation_name(layer.activation) is not None
        and fusion.is_unhooked(linear1, fusion.LINEAR)
        and fusion.is_unhooked(linear2, fusion.LINEAR)
        and _inactive(_part(layer, "dropout"))
        and _inactive(_part(layer, dropout))
        and width == linear1.in_features == linear2.out_features
        and linear1.out_features == linear2.in_features
    ):
        return None
    parameters = (*fusion.affine(linear1), *fusion.affine(linear2), *last)
    if not cpu_blocks.fits(x, *parameters):
        return None
    return Sublayer(Kind.FEED_FORWARD, parameters, norm_module.eps)  # type: ignore[arg-type]


def of_layer(
    layer: torch.nn.Module,
    sublayers: Sequence[Sublayer | None],
    attentions: Sequence[str] = ("self_attn",),
) -> Layers | None:
    """What runs these sub-layers of the layer; None unless all could be read.

    ``attentions`` are the names of the attentions among them, which have to be alike.
    """
    found = [sublayer for sublayer in sublayers if sublayer is not None]
    if len(found) < len(sublayers):
        return None
    modules = [_part(layer, name) for name in attentions]
    heads, batch_first = modules[0].num_heads, modules[0].batch_first
    if any(m.num_heads != heads or m.batch_first != batch_first for m in modules[1:]):
        return None
    activation = None
    if found[-1].kind == Kind.FEED_FORWARD:
        activation = fusion.activation_name(layer.activation)
    return Layers(
        layer, found, len(found), layer.norm_first, heads, batch_first, activation,  # type: ignore[arg-type]
    )  # fmt: skip


def of_stack(layers: Iterable[Layers | None]) -> list[Layers] | None:
    """What runs all of them, as few calls as possible; None unless all could be read."""
    calls: list[Layers] = []
    for layer in layers:
        if layer is None:
            return None
        if calls and layer.options() == calls[-1].options():
            calls[-1].sublayers.extend(layer.sublayers)
        else:
            calls.append(layer)
    return calls or None


def _sight(layers: Layers, given: TorchMasks, x: Tensor, source: Tensor) -> Sight | None:
    """None where the masks have to be obeyed, or refused, by modules."""
    mask, padding, is_causal = given
    if mask is None and padding is None:
        return None if is_causal else Sight()
    if (is_causal and mask is None) or (
        mask is not None and padding is not None and mask.dtype != padding.dtype
    ):
        return None
    if torch.is_grad_enabled() and any(m is not None and m.requires_grad for m in (mask, padding)):
        return None
    combined = masks.for_attend(
        None if is_causal else mask, padding, x, source, 1 if layers.batch_first else 0,
        layers.heads,
    )  # fmt: skip
    return Sight(combined, is_causal)


def _memory_sight(
    layers: Layers, given: TorchMasks | None, x: Tensor, memory: Tensor | None
) -> Sight | None:
    if memory is None or given is None:
        return Sight()
    batch_dim = 0 if layers.batch_first else 1
    if (
        memory.dim() != 3
        or memory.shape[2] != x.shape[2]
        or memory.shape[batch_dim] != x.shape[batch_dim]
        or not cpu_blocks.fits(x, memory)
    ):
        return None
    return _sight(layers, given, x, memory)


def run(
    calls: Sequence[Layers | None] | None,
    x: Tensor,
    own: TorchMasks,
    memory: Tensor | None = None,
    cross: TorchMasks | None = None,
) -> Tensor | None:
    """x through all of them, or None where modules have to be called.

    Args:
        own: masks of self-attention; cross: of attention to the memory.
    """
    if calls is None or x.dim() != 3:
        return None
    ready: list[tuple[Layers, Sight, Sight]] = []
    for layers in calls:
        if layers is None:
            return None
        sight = _sight(layers, own, x, x)
        memory_sight = _memory_sight(layers, cross, x, memory)
        if sight is None or memory_sight is None:
            return None
        ready.append((layers, sight, memory_sight))
    for layers, sight, memory_sight in ready:
        x = cpu_blocks.layers(*layers, x, sight, memory, memory_sight)
    return x


def run_rows(
    calls: Sequence[Layers],
    x: Tensor,
    starts: Tensor,
    is_causal: bool,
    memory: Tensor | None = None,
    memory_starts: Tensor | None = None,
) -> Tensor:
    """Ragged: (rows, M), batch element b being rows starts[b] to starts[b + 1]."""
    for layers in calls:
        x = cpu_blocks.layers(
            *layers, x, Sight(None, is_causal), memory, Sight(), starts, memory_starts
        )
    return x
