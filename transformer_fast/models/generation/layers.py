"""What cached decoding needs of a stack of layers, read from torch.nn modules or ours.

A stack is read only where calling its modules would do nothing else: no hooks, no subclasses with
a forward of their own, no parametrised weights. `read_stack` says what stands against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ... import nn
from ...nn import fusion

_ATTENTION = (torch.nn.MultiheadAttention, nn.MultiheadAttention)
_LAYER_NORM = (torch.nn.LayerNorm, nn.LayerNorm)
_LINEAR = fusion.LINEAR
_DROPOUT = (torch.nn.Dropout, torch.nn.Identity)
_ENCODER_LAYER = (torch.nn.TransformerEncoderLayer, nn.TransformerEncoderLayer)
_DECODER_LAYER = (torch.nn.TransformerDecoderLayer, nn.TransformerDecoderLayer)
_STACK = (
    torch.nn.TransformerEncoder,
    torch.nn.TransformerDecoder,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


class Unreadable(Exception):  # noqa: N818 - a reason, not an error
    """Why a stack of layers cannot be decoded with a cache."""


@dataclass
class AttentionWeights:
    """One attention's projections; in_weight (3M, M) holds those of query, key and value."""

    heads: int
    in_weight: Tensor
    in_bias: Tensor | None
    out_weight: Tensor
    out_bias: Tensor | None

    def of_query(self) -> tuple[Tensor, Tensor | None]:
        """The query's projection, (M, M) and (M,)."""
        width = self.in_weight.shape[1]
        return self.in_weight[:width], None if self.in_bias is None else self.in_bias[:width]


@dataclass
class FeedForwardWeights:
    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    bias2: Tensor | None
    activation: str | Callable[[Tensor], Tensor]


@dataclass
class NormWeights:
    """A layer norm; where ``module`` is not None it is to be called instead."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    module: torch.nn.Module | None


@dataclass
class LayerWeights:
    """One layer: its sub-layers, each with the norm before it (pre-norm) or behind it."""

    self_attention: AttentionWeights
    self_norm: NormWeights
    cross_attention: AttentionWeights | None
    cross_norm: NormWeights | None
    feed_forward: FeedForwardWeights
    feed_forward_norm: NormWeights


@dataclass
class StackWeights:
    d_model: int
    heads: int
    norm_first: bool
    layers: list[LayerWeights]
    #: The norm after the last layer, if any.
    final_norm: NormWeights | None


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise Unreadable(reason)


def _attention(name: str, module: Any) -> AttentionWeights:
    _require(fusion.is_unhooked(module, _ATTENTION), f"{name} is hooked or replaced")
    _require(module._qkv_same_embed_dim, f"{name} has keys or values of another size")
    _require(
        module.bias_k is None and module.bias_v is None and not module.add_zero_attn,
        f"{name} appends keys",
    )
    _require(fusion.is_unhooked(module.out_proj, _LINEAR), f"{name}.out_proj is hooked or replaced")
    out = module.out_proj
    return AttentionWeights(
        module.num_heads, module.in_proj_weight, module.in_proj_bias, out.weight, out.bias
    )


def _feed_forward(name: str, layer: Any) -> FeedForwardWeights:
    for part in ("linear1", "linear2"):
        plain = fusion.is_unhooked(getattr(layer, part), _LINEAR)
        _require(plain, f"{name}.{part} is hooked or replaced")
    activation = fusion.activation_name(layer.activation) or layer.activation
    one, two = layer.linear1, layer.linear2
    return FeedForwardWeights(one.weight, one.bias, two.weight, two.bias, activation)


def _norm(module: Any) -> NormWeights:
    if fusion.is_unhooked(module, _LAYER_NORM) and len(module.normalized_shape) == 1:
        return NormWeights(module.weight, module.bias, module.eps, None)
    return NormWeights(None, None, 0.0, module)


def _check_layer(name: str, layer: Any, crossed: bool) -> None:
    kinds = _DECODER_LAYER if crossed else _ENCODER_LAYER
    _require(fusion.is_unhooked(layer, kinds), f"{name} is hooked or has a forward of its own")
    for part in ("_sa_block", "_mha_block", "_ff_block"):
        _require(part not in layer.__dict__, f"{name}.{part} is replaced")
    for part in ("dropout", "dropout1", "dropout2", "dropout3"):
        module = getattr(layer, part, None)
        plain = module is None or fusion.is_unhooked(module, _DROPOUT)
        _require(plain, f"{name}.{part} is hooked or replaced")


def read_stack(stack: torch.nn.Module, crossed: bool) -> StackWeights:
    """The weights of a `TransformerDecoder` (crossed), or of a `TransformerEncoder`.

    Raises `Unreadable` with the reason if it cannot be decoded with a cache.
    """
    _require(fusion.is_unhooked(stack, _STACK), "the stack is hooked or has a forward of its own")
    modules: Any = stack.layers
    _require(len(modules) > 0, "the stack has no layers")
    for i, module in enumerate(modules):
        _check_layer(f"layers.{i}", module, crossed)
    first = modules[0]
    norm_first = bool(first.norm_first)
    heads, d_model = first.self_attn.num_heads, first.self_attn.embed_dim
    layers = []
    for i, module in enumerate(modules):
        name = f"layers.{i}"
        _require(bool(module.norm_first) == norm_first, "the layers differ in norm_first")
        own = _attention(f"{name}.self_attn", module.self_attn)
        _require(own.heads == heads, "the layers differ in heads")
        layers.append(
            LayerWeights(
                own,
                _norm(module.norm1),
                _attention(f"{name}.multihead_attn", module.multihead_attn) if crossed else None,
                _norm(module.norm2) if crossed else None,
                _feed_forward(name, module),
                _norm(module.norm3 if crossed else module.norm2),
            )
        )
    parameters = list(stack.parameters())
    _require(
        len({(p.dtype, p.device) for p in parameters}) == 1,
        "its parameters differ in dtype or device",
    )
    final = None if stack.norm is None else _norm(stack.norm)
    return StackWeights(d_model, heads, norm_first, layers, final)
