"""What cached decoding needs of a stack of layers, read from torch.nn modules or ours."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ... import nn
from ...nn.fusion import Layer, Norm, Unreadable, is_unhooked, read_layer, read_norm

_ATTENTION = (torch.nn.MultiheadAttention, nn.MultiheadAttention)
_ENCODER_LAYER = (torch.nn.TransformerEncoderLayer, nn.TransformerEncoderLayer)
_DECODER_LAYER = (torch.nn.TransformerDecoderLayer, nn.TransformerDecoderLayer)
_STACK = (
    torch.nn.TransformerEncoder,
    torch.nn.TransformerDecoder,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


class Stack(NamedTuple):
    """The layers of a `TransformerEncoder` or `TransformerDecoder`, all alike in ``norm_first``."""

    d_model: int
    heads: int
    norm_first: bool
    layers: list[Layer]
    #: The norm after the last layer, if any.
    final_norm: Norm | None


def read_stack(stack: Any, crossed: bool) -> Stack:
    """What a `TransformerDecoder` (crossed) or a `TransformerEncoder` consists of.

    Raises `Unreadable` if a layer is, if the layers differ, or their parameters in dtype or device.
    """
    if not is_unhooked(stack, _STACK):
        raise Unreadable("the stack is hooked or has a forward of its own")
    layers: list[Layer] = []
    for i, module in enumerate(stack.layers):
        if not is_unhooked(module, _DECODER_LAYER if crossed else _ENCODER_LAYER):
            raise Unreadable(f"layers.{i} is hooked or has a forward of its own")
        try:
            layers.append(read_layer(module, _ATTENTION))
        except Unreadable as reason:
            raise Unreadable(f"layers.{i}.{reason}") from None
    if not layers:
        raise Unreadable("the stack has no layers")
    first = layers[0]
    heads, d_model = first.sublayers[0].heads, first.sublayers[0].weight2.shape[0]
    for layer in layers:
        if layer.norm_first != first.norm_first:
            raise Unreadable("the layers differ in norm_first")
        if layer.sublayers[0].heads != heads:
            raise Unreadable("the layers differ in heads")
    if len({(p.dtype, p.device) for p in stack.parameters()}) != 1:
        raise Unreadable("its parameters differ in dtype or device")
    final = None if stack.norm is None else read_norm(stack.norm, d_model)
    return Stack(d_model, heads, first.norm_first, layers, final)
