"""Runs stacks of layers, if possible on the real tokens only, with zeros at padded places.

For bool key padding masks on the CPU. The real tokens of all sequences are packed into rows (tokens, M);
attention gets the row at which each sequence begins, and all other ops work row by row. Removing hidden
keys keeps the order of the others, so causal attention stays causal. In inference, layers that are
alike are one call on these rows. In training, and for other dtypes, encoder layers are composed of the
public ops: projections, FFN and norms, most of the work, run on rows. For attention the projected
tokens are scattered to (B, L), where padded keys are hidden and padded queries are not computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._context import are_plain_on_cpu, is_traced
from ..functional.attention import attend as attend_to_heads
from ..ops.arguments import AttentionArguments
from ..recipe import Sublayer
from . import fused_layers, fusion, masks
from .bound import Bound
from .fused_layers import Masks
from .guard import Unreadable
from .int8 import run_linear
from .transformer_layers import TransformerDecoderLayer, TransformerEncoderLayer


class Rows(NamedTuple):
    """The real tokens of a batch."""

    values: Tensor  #: (tokens, M)
    starts: Tensor  #: (B + 1,), the row at which each sequence begins
    places: Tensor | None  #: indices of the tokens among the B * L places; None: all are real


def gather(x: Tensor, padding: Tensor | None, batch_first: bool) -> Rows:
    """Returns the rows of (B, L, M) or (L, B, M) at which padding (B, L) is False."""
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
    """Returns the rows in the layout of ``like``, with zeros at padded places."""
    shape = like.shape if batch_first else like.transpose(0, 1).shape
    flat = rows.values
    if rows.places is not None:
        flat = flat.new_zeros((shape[0] * shape[1], shape[2]))
        flat.index_copy_(0, rows.places, rows.values)
    x = flat.view(shape)
    return x if batch_first else x.transpose(0, 1)


def _padding_fits(padding: Tensor | None, x: Tensor, batch_first: bool) -> bool:
    return padding is None or (
        padding.dtype == torch.bool
        and padding.is_cpu
        and padding.dim() == 2
        and tuple(padding.shape) == (x.shape[0 if batch_first else 1], x.shape[batch_first])
    )


def _bound_for_ops(
    kind: type[torch.nn.Module], layers: torch.nn.ModuleList, x: Tensor
) -> Bound | None:
    """Returns encoder layers that may be composed on rows; None if their modules must be called."""
    if is_traced() or not are_plain_on_cpu((x,)):
        return None
    try:
        bound = fused_layers.bind(layers, kind)
        return bound if all(group.width == x.shape[-1] for group in bound.groups) else None
    except Unreadable:
        return None


def _compose(bound: Bound, rows: Rows, padding: Tensor | None, is_causal: bool) -> Tensor:
    """Returns the result (tokens, M) of encoder layers that are composed on rows."""
    assert padding is not None
    assert rows.places is not None
    places, (batch, length) = rows.places, padding.shape
    key_lengths, mask = masks.from_padding_mask(padding)

    def attend(x: Tensor, one: Sublayer[Any], dropout_p: float) -> Tensor:
        joined = one.maps[0]
        projected = run_linear(x, joined.weight, joined.bias)
        spread = projected.new_zeros((batch * length, projected.shape[1]))
        spread = spread.index_copy(0, places, projected)
        query, key, value = (
            part.transpose(1, 2) for part in spread.view(batch, length, 3, one.heads, -1).unbind(2)
        )
        arguments = AttentionArguments(
            query, key, value, mask, key_lengths, is_causal, dropout_p=dropout_p
        )
        output, _ = attend_to_heads(arguments)
        return output.transpose(1, 2).reshape(batch * length, -1).index_select(0, places)

    x = rows.values
    for layer, dropouts in zip(bound.layers, bound.dropouts, strict=True):
        x = fusion.compose_bound(layer, dropouts, x, attend)
    return x


def _run_unpadded(
    kind: type[torch.nn.Module],
    layers: torch.nn.ModuleList,
    x: Tensor,
    own: Masks,
    padding: Tensor | None,
    memory: Tensor | None,
    cross: Masks,
) -> Tensor | None:
    """Returns the stack's output, computed on real tokens only; None if that is not possible or there
    is no padding to skip."""
    if x.dim() != 3 or (memory is not None and memory.dim() != 3):
        return None
    if kind is TransformerDecoderLayer and memory is None:
        return None
    if padding is None and (cross.key_padding is None or own.key_padding is not None):
        return None
    if cross.attention is not None or (own.attention is not None and not own.is_causal):
        return None
    own = own._replace(key_padding=None)
    calls = fused_layers.find(layers, x, own, memory, kind=kind)
    bound = None
    if calls is None:
        bound = None if memory is not None else _bound_for_ops(kind, layers, x)
        if bound is None:
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
    if bound is not None:
        values = _compose(bound, rows, padding, own.is_causal)
    else:
        source = starts = None
        if memory is not None:
            source, starts, _ = gather(memory, cross.key_padding, batch_first)
        assert calls is not None
        values = fused_layers.run(calls, rows.values, source, rows.starts, starts)
    return scatter(rows._replace(values=values), x, batch_first)


def run_stack(
    kind: type[torch.nn.Module],
    layers: torch.nn.ModuleList,
    x: Tensor,
    own: Masks,
    padding: Tensor | None,
    memory: Tensor | None = None,
    cross: Masks = Masks(),  # noqa: B008 - it cannot be changed
) -> Tensor:
    """Returns the output of a stack: on real tokens, else with alike layers in one call, else layer by
    layer, whichever is possible first.

    Args:
        kind: `TransformerEncoderLayer` or `TransformerDecoderLayer`; layers may be of other classes.
        own, cross: masks of self-attention and of attention to the memory.
        padding: (B, L), True at places of x where the output is zero; None: no such places.
    """
    output = _run_unpadded(kind, layers, x, own, padding, memory, cross)
    if output is not None:
        return output
    output = fused_layers.try_run(layers, x, own, memory, cross, kind=kind)
    if output is None:
        output = x
        for layer in layers:
            if kind is TransformerEncoderLayer:
                output = layer(
                    output, src_mask=own.attention, is_causal=own.is_causal,
                    src_key_padding_mask=own.key_padding,
                )  # fmt: skip
            else:
                output = layer(
                    output, memory, tgt_mask=own.attention, memory_mask=cross.attention,
                    tgt_key_padding_mask=own.key_padding,
                    memory_key_padding_mask=cross.key_padding, tgt_is_causal=own.is_causal,
                    memory_is_causal=cross.is_causal,
                )  # fmt: skip
    if padding is None or padding.dtype != torch.bool:
        return output
    if padding.dim() == 2 and not layers[0].self_attn.batch_first:  # type: ignore[union-attr]
        padding = padding.transpose(0, 1)
    return output.masked_fill(padding.unsqueeze(-1), 0.0)
