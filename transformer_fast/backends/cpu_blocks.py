"""Whole sub-layers, and whole decoding steps, in one CPU call, for inference.

The operators are in ``csrc/cpu/register_block.cpp`` and ``register_decode.cpp``.

Not ops of the table but a shorter way through them: projections, attention, residual and norm by the
same kernels, with what lies between kept in scratch. `fits` says whether all of them would run on
the CPU kernels; where it does not, callers compose the public ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _native, dispatch
from .cpu_backward import ACTIVATIONS
from .cpu_packing import PackedWeights, packed_weight

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def fits(input: Tensor, *others: Tensor | None) -> bool:
    """Whether a call on these tensors needs no gradient and every op in it would run on 'cpu'.

    All must be of input's dtype, float32, bfloat16 or float16.
    """
    dtype = input.dtype
    if (
        dtype not in _DTYPES
        or _native.module is None
        or torch.compiler.is_compiling()
        or dispatch.named_backend() not in (None, "cpu")
        or torch.is_autocast_enabled("cpu")
    ):
        return False
    grad = torch.is_grad_enabled()
    for tensor in (input, *others):
        if tensor is None:
            continue
        kind = type(tensor)
        if (
            (kind is not Tensor and kind is not torch.nn.Parameter)
            or tensor.dtype != dtype
            or not tensor.is_cpu
            or (grad and tensor.requires_grad)
        ):
            return False
    return True


def attention(
    input: Tensor,
    memory: Tensor | None,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    norm_first: bool,
    heads: int,
    batch_first: bool,
    mask: Tensor | None,
    key_lengths: Tensor | None,
    is_causal: bool,
    query_starts: Tensor | None = None,
    key_starts: Tensor | None = None,
) -> Tensor:
    """``norm(x + out(attention(in(x))))``, or ``x + out(attention(in(norm(x))))`` if norm_first.

    Args:
        input: (B, T, M) or, if not batch_first, (T, B, M); ragged: (rows, M), see query_starts.
        memory: where keys and values come from; None: the input itself.
        in_weight: (3 M, M), queries, keys and values; out_weight: (M, M).
        mask: broadcast to (B, H, T, S), SDPA polarity.
        query_starts: (B + 1,) int64, batch element b being rows query_starts[b] to
            query_starts[b + 1]; key_starts likewise for keys. None: not ragged.
    """
    rows = input.numel() // max(1, input.shape[-1])
    return torch.ops.transformer_fast.cpu_attention_block(
        input, memory, in_weight, packed_weight(in_weight, rows), in_bias, out_weight,
        packed_weight(out_weight, rows), out_bias, norm_weight, norm_bias, eps, norm_first, heads,
        batch_first, mask, key_lengths, is_causal, query_starts, key_starts,
    )  # fmt: skip


def feed_forward(
    input: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    bias2: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    norm_first: bool,
    activation: str,
) -> Tensor:
    """``norm(x + FFN(x))``, or ``x + FFN(norm(x))`` if norm_first."""
    rows = input.numel() // max(1, input.shape[-1])
    return torch.ops.transformer_fast.cpu_feed_forward_block(
        input, weight1, packed_weight(weight1, rows), bias1, weight2, packed_weight(weight2, rows), bias2,
        norm_weight, norm_bias, eps, norm_first, ACTIVATIONS[activation],
    )  # fmt: skip


class DecodeStack:
    """A step of decoding through all layers of a stack, in one call.

    Args:
        sublayers: of each layer self-attention, attention to the memory (in all layers or in none)
            and feed-forward network, each as (first weight, bias, second weight, bias, norm's
            weight, bias). Weights are those of self-attention (3 M, M) and (M, M), of attention to
            the memory (M, M) both, and of the network (F, M) and (M, F).
        eps: of each sub-layer's norm.
        norm_first: ``x + f(norm(x))`` instead of ``norm(x + f(x))``.
        activation: the network's.
        rows: of the inputs to come.
        memories: each layer's keys and values of the memory, (2, B, H, S, D); none: no such
            sub-layers.
        mask: of the memory, broadcast to (B, H, T, S), SDPA polarity; key_lengths: (B,).
    """

    def __init__(
        self,
        sublayers: Sequence[Sequence[Tensor | None]],
        eps: Sequence[float],
        norm_first: bool,
        activation: str,
        rows: int,
        memories: Sequence[Tensor],
        mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
    ) -> None:
        self.parameters = [parameter for sublayer in sublayers for parameter in sublayer]
        weights = [w for sublayer in sublayers for w in (sublayer[0], sublayer[2])]
        self.packed = PackedWeights([w for w in weights if w is not None], rows)
        self.eps, self.norm_first = list(eps), norm_first
        self.activation = ACTIVATIONS[activation]
        self.memories, self.mask, self.key_lengths = list(memories), mask, key_lengths

    def __call__(self, input: Tensor, cache: Tensor, start: int) -> Tensor:
        """(R * T, M) -> (R * T, M): T new tokens of each of R sequences.

        Their keys and values are written to ``cache`` (layers, 2, R, H, places, D) from ``start``
        on, and everything before them is seen, causally. Several tokens of a sequence must be its
        first ones.
        """
        return torch.ops.transformer_fast.cpu_decode_stack(
            input, cache, start, self.memories, self.parameters, self.packed(), self.eps,
            self.norm_first, self.activation, self.mask, self.key_lengths,
        )  # fmt: skip


def empty_cache(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory for keys and values, on the CPU of that kept for large tensors.

    Every step touches all of it, a little in each of thousands of places.
    """
    none = like.new_empty(0, dtype=dtype)
    if _native.module is None or type(none) is not Tensor or not none.is_cpu:
        return like.new_empty(shape, dtype=dtype)
    return torch.ops.transformer_fast.cpu_uninitialized(none, shape)


if _native.module is not None:

    @torch.library.register_fake("transformer_fast::cpu_attention_block")
    def _fake_attention(input: Tensor, *_: object) -> Tensor:
        return torch.empty(input.shape, dtype=input.dtype, device=input.device)

    @torch.library.register_fake("transformer_fast::cpu_feed_forward_block")
    def _fake_feed_forward(input: Tensor, *_: object) -> Tensor:
        return torch.empty(input.shape, dtype=input.dtype, device=input.device)

    @torch.library.register_fake("transformer_fast::cpu_argmax")
    def _fake_argmax(input: Tensor) -> Tensor:
        return torch.empty(input.shape[:1], dtype=torch.int64, device=input.device)

    @torch.library.register_fake("transformer_fast::cpu_decode_stack")
    def _fake_decode_stack(input: Tensor, *_: object) -> Tensor:
        return torch.empty(input.shape, dtype=input.dtype, device=input.device)
