"""Runs stacks on unpadded tokens: padding is removed, and zeros are returned in its place.

For bool key padding masks on the CPU. The tokens of all sequences lie behind each
other as rows (tokens, M); attention knows where each sequence begins; everything else works on rows
anyway. Taking hidden keys out keeps the order of the others, so causal attention stays what it was.
In inference layers that are alike are one call on rows; else, see `ragged_ops`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from . import fused_layers, ragged_ops
from .fused_layers import Masks
from .transformer_layers import TransformerDecoderLayer, TransformerEncoderLayer


class Rows(NamedTuple):
    """The real tokens of a batch."""

    values: Tensor  #: (tokens, M)
    starts: Tensor  #: (B + 1,), where each sequence begins
    places: Tensor | None  #: of the tokens among the batch's B * L places; None: all are real


def gather(x: Tensor, padding: Tensor | None, batch_first: bool) -> Rows:
    """The rows of (B, L, M) or (L, B, M) at which padding (B, L) is False."""
    x = x if batch_first else x.transpose(0, 1)
    batch, length, width = x.shape
    flat = x.reshape(batch * length, width)
    if padding is None:
        return Rows(flat, torch.arange(batch + 1) * length, None)
    real = padding.logical_not()
    places = real.flatten().nonzero().squeeze(1)
    starts = torch.zeros(batch + 1, dtype=torch.int64)
    torch.cumsum(real.sum(dim=1), dim=0, out=starts[1:])
    return Rows(flat.index_select(0, places), starts, places)


def scatter(rows: Rows, like: Tensor, batch_first: bool) -> Tensor:
    """The rows back in the layout of ``like``, zeros at padded places."""
    shape = like.shape if batch_first else like.transpose(0, 1).shape
    flat = rows.values
    if rows.places is not None:
        flat = flat.new_zeros((shape[0] * shape[1], shape[2]))
        flat.index_copy_(0, rows.places, rows.values)
    x = flat.view(shape)
    return x if batch_first else x.transpose(0, 1)


def clear(x: Tensor, padding: Tensor | None, layer: torch.nn.Module) -> Tensor:
    """``x`` with zeros at places of a bool padding mask, for where the layers ran on all places."""
    if padding is None or padding.dtype != torch.bool:
        return x
    if padding.dim() == 2 and not layer.self_attn.batch_first:  # type: ignore[union-attr]
        padding = padding.transpose(0, 1)
    return x.masked_fill(padding.unsqueeze(-1), 0.0)


def _padding_fits(padding: Tensor | None, x: Tensor, batch_first: bool) -> bool:
    return padding is None or (
        padding.dtype == torch.bool
        and padding.is_cpu
        and padding.dim() == 2
        and tuple(padding.shape) == (x.shape[0 if batch_first else 1], x.shape[batch_first])
    )


def _batch_first(layers: torch.nn.ModuleList) -> bool | None:
    """Where the batch is; None where layers do not agree."""
    found = {layer.self_attn.batch_first for layer in layers}  # type: ignore[union-attr]
    return found.pop() if len(found) == 1 else None  # type: ignore[return-value]


def encoder(
    layers: torch.nn.ModuleList,
    x: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
) -> Tensor | None:
    """The encoder's layers on real tokens only; None where that is not possible or of no use."""
    if padding is None or x.dim() != 3 or (mask is not None and not is_causal):
        return None
    found = fused_layers.find(layers, x, Masks(mask, None, is_causal), kind=TransformerEncoderLayer)
    if found is None and not all(ragged_ops.encoder_layer_fits(layer, x) for layer in layers):
        return None
    batch_first = _batch_first(layers)
    if batch_first is None or not _padding_fits(padding, x, batch_first):
        return None
    rows = gather(x, padding, batch_first)
    if found is not None:
        values = fused_layers.run(found, rows.values, None, rows.starts)
        return scatter(rows._replace(values=values), x, batch_first)
    places = ragged_ops.Places.of(padding, rows.places)
    values = rows.values
    for layer in layers:
        values = ragged_ops.encoder_layer(layer, values, places, is_causal)  # type: ignore[arg-type]
    return scatter(rows._replace(values=values), x, batch_first)


def decoder(
    layers: torch.nn.ModuleList,
    x: Tensor,
    memory: Tensor,
    mask: Tensor | None,
    memory_mask: Tensor | None,
    padding: Tensor | None,
    memory_padding: Tensor | None,
    is_causal: bool,
) -> Tensor | None:
    """The decoder's layers on real tokens of both sides; None as in `encoder`."""
    if (padding is None and memory_padding is None) or x.dim() != 3 or memory.dim() != 3:
        return None
    if memory_mask is not None or (mask is not None and not is_causal):
        return None
    own = Masks(mask, None, is_causal)
    found = fused_layers.find(layers, x, own, memory, kind=TransformerDecoderLayer)
    if found is None:
        return None
    batch_first = _batch_first(layers)
    if batch_first is None:
        return None
    if not (
        _padding_fits(padding, x, batch_first)
        and _padding_fits(memory_padding, memory, batch_first)
    ):
        return None
    rows = gather(x, padding, batch_first)
    source = gather(memory, memory_padding, batch_first)
    values = fused_layers.run(found, rows.values, source.values, rows.starts, source.starts)
    return scatter(rows._replace(values=values), x, batch_first)
