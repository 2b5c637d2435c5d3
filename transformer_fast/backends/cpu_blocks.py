"""Whole layers and stacks, and whole decoding steps, in one CPU call, for inference.

The operators are in ``csrc/cpu/layers/layers.cpp``. They run projections, attention, residual and
norm on the kernels of the single ops, and keep intermediate results in scratch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _native
from .._context import are_plain_on_cpu
from ..dispatch import Call, Kernel
from ..ops.arguments import LayerStack
from ..ops.linear import CODES
from ..ops.operator import ARGMAX, EMBEDDING_BACKWARD
from .cpu import register_kernel, too_deep
from .cpu_packing import PackedWeights

#: Width of a panel of packed weights. Cross-attention splits one packed weight into the parts of
#: queries and keys, and a gated network into gate and values, which is possible only between panels.
_PANEL = 32


def _refuse(call: Call) -> str | None:
    quantized = call.arguments.quantized
    if not are_plain_on_cpu((*call.tensors, *quantized)):
        return "it supports plain CPU tensors only, and one is sparse or of a subclass"
    return too_deep(*quantized[0::2]) if quantized else None


def _refuse_autocast() -> str | None:
    return "it does not support autocast" if torch.is_autocast_enabled("cpu") else None


def _refuse_layer(call: Call) -> str | None:
    width = call.tensors[0].shape[-1]
    if call.op != "decode_step" and call.arguments.is_for_steps:
        return (
            "it supports M / H channels a head, equal heads of keys, and scores times 1 / sqrt(D)"
        )
    if call.op == "decoder_layer" and width % _PANEL:
        return f"it supports d_model in multiples of {_PANEL}, and the layer has {width}"
    if call.arguments.gated % (2 * _PANEL):
        half = call.arguments.gated // 2
        return f"gated networks need a hidden size divisible by {_PANEL}, and this one has {half}"
    return _refuse(call)


def layers(
    stack: LayerStack,
    input: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    memory: Tensor | None = None,
    memory_mask: Tensor | None = None,
    memory_is_causal: bool = False,
    starts: Tensor | None = None,
    memory_starts: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> Tensor:
    """Runs sub-layers in order: ``x = norm(x + f(x))``, or ``x + f(norm(x))`` if norm_first.

    Args:
        stack: attention has two maps: queries, keys and values, (3 M, M), and the output, (M, M). A
            network has (F, M) and (M, F), a gated one (2 F, M) and (M, F).
        input: (B, T, M) or, if not batch_first, (T, B, M); ragged: (rows, M), see starts.
        mask: mask of self-attention, broadcast to (B, H, T, S), SDPA polarity; memory_mask: mask of
            attention to the memory.
        memory: like input; needed for attention to it.
        starts: (B + 1,) int64: batch element b is rows starts[b] to starts[b + 1]; memory_starts:
            the same for the memory. None: not ragged.
        cos, sin: rotate queries and keys of self-attention, (1 or B, T, channels) or (rows, channels).
    """
    if stack.packed is None:
        stack.packed = PackedWeights(), stack.weights()
    packed, weights = stack.packed
    rows = input.numel() // max(1, input.shape[-1])
    return torch.ops.transformer_fast.layers.cpu(
        input, memory, stack.kinds, stack.parameters, packed(weights, rows), stack.scales, stack.eps,
        stack.norm_first, stack.norms, stack.heads, CODES[stack.activation], stack.batch_first, mask,
        is_causal, memory_mask, memory_is_causal, starts, memory_starts, cos, sin,
    )  # fmt: skip


class DecodeStack:
    """Runs one decoding step through all layers of a stack, in one call.

    Args:
        stack: for each layer self-attention, attention to the memory (in all layers or in none) and
            feed-forward network, gated or not. Self-attention has joined or separate projections,
            attention to the memory has those of query and output, and the network has (F, M) and
            (M, F).
        rows: number of rows of later inputs.
        memories: each layer's keys and values of the memory, (2, B, H, S, D); empty: no attention to
            a memory.
        mask: mask of the memory, broadcast to (B, H, T, S), SDPA polarity; key_lengths: (B,).
    """

    def __init__(
        self,
        stack: LayerStack,
        rows: int,
        memories: Sequence[Tensor],
        mask: Tensor | None = None,
        key_lengths: Tensor | None = None,
    ) -> None:
        self.stack, self.weights, self.rows = stack, stack.weights(), rows
        self.packed = PackedWeights()
        self.memories, self.mask, self.key_lengths = list(memories), mask, key_lengths

    def __call__(
        self, input: Tensor, cache: Tensor, start: int, own_mask: Tensor | None = None,
        cos: Tensor | None = None, sin: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Maps (R * T, M) to (R * T, M): T new tokens of each of R sequences.

        Their keys and values are written to ``cache`` (layers, 2, R, heads of keys, positions, D) from
        ``start`` on. The new tokens attend to all tokens before them, causally. If T > 1, they must
        be the first tokens of the sequences.

        Args:
            own_mask: of self-attention, in place of the causal one: bool (SDPA polarity) or a bias,
                broadcast to (R, H, T, start + T).
            cos, sin: rotate queries and keys of self-attention, (T or R * T, channels).
        """
        stack, packed = self.stack, self.packed(self.weights, self.rows)
        scale = cache.shape[-1] ** -0.5 if stack.scale is None else stack.scale
        return torch.ops.transformer_fast.decode_stack.cpu(
            input, cache, start, self.memories, stack.kinds, stack.parameters, packed, stack.scales,
            stack.eps, stack.norm_first, stack.norms, stack.heads, scale, CODES[stack.activation],
            self.mask, self.key_lengths, own_mask, cos, sin,
        )  # fmt: skip


if _native.module is not None:
    for _name in ("layers", "decode_stack"):
        torch.library.register_fake(
            f"transformer_fast::{_name}.cpu", lambda input, *_: input.new_empty(input.shape)
        )
    torch.library.register_fake(
        "transformer_fast::uninitialized.cpu", lambda like, sizes: like.new_empty(sizes)
    )


_NAMED = frozenset(CODES)
for _kernel in (
    *(
        Kernel(
            op, "cpu", layers, activations=_NAMED, refuses=_refuse_layer,
            refuses_context=_refuse_autocast,
        )
        for op in ("encoder_layer", "decoder_layer")
    ),
    Kernel(
        "decode_step", "cpu", DecodeStack, activations=_NAMED - {None}, refuses=_refuse_layer,
        refuses_context=_refuse_autocast,
    ),
    Kernel("argmax", "cpu", ARGMAX.of.get("cpu", torch.argmax), refuses=_refuse),
    Kernel(
        "embedding", "cpu", EMBEDDING_BACKWARD.of.get("cpu", torch.embedding), gradients=True,
        dtypes=frozenset({torch.float32}), refuses=_refuse,
    ),
):  # fmt: skip
    register_kernel(_kernel)
