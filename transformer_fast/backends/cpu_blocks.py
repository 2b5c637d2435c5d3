"""Whole layers and stacks, and whole decoding steps, in one CPU call, for inference.

The operators are in ``csrc/cpu/layers/register_layers.cpp`` and ``register_decode.cpp``.

Not ops of the table but a shorter way through them: projections, attention, residual and norm by the
same kernels, with what lies between kept in scratch. `fits` says whether all of them would run on
the CPU kernels; where it does not, callers compose the public ops.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _native, dispatch
from ..functional.linear import CODES
from .cpu_packing import PackedWeights

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def fits(input: Tensor, *others: Tensor | None) -> bool:
    """Whether a call on these tensors needs no gradient and every op in it would run on 'cpu'.

    All must be of input's dtype, float32, bfloat16 or float16.
    """
    dtype = input.dtype
    if (
        dtype not in _DTYPES
        or _native.module is None
        or dispatch.is_traced()
        or dispatch.named_backend() not in (None, "cpu")
        or torch.is_autocast_enabled("cpu")
        or dispatch.transforms(input, *others)
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
            or tensor.layout is not torch.strided
            or not tensor.is_cpu
            or (grad and tensor.requires_grad)
        ):
            return False
    return True


class Kind(IntEnum):
    """As in ``csrc/cpu/layers/layer_runner.h``."""

    SELF_ATTENTION = 0
    CROSS_ATTENTION = 1
    FEED_FORWARD = 2


class Sublayer(NamedTuple):
    """One sub-layer, its residual connection and its norm."""

    kind: Kind
    #: Of two linear maps (weight, bias) each, and of the norm. The maps of attention are those of
    #: queries, keys and values, (3 M, M), and of the output, (M, M); a network's (F, M) and (M, F).
    parameters: tuple[Tensor | None, ...]
    eps: float


class Sight(NamedTuple):
    """Which keys the queries of an attention see."""

    #: Broadcast to (B, H, T, S), SDPA polarity.
    mask: Tensor | None = None
    is_causal: bool = False


#: Of the first layer of those in a call: the packed copies of all their weights.
_packed: weakref.WeakKeyDictionary[torch.nn.Module, PackedWeights] = weakref.WeakKeyDictionary()


def layers(
    owner: torch.nn.Module,
    sublayers: Sequence[Sublayer],
    each: int,
    norm_first: bool,
    heads: int,
    batch_first: bool,
    activation: str | None,
    input: Tensor,
    sight: Sight,
    memory: Tensor | None = None,
    memory_sight: Sight = Sight(),  # noqa: B008 - it cannot be changed
    starts: Tensor | None = None,
    memory_starts: Tensor | None = None,
) -> Tensor:
    """One sub-layer after the other: ``x = norm(x + f(x))``, or ``x + f(norm(x))`` if norm_first.

    Args:
        owner: what packed copies of the weights are remembered by, as long as it lives.
        each: how many sub-layers a layer has; all layers have the same kinds.
        input: (B, T, M) or, if not batch_first, (T, B, M); ragged: (rows, M), see starts.
        sight: of self-attention; memory_sight: of attention to the memory.
        memory: like input; needed for sub-layers of CROSS_ATTENTION.
        starts: (B + 1,) int64, batch element b being rows starts[b] to starts[b + 1]; memory_starts
            likewise. None: not ragged.
    """
    rows = input.numel() // max(1, input.shape[-1])
    packed = _packed.get(owner)
    if packed is None:
        packed = _packed[owner] = PackedWeights()
    parameters = [p for sublayer in sublayers for p in sublayer.parameters]
    return torch.ops.transformer_fast.cpu_layers(
        input, memory, [s.kind for s in sublayers[:each]], parameters,
        packed(_weights(parameters), rows), [s.eps for s in sublayers], norm_first, heads,
        CODES[activation], batch_first, sight.mask, sight.is_causal, memory_sight.mask,
        memory_sight.is_causal, starts, memory_starts,
    )  # fmt: skip


def _weights(parameters: list[Tensor | None]) -> list[Tensor]:
    """Those that are packed, two of each sub-layer's six parameters."""
    return [w for i in range(0, len(parameters), 6) for w in parameters[i : i + 3 : 2]]  # type: ignore[misc]


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
        self.weights, self.rows = _weights(self.parameters), rows
        self.packed = PackedWeights()
        self.eps, self.norm_first = list(eps), norm_first
        self.activation = CODES[activation]
        self.memories, self.mask, self.key_lengths = list(memories), mask, key_lengths

    def __call__(self, input: Tensor, cache: Tensor, start: int) -> Tensor:
        """(R * T, M) -> (R * T, M): T new tokens of each of R sequences.

        Their keys and values are written to ``cache`` (layers, 2, R, H, places, D) from ``start``
        on, and everything before them is seen, causally. Several tokens of a sequence must be its
        first ones.
        """
        return torch.ops.transformer_fast.cpu_decode_stack(
            input, cache, start, self.memories, self.parameters,
            self.packed(self.weights, self.rows), self.eps, self.norm_first, self.activation,
            self.mask, self.key_lengths,
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

    @torch.library.register_fake("transformer_fast::cpu_layers")
    def _fake_layers(input: Tensor, *_: object) -> Tensor:
        return torch.empty(input.shape, dtype=input.dtype, device=input.device)

    @torch.library.register_fake("transformer_fast::cpu_decode_stack")
    def _fake_decode_stack(input: Tensor, *_: object) -> Tensor:
        return torch.empty(input.shape, dtype=input.dtype, device=input.device)

    @torch.library.register_fake("transformer_fast::cpu_uninitialized")
    def _fake_uninitialized(like: Tensor, sizes: Sequence[int]) -> Tensor:
        return like.new_empty(sizes)

    @torch.library.register_fake("transformer_fast::cpu_fresh")
    def _fake_fresh(like: Tensor) -> Tensor:
        return like.new_empty(like.shape)
