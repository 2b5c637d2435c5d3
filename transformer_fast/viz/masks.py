"""Masks: what each of them hides, and what they hide together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from ..reference.attention import visible_places
from . import style


class _Panel(NamedTuple):
    title: str
    #: (T, S): where a query may attend, and what is added to the scores there.
    visible: Tensor
    added: Tensor | None = None


def masks(
    query_length: int,
    key_length: int | None = None,
    *,
    attn_mask: Tensor | None = None,
    key_padding: Tensor | None = None,
    key_lengths: Tensor | None = None,
    is_causal: bool = False,
    true_means: str = "visible",
    index: int = 0,
    head: int = 0,
    query_tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Each given mask of attention, and all together, with what its True means above it.

    Blue: the query (row) may attend to the key (column); grey: hidden; other colours: added to the
    score. Outlined rows see nothing: their output is 0.

    Args:
        query_length, key_length: T and S; key_length None: S is T.
        attn_mask: bool or float, broadcastable to (B, H, T, S). Float is added, -inf hides.
        key_padding: bool, broadcastable to (B, S), True at padding as in torch.nn.
        key_lengths: int (B,); keys from there on are hidden.
        is_causal: query t sees keys s <= t only.
        true_means: what True of a bool attn_mask means: "visible" as in
            `transformer_fast.functional`, or "hidden" as in torch.nn.
        index, head: which sequence of the batch, which head.
        query_tokens, key_tokens: tokens for the axes; None: their places.
        title: of the whole picture.

    Raises:
        TypeError: a mask of another dtype.
        ValueError: a shape that does not fit; true_means that is neither.
        IndexError: no such sequence or head.
    """
    rows = _length("query_length", query_length)
    columns = rows if key_length is None else _length("key_length", key_length)
    if true_means not in ("visible", "hidden"):
        raise ValueError(f'true_means must be "visible" or "hidden", not {true_means!r}')
    if key_tokens is None and rows == columns:
        key_tokens = query_tokens
    queries = style.check_tokens("query_tokens", query_tokens, rows)
    keys = style.check_tokens("key_tokens", key_tokens, columns)

    # The reference decides what is visible; of the tensors it only wants the sizes.
    like = (torch.empty(rows, 0), torch.empty(columns, 0))
    everywhere = torch.ones((rows, columns), dtype=torch.bool)
    panels: list[_Panel] = []
    added: Tensor | None = None

    def panel(title: str, visible: Tensor | None, added: Tensor | None = None) -> None:
        assert visible is not None
        panels.append(_Panel(title, everywhere & visible.reshape(visible.shape[-2:]), added))

    if attn_mask is not None:
        mask = _attn_mask(attn_mask, rows, columns, index, head)
        if mask.dtype == torch.bool:
            said = "may attend" if true_means == "visible" else "hidden (torch.nn)"
            mask = mask if true_means == "visible" else ~mask
            panel(f"attn_mask\nbool: True = {said}", mask)
        else:
            added = mask.masked_fill(mask == -math.inf, 0.0)
            panel(
                "attn_mask\nfloat: added; -inf = hidden",
                visible_places(*like, mask, None, False),
                added,
            )
    if key_padding is not None:
        padding = _key_padding(key_padding, columns, index)
        panel("key_padding\nbool: True = padding, hidden", ~padding[None])
    if key_lengths is not None:
        lengths = _key_lengths(key_lengths, columns, index)
        panel(
            f"key_lengths\n{int(lengths)} keys; later ones hidden",
            visible_places(*like, None, lengths, False),
        )
    if is_causal:
        panel("is_causal\nquery t sees keys s <= t", visible_places(*like, None, None, True))
    if len(panels) != 1:
        together = everywhere.clone()
        for one in panels:
            together &= one.visible
        panel("all together" if panels else "no mask\nevery query sees every key", together, added)
    return _draw(panels, queries, keys, title)


def _length(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value


def _attn_mask(value: Tensor, rows: int, columns: int, index: int, head: int) -> Tensor:
    mask = style.check_tensor("attn_mask", value, "a bool or floating-point Tensor")
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            raise TypeError(f"attn_mask must be bool or floating point, not {mask.dtype}")
        mask = style.check_float("attn_mask", mask)
    if mask.isnan().any():
        raise ValueError("attn_mask must not hold NaN")
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    if mask.dim() > 4 or shape[2] not in (1, rows) or shape[3] not in (1, columns):
        raise ValueError(
            f"attn_mask must be broadcastable to (B, H, {rows}, {columns}), not {list(mask.shape)}"
        )
    mask = mask.reshape(shape)
    batch, heads = shape[:2]
    chosen = mask[
        0 if batch == 1 else style.check_index("index", index, batch),
        0 if heads == 1 else style.check_index("head", head, heads),
    ]
    return chosen.expand(rows, columns)


def _key_padding(value: Tensor, columns: int, index: int) -> Tensor:
    padding = style.check_tensor("key_padding", value, "a bool Tensor, True at padding")
    if padding.dim() == 2:
        batch = padding.shape[0]
        padding = padding[0 if batch == 1 else style.check_index("index", index, batch)]
    found = style.check_padding("key_padding", padding, columns)
    assert found is not None
    return found


def _key_lengths(value: Tensor, columns: int, index: int) -> Tensor:
    lengths = style.check_tensor("key_lengths", value, "an int Tensor")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"key_lengths must be int32 or int64, not {lengths.dtype}")
    if lengths.dim() != 1 or lengths.numel() == 0:
        raise ValueError(f"key_lengths must have shape (B,), not {list(lengths.shape)}")
    batch = lengths.shape[0]
    place = 0 if batch == 1 else style.check_index("index", index, batch)
    if not 0 <= int(lengths[place]) <= columns:
        raise ValueError(f"key_lengths must be in [0, {columns}], not {int(lengths[place])}")
    return lengths[place : place + 1]


def _draw(
    panels: Sequence[_Panel], queries: Sequence[str], keys: Sequence[str], title: str | None
) -> Figure:
    added = [p.added if p.added is not None and p.added.any() else None for p in panels]
    extreme = max((float(a.abs().max()) for a in added if a is not None), default=0.0)
    maps = [
        style.Map(p.title, p.visible.byte(), ~p.visible)
        if a is None
        else style.Map(p.title, a, ~p.visible, (-extreme, extreme))
        for p, a in zip(panels, added, strict=True)
    ]
    blind = (~panels[-1].visible.any(1)).nonzero()[:, 0].tolist()
    outline: dict[str, Any] = {"facecolor": "none", "edgecolor": style.BLIND, "linewidth": 1.5}
    legend = [style.legend_entry("may attend", style.VISIBLE)] if None in added else []
    legend.append(style.legend_entry("hidden"))
    if blind:
        legend.append(Patch(label="sees nothing: output 0", **outline))
    figure, axes = style.draw_maps(
        [maps], queries, keys, 5.0 if len(maps) == 1 else 2.6, 2.1, "added to the score", legend,
        title,
    )  # fmt: skip
    for place in axes[0]:
        style.cell_borders(place, len(queries), len(keys))
    axes[0, 0].set_ylabel("query", fontsize=style.LABEL_SIZE)
    for row in blind:
        box = Rectangle((-0.5, row - 0.5), len(keys), 1.0, clip_on=False, zorder=3, **outline)
        axes[0, -1].add_patch(box)
    return figure
