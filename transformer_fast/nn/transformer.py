"""Drop-in `torch.nn.TransformerEncoder`, `TransformerDecoder` and `Transformer`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _native
from .._context import is_exporting, is_traced
from . import masks, ragged
from .drop_in import DropIn, by_torch, runs_torch_forward, without_kernels
from .fused_layers import Masks
from .ops import LayerNorm
from .transformer_layers import (
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    has_fast_path,
)


def _length(x: Tensor, layer: torch.nn.Module) -> int:
    batch_first = layer.self_attn.batch_first  # type: ignore[union-attr]
    return x.shape[1 if x.dim() == 3 and batch_first else 0]


def _takes_bool_masks(layer: torch.nn.Module) -> bool:
    return (
        isinstance(layer, TransformerEncoderLayer)
        and type(layer).forward is TransformerEncoderLayer.forward
        and "forward" not in layer.__dict__
    )


def _nested_padding(
    encoder: TransformerEncoder, src: Tensor, mask: Tensor | None, padding: Tensor | None
) -> Tensor | None:
    """Returns the positions that are 0 because PyTorch's encoder would use nested tensors, or None.

    Conditions on values are evaluated on the values' device, so that the host does not wait for it.
    """
    if (
        (is_traced() and not is_exporting())
        or padding is None
        or mask is not None
        or padding.dtype != torch.bool
        or tuple(padding.shape) != tuple(src.shape[:2])
        or not encoder.enable_nested_tensor
        or (not src.is_meta and torch.is_autocast_enabled(src.device.type))
    ):
        return None
    first = encoder.layers[0]
    if (
        not isinstance(first, torch.nn.TransformerEncoderLayer)
        or first.norm_first
        or not has_fast_path(first, src)
    ):
        return None
    attention = first.self_attn
    if torch.is_grad_enabled() and (src.requires_grad or attention.in_proj_weight.requires_grad):
        return None
    if not encoder.mask_check:
        return padding
    # Nested tensors need all padding at the end.
    others = (padding[:, :-1] & padding[:, 1:].logical_not()).any()
    if not padding.is_cpu or is_exporting():
        return padding & others.logical_not()
    return None if others else padding


class TransformerEncoder(DropIn, torch.nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder`: N encoder layers of this package, of torch.nn or of the user.

    Arguments, attributes and state_dict are PyTorch's.

    Padded positions are zeros if they are in PyTorch, else the layers' results. PyTorch returns zeros
    in inference without a mask, if ``enable_nested_tensor`` is True and all padding of a bool
    src_key_padding_mask comes last; see `torch.nn.TransformerEncoder` for the other conditions. Padding
    is then free on the CPU: the layers run on the real tokens only. With ``encoder.skips_padding =
    True`` they always may, forward and backward, for a bool src_key_padding_mask and no or a causal
    mask; with False they never do. A final ``norm`` turns the zeros into its bias.

    ``is_causal=None`` detects a causal mask in CPU memory. A mask elsewhere is applied unread, because
    reading it would wait for the device. Pass True if the mask is causal.
    """

    #: True: padded positions of the output may be zeros; None: only where PyTorch returns zeros.
    skips_padding: bool | None = None

    def __init__(
        self,
        encoder_layer: torch.nn.TransformerEncoderLayer,
        num_layers: int,
        norm: torch.nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        # PyTorch warns if it cannot use nested tensors, which matters only if it runs the layers.
        nested = enable_nested_tensor and _native.module is None
        super().__init__(encoder_layer, num_layers, norm, nested, mask_check)
        self.enable_nested_tensor = enable_nested_tensor

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Returns the output of the last layer, normalised if there is a norm.

        Args:
            src: (S, B, M), or (B, S, M) if batch_first, or (S, M).
            mask: (S, S) or (B * H, S, S). bool: True = hidden; float: added.
            src_key_padding_mask: (B, S), or (S) if unbatched. bool: True = ignored; float: added.
            is_causal: True: mask is the causal mask; None: detect it.
        """
        if runs_torch_forward(src, torch.nn.TransformerEncoder) and (
            self.skips_padding is None or not without_kernels(src)
        ):
            return by_torch(self, super().forward, src, mask, src_key_padding_mask, is_causal)
        mask, src_key_padding_mask = masks.check_masks(
            mask, "mask", src_key_padding_mask, "src_key_padding_mask", src.dtype
        )
        is_causal = masks.is_causal_mask(mask, is_causal, _length(src, self.layers[0]))
        if not all(_takes_bool_masks(layer) for layer in self.layers):
            mask = masks.additive(mask, src.dtype)
            src_key_padding_mask = masks.additive(src_key_padding_mask, src.dtype)
        if self.skips_padding is None:
            padding = _nested_padding(self, src, mask, src_key_padding_mask)
        else:
            padding = src_key_padding_mask if self.skips_padding else None
        own = Masks(mask, src_key_padding_mask, is_causal)
        output = ragged.run_stack(TransformerEncoderLayer, self.layers, src, own, padding)
        return output if self.norm is None else self.norm(output)


class TransformerDecoder(DropIn, torch.nn.TransformerDecoder):
    """`torch.nn.TransformerDecoder`: N decoder layers of this package, of torch.nn or of the user.

    Arguments, attributes and state_dict are PyTorch's. ``tgt_is_causal=None`` is resolved
    like ``is_causal`` in `TransformerEncoder`.

    In inference on the CPU the padding of the memory is free: only its real tokens are projected and
    attended to. Padded positions of tgt are computed, as in PyTorch; with ``decoder.skips_padding =
    True`` they are zeros.
    """

    #: True if padded positions of tgt may hold zeros instead of values.
    skips_padding: bool = False

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Returns the output of the last layer, normalised if there is a norm.

        Args:
            tgt ... memory_is_causal: as in `TransformerDecoderLayer`.
            tgt_is_causal: True: tgt_mask is the causal mask; None: detect it.
        """
        if runs_torch_forward(tgt, torch.nn.TransformerDecoder):
            return by_torch(
                self, super().forward, tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask,
                memory_key_padding_mask, tgt_is_causal, memory_is_causal,
            )  # fmt: skip
        masks.warn_of_zeros_and_ones(
            tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
        )  # fmt: skip
        tgt_is_causal = masks.is_causal_mask(tgt_mask, tgt_is_causal, _length(tgt, self.layers[0]))
        padding = tgt_key_padding_mask if self.skips_padding else None
        own = Masks(tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        cross = Masks(memory_mask, memory_key_padding_mask, memory_is_causal)
        output = ragged.run_stack(
            TransformerDecoderLayer, self.layers, tgt, own, padding, memory, cross
        )
        return output if self.norm is None else self.norm(output)


class Transformer(DropIn, torch.nn.Transformer):
    """`torch.nn.Transformer` with this package's encoder and decoder; the rest is PyTorch's.

    ``custom_encoder`` and ``custom_decoder`` are used unchanged. The same seed gives the same initial
    weights as in PyTorch.

    Source: "Attention Is All You Need", section 3.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        custom_encoder: Any | None = None,
        custom_decoder: Any | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        layer = (
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first,
            norm_first, bias, device, dtype,
        )  # fmt: skip
        norm = functools.partial(
            LayerNorm, d_model, layer_norm_eps, bias=bias, device=device, dtype=dtype
        )
        if custom_encoder is None:
            first = TransformerEncoderLayer(*layer)
            custom_encoder = TransformerEncoder(first, num_encoder_layers, norm())
        if custom_decoder is None:
            other = TransformerDecoderLayer(*layer)
            custom_decoder = TransformerDecoder(other, num_decoder_layers, norm())
        super().__init__(
            d_model, nhead, num_encoder_layers, num_decoder_layers, dim_feedforward, dropout,
            activation, custom_encoder, custom_decoder, *layer[5:],
        )  # fmt: skip

    if not TYPE_CHECKING:  # type checkers see PyTorch's signature

        @functools.wraps(torch.nn.Transformer.forward)
        def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return by_torch(self, super().forward, src, *args, **kwargs)
