"""Scaled dot-product attention on one GPU: the launchers.

Shapes: query (B, H, T, D), key (B, Hkv, S, D), value (B, Hkv, S, DV), attn_mask broadcastable to
(B, H, T, S), key_lengths (B,). D and DV up to 256, padded to a power of two inside the kernel.
What is hidden is decided as in the reference; see `attention_kernel` for NaN at hidden places.
Packed sequences are tensors of (1, H, rows, D), read in place: lengths are where each begins.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import config
from .attention_decode import attention_decode, decodes
from .attention_kernel import attention_forward_kernel
from .attention_weights import attention_weights
from .mask_tiles import Mask, TileLists, prepare_mask, tile_lists
from .philox import Dropout, dropout_arguments, seed_for
from .runtime import ceil_div, dot_precision, launch, next_power_of_2, with_unit_stride
from .tiles import FLOAT_MASK, LOG2E


class Problem(NamedTuple):
    """One call of attention, as every kernel of it needs it."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask
    lengths: Tensor | None
    causal: bool
    scale: float
    natural: bool
    dropout: Dropout
    seed: Tensor | None
    sizes: tuple[int, int, int, int]
    group: int
    architecture: int
    query_lengths: Tensor | None = None
    packed: bool = False

    @property
    def head(self) -> tuple[int, int]:
        return self.query.shape[-1], self.value.shape[-1]

    def strides(self, x: Tensor) -> tuple[int, ...]:
        """Of batch, heads and rows; packed sequences differ by the row they begin at only."""
        _, heads, rows, _ = x.stride()
        return 0 if self.packed else x.stride(0), heads, rows

    @property
    def stride_length(self) -> int:
        return 0 if self.lengths is None else self.lengths.stride(0)

    @property
    def stride_query_length(self) -> int:
        return 0 if self.query_lengths is None else self.query_lengths.stride(0)

    def list_arguments(self, lists: TileLists | None) -> tuple[int, int, int]:
        """Strides and capacity of the lists; packed sequences have none, but rows to stay within."""
        if lists is not None:
            return lists[2:]
        return (self.query.shape[2], self.key.shape[2], 0) if self.packed else (0, 0, 0)

    @property
    def half(self) -> bool:
        return self.query.dtype != torch.float32

    @property
    def heavy(self) -> bool:
        """Whether kernels need registers beyond those of the plain case."""
        return self.dropout.active or self.mask.kind == FLOAT_MASK

    @property
    def kernel_scale(self) -> float:
        return self.scale if self.natural else self.scale * LOG2E

    def tile(self, kernel: str) -> config.AttentionTile:
        """The tile of a kernel, as `config` names it."""
        return config.attention(kernel, self.architecture, max(self.head), self.half, self.heavy)

    def options(self, tile: config.AttentionTile) -> dict[str, Any]:
        """How kernels on this tile are launched, and their `constants`."""
        return {
            "warps": tile.warps,
            "stages": tile.stages,
            "BLOCK_T": tile.queries,
            "BLOCK_S": tile.keys,
            **self.constants(),
        }

    def constants(self) -> dict[str, object]:
        """The compile-time constants that all attention kernels share."""
        head, head_value = self.head
        return {
            "D": head,
            "DV": head_value,
            "BLOCK_D": max(16, next_power_of_2(head)),
            "BLOCK_DV": max(16, next_power_of_2(head_value)),
            "CAUSAL": self.causal,
            "MASK": self.mask.kind,
            "MASK_ROWS": self.mask.strides[2] != 0,
            "DROPOUT": self.dropout.active,
            "NATURAL": self.natural,
            "PRECISION": dot_precision(self.query.dtype),
        }

    def lists(self, tile: config.AttentionTile, by_keys: bool = False) -> TileLists | None:
        """Lists of visible tiles, if there is a mask and looking at it pays."""
        if self.mask.data is None:
            return None
        across = ceil_div(self.sizes[3], tile.keys)
        if not config.lists_pay(
            self.architecture, math.prod(self.sizes), self.mask.data.numel(), self.sizes[2], across
        ):
            return None
        granule = config.attention_granule(self.architecture, max(self.head), self.half)
        block = (tile.queries, tile.keys)
        return tile_lists(self.mask, self.sizes, self.lengths, self.causal, granule, block, by_keys)


