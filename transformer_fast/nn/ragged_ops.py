"""Encoder layers on unpadded tokens by the public ops: for training, and for other dtypes.

Projections, FFN and norms, most of the work, see the real tokens only. For attention the projected
tokens are put back into (B, T), where padded keys are hidden and padded queries are not read again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import dispatch, functional
from ..functional.attention import attend
from . import fusion, masks
from .multihead_attention import MultiheadAttention
from .transformer_layers import TransformerEncoderLayer


class Places(NamedTuple):
    """Where the real tokens of a batch stand."""

    batch: int
    length: int
    places: Tensor  #: of the tokens among the batch's B * T places
    key_lengths: Tensor | None  #: (B,), if padding is at the end of each sequence
    mask: Tensor | None  #: else (B, 1, 1, T), True = real

    @staticmethod
    def of(padding: Tensor, places: Tensor | None) -> Places:
        assert places is not None
        batch, length = padding.shape
        return Places(batch, length, places, *masks.of_real(padding))


def encoder_layer_fits(layer: torch.nn.Module, x: Tensor) -> bool:
    """Whether running the layer on rows is what calling it would do, and nothing else."""
    if dispatch.is_traced() or type(x) not in (Tensor, torch.nn.Parameter) or not x.is_cpu:
        return False
    if not fusion.is_unhooked(layer, (TransformerEncoderLayer,)):
        return False
    try:
        sublayers = fusion.read_layer(layer, (MultiheadAttention,)).sublayers
    except fusion.Unreadable:
        return False
    return x.shape[-1] == sublayers[0].weight1.shape[1] and all(
        sublayer.norm.module is None for sublayer in sublayers
    )


def _attend(module: MultiheadAttention, x: Tensor, places: Places, is_causal: bool) -> Tensor:
    """Self-attention of rows (tokens, M) to rows, out_proj included."""
    projected = functional.linear(x, module.in_proj_weight, module.in_proj_bias)
    batch, length = places.batch, places.length
    spread = projected.new_zeros((batch * length, projected.shape[1]))
    spread = spread.index_copy(0, places.places, projected)
    heads = spread.view(batch, length, 3, module.num_heads, module.head_dim)
    query, key, value = (part.transpose(1, 2) for part in heads.unbind(2))
    output, _ = attend(
        query,
        key,
        value,
        places.mask,
        places.key_lengths,
        is_causal,
        dropout_p=module.dropout if module.training else 0.0,
    )
    rows = output.transpose(1, 2).reshape(batch * length, x.shape[1])
    return fusion.linear(module.out_proj, rows.index_select(0, places.places))


def encoder_layer(
    layer: TransformerEncoderLayer, x: Tensor, places: Places, is_causal: bool
) -> Tensor:
    """The layer on rows (tokens, M)."""

    def feed_forward(y: Tensor) -> Tensor:
        return fusion.feed_forward(y, layer.linear1, layer.activation, layer.dropout, layer.linear2)

    if layer.norm_first:
        attended = _attend(layer.self_attn, layer.norm1(x), places, is_causal)
        y, x = fusion.add_norm(attended, layer.dropout1, x, layer.norm2)
        return x + layer.dropout2(feed_forward(y))
    attended = _attend(layer.self_attn, x, places, is_causal)
    x, _ = fusion.add_norm(attended, layer.dropout1, x, layer.norm1)
    return fusion.add_norm(feed_forward(x), layer.dropout2, x, layer.norm2)[0]
