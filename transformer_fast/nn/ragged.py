"""Runs stacks of layers, if possible on the real tokens only, with zeros at padded positions.

For bool key padding masks on the CPU. The real tokens of all sequences are packed into rows (tokens, M);
attention gets the row at which each sequence begins, and all other ops work row by row. Removing hidden
keys keeps the order of the others, so causal attention stays causal. In inference, layers that are
alike are one call on these rows. In training, and for other dtypes, encoder layers are composed of the
public ops: projections, FFN and norms, most of the work, run on rows. For attention the projected
tokens are scattered to (B, L), where padded keys are hidden and padded queries are not computed.
"""

from __future__ import annotations

import functools
from typing import Any

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


class RealPositions:
    """The positions of real tokens in a batch (B, L); its rows are these tokens, one sequence after the
    other."""

    def __init__(self, real: Tensor) -> None:
        self.real = real  #: (B, L) bool

    @functools.cached_property
    def indices(self) -> Tensor:
        """Returns the indices (N,) of the real tokens among the B * L positions."""
        return self.real.flatten().nonzero().squeeze(1)

    @functools.cached_property
    def starts(self) -> Tensor:
        """Returns the row at which each sequence begins, (B + 1,) int32."""
        lengths = self.real.sum(1, dtype=torch.int32)
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
        torch.cumsum(lengths, 0, out=starts[1:])
        return starts

    def gather(self, x: Tensor) -> Tensor:
        """Returns the rows (N, ...) of x (B, L, ...)."""
        return x.flatten(0, 1).index_select(0, self.indices)

    def put_back(self, rows: Tensor) -> Tensor:
        """Returns (B, L, ...) with zeros at padded positions."""
        flat = rows.new_zeros((self.real.numel(), *rows.shape[1:]))
        return flat.index_copy_(0, self.indices, rows).unflatten(0, self.real.shape)


def _gather(
    x: Tensor, padding: Tensor | None, batch_first: bool
) -> tuple[Tensor, Tensor, RealPositions | None]:
    """Returns the rows (N, M) of x (B, L, M) or (L, B, M) where padding (B, L) is False; the row at
    which each sequence begins; and the positions of the rows, None without padding."""
    x = x if batch_first else x.transpose(0, 1)
    if padding is None:
        return x.flatten(0, 1), torch.arange(len(x) + 1) * x.shape[1], None
    positions = RealPositions(padding.logical_not())
    return positions.gather(x), positions.starts, positions


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
    """Returns the layers as ops on rows (N, M) can run them; None if modules must be called."""
    if is_traced() or not are_plain_on_cpu((x,)):
        return None
    try:
        bound = fused_layers.bind(layers, kind)
        return bound if all(group.width == x.shape[-1] for group in bound.groups) else None
    except Unreadable:
        return None


def _compose(
    bound: Bound, x: Tensor, at: RealPositions, padding: Tensor, is_causal: bool
) -> Tensor:
    """Returns the result of encoder layers that are composed on rows x (N, M)."""
    key_lengths, mask = masks.from_padding_mask(padding)

    def attend(x: Tensor, one: Sublayer[Any], dropout_p: float) -> Tensor:
        joined = one.maps[0]
        projected = run_linear(x, joined.weight, joined.bias)
        spread = at.put_back(projected).unflatten(2, (3, one.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in spread.unbind(2))
        arguments = AttentionArguments(
            query, key, value, mask, key_lengths, is_causal, dropout_p=dropout_p
        )
        output, _ = attend_to_heads(arguments)
        return at.gather(output.transpose(1, 2).flatten(2))

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
    rows, starts, positions = _gather(x, padding, batch_first)
    if calls is not None:
        source = memory_starts = None
        if memory is not None:
            source, memory_starts, _ = _gather(memory, cross.key_padding, batch_first)
        rows = fused_layers.run(calls, rows, source, starts, memory_starts)
    elif bound is not None and positions is not None and padding is not None:
        rows = _compose(bound, rows, positions, padding, own.is_causal)
    shape = x.shape if batch_first else x.transpose(0, 1).shape
    y = rows.view(shape) if positions is None else positions.put_back(rows)
    return y if batch_first else y.transpose(0, 1)


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
        padding: (B, L), True at positions of x where the output is zero; None: no such positions.
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
