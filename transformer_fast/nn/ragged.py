"""Runs stacks on unpadded tokens: padding is removed, and zeros are returned in its place.

For bool key padding masks on the CPU. The tokens of all sequences lie behind each
other as rows (tokens, M); attention knows where each sequence begins; everything else works on rows
anyway. Taking hidden keys out keeps the order of the others, so causal attention stays what it was.
In inference layers that are alike are one call on rows. For training, and for other dtypes, encoder
layers are composed of the public ops: projections, FFN and norms, most of the work, see rows only. For
attention the projected tokens are put back into (B, L), where padded keys are hidden and padded
queries are not read again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import functional
from .._context import are_plain_on_cpu, is_traced
from ..functional.attention import attend as attend_to_heads
from . import fused_layers, fusion, masks
from .fused_layers import Masks
from .multihead_attention import MultiheadAttention
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


class Places(NamedTuple):
    """Where the real tokens of a batch stand."""

    batch: int
    length: int
    places: Tensor  #: of the tokens among the batch's B * T places
    key_lengths: Tensor | None  #: (B,), if padding is at the end of each sequence
    mask: Tensor | None  #: else (B, 1, 1, T), True = real

    @staticmethod
    def of(padding: Tensor | None, places: Tensor | None) -> Places:
        assert padding is not None
        assert places is not None
        batch, length = padding.shape
        return Places(batch, length, places, *masks.of_real(padding))


def _fits(layer: torch.nn.Module, x: Tensor) -> bool:
    """Whether running the layer on rows is what calling it would do, and nothing else."""
    if is_traced() or not are_plain_on_cpu((x,)):
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
    output, _ = attend_to_heads(
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


def _on_rows(layer: TransformerEncoderLayer, x: Tensor, places: Places, is_causal: bool) -> Tensor:
    """The layer on rows (tokens, M)."""

    def attend(y: Tensor) -> tuple[Tensor, torch.nn.Module]:
        return _attend(layer.self_attn, y, places, is_causal), layer.dropout1

    return fusion.compose(layer, x, (attend,))


def run(
    layers: torch.nn.ModuleList,
    x: Tensor,
    own: Masks,
    padding: Tensor | None,
    memory: Tensor | None = None,
    cross: Masks = Masks(),  # noqa: B008 - it cannot be changed
) -> Tensor | None:
    """A stack's layers on real tokens only; None where that is not possible or of no use.

    ``padding``: of x; what pads the memory is a mask of ``cross``.
    """
    if (padding is None and cross.key_padding is None) or x.dim() != 3:
        return None
    if cross.attention is not None or (own.attention is not None and not own.is_causal):
        return None
    if memory is not None and memory.dim() != 3:
        return None
    kind = TransformerEncoderLayer if memory is None else TransformerDecoderLayer
    own = own._replace(key_padding=None)
    found = fused_layers.find(layers, x, own, memory, kind=kind)
    if found is None and (memory is not None or not all(_fits(layer, x) for layer in layers)):
        return None
    first = {layer.self_attn.batch_first for layer in layers}  # type: ignore[union-attr]
    if len(first) != 1:
        return None
    batch_first: bool = first.pop()  # type: ignore[assignment]
    if not _padding_fits(padding, x, batch_first):
        return None
    if memory is not None and not _padding_fits(cross.key_padding, memory, batch_first):
        return None
    rows = gather(x, padding, batch_first)
    values = rows.values
    if found is not None:
        source = starts = None
        if memory is not None:
            source, starts, _ = gather(memory, cross.key_padding, batch_first)
        values = fused_layers.run(found, values, source, rows.starts, starts)
    else:
        places = Places.of(padding, rows.places)
        for layer in layers:
            values = _on_rows(layer, values, places, own.is_causal)  # type: ignore[arg-type]
    return scatter(rows._replace(values=values), x, batch_first)