def make_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    query_lengths: Tensor | None = None,
    longest_queries: int = -1,
    longest_keys: int = -1,
) -> Problem:
    batch, heads, queries, _ = query.shape
    keys = key.shape[2]
    packed = longest_queries >= 0
    if packed:
        assert key_lengths is not None
        assert query_lengths is not None
        assert attn_mask is None
        batch, queries, keys = query_lengths.shape[0] - 1, longest_queries, longest_keys
    mask = prepare_mask(attn_mask)
    natural = _is_natural(query, attn_mask, scale)
    dropout = dropout_arguments(dropout_p)
    return Problem(
        with_unit_stride(query),
        with_unit_stride(key),
        with_unit_stride(value),
        mask,
        key_lengths,
        bool(is_causal),
        float(scale),
        natural,
        dropout,
        seed_for(dropout, seed, query.device),
        (batch, heads, queries, keys),
        heads // key.shape[1],
        config.architecture(query.device),
        query_lengths,
        packed,
    )


def _is_natural(query: Tensor, attn_mask: Tensor | None, scale: float) -> bool:
    """Whether scores are kept as they are, and not as powers of two.

    Natural scores also keep the norm apart, which rounds less: worth it in fp32.
    """
    is_added = attn_mask is not None and attn_mask.dtype != torch.bool
    return is_added or scale <= 0.0 or query.dtype == torch.float32


def log_sum_exp(
    query: Tensor, attn_mask: Tensor | None, scale: float, shift: Tensor, norm: Tensor
) -> Tensor:
    """As `functional.attention.LOG_SUM_EXP` has it."""
    natural = _is_natural(query, attn_mask, scale)
    return shift + norm.log() if natural else shift / LOG2E


def like_heads(query: Tensor, size: int, packed: bool = False) -> Tensor:
    """An empty (B, H, T, size); in memory (B, T, H, size), so that joining the heads is free.

    ``packed``: full of zeros, for the rows that no sequence has.
    """
    batch, heads, length, _ = query.shape
    strides = (length * heads * size, size, heads * size, 1)
    found = query.new_empty_strided((batch, heads, length, size), strides)
    return found.zero_() if packed else found


def gradient_like(tensor: Tensor, packed: bool) -> Tensor:
    """An empty tensor with heads and positions in memory as the tensor has them."""
    if tensor.stride(1) < tensor.stride(2):
        return like_heads(tensor, tensor.shape[-1], packed)
    return tensor.new_zeros(tensor.shape) if packed else tensor.new_empty(tensor.shape)


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    need_weights: bool,
    query_lengths: Tensor | None = None,
    longest_queries: int = -1,
    longest_keys: int = -1,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The operator ``attention_training``: output, weights, and (B, H, T) fp32 shift and norm."""
    problem = make_problem(
        query, key, value, attn_mask, key_lengths, is_causal, scale, dropout_p, seed, query_lengths,
        longest_queries, longest_keys,
    )  # fmt: skip
    output, shift, norm = _forward(problem)
    weights = attention_weights(problem, shift, norm) if need_weights else None
    return output, weights, shift, norm


def _forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, queries, keys = problem.sizes
    q, k, v, mask = problem.query, problem.key, problem.value, problem.mask
    output = like_heads(q, v.shape[-1], problem.packed)
    shift = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    norm = torch.empty_like(shift)
    if decodes(problem):
        attention_decode(problem, output, shift, norm)
        return output, shift, norm
    tile = problem.tile("attention_forward")
    lists = None if mask.data is None else problem.lists(tile)
    counts, numbers = (None, None) if lists is None else lists[:2]
    launch(
        attention_forward_kernel,
        (ceil_div(queries, tile.queries) * batch * heads,),
        q,
        k,
        v,
        mask.data,
        problem.lengths,
        problem.query_lengths,
        problem.seed,
        counts,
        numbers,
        output,
        shift,
        norm,
        *problem.strides(q),
        *problem.strides(k),
        *problem.strides(v),
        *problem.strides(output),
        *mask.strides,
        problem.stride_length,
        problem.stride_query_length,
        *problem.list_arguments(lists),
        heads,
        problem.group,
        queries,
        keys,
        problem.kernel_scale,
        problem.dropout.limit,
        problem.dropout.scale,
        LISTED=lists is not None,
        RAGGED=problem.lengths is None and keys % tile.keys != 0,
        PACKED=problem.packed,
        **problem.options(tile),
    )
    return output, shift, norm
