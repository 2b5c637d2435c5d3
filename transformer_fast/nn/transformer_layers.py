"""Drop-in `torch.nn.TransformerEncoderLayer` and `torch.nn.TransformerDecoderLayer`."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import dispatch
from .._context import is_traced
from ..functional._check import autocast
from ..ops.arguments import AttentionArguments
from ..ops.autograd import wants_grad
from . import fused_layers, fusion, masks
from .drop_in import DropIn, by_torch, runs_torch_forward
from .multihead_attention import MultiheadAttention
from .ops import LayerNorm

_Layer = TypeVar("_Layer", bound=type[torch.nn.Module])


def _adopting(kind: _Layer) -> _Layer:
    """Class decorator: a new layer's attentions and norms, built by PyTorch, get our classes.

    Changing the class keeps PyTorch's parameters and their order of initialisation, so that the same
    seed gives the same model.
    """
    init = kind.__init__

    @functools.wraps(init)
    def initialize(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for module in self.children():
            if type(module) is torch.nn.MultiheadAttention:
                module.__class__ = MultiheadAttention
            elif type(module) is torch.nn.LayerNorm:
                module.__class__ = LayerNorm

    kind.__init__ = initialize  # type: ignore[method-assign]
    return kind


def _attended(
    attention: torch.nn.Module,
    dropout: torch.nn.Module,
    x: Tensor,
    source: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
) -> tuple[Tensor, torch.nn.Module]:
    """Returns attention from x to source, and the dropout that `fusion.compose` applies to it."""
    attended = attention(
        x, source, source, attn_mask=mask, key_padding_mask=padding, need_weights=False,
        is_causal=is_causal,
    )[0]  # fmt: skip
    return attended, dropout


def _prefers_torch_layer(layer: torch.nn.Module, x: Tensor) -> bool:
    """True if torch.nn's forward runs an encoder layer without masks in inference on a GPU.

    It may be one PyTorch operator, the fastest way on GPUs on which no kernel of ours is validated for
    the layer's attention.
    """
    return (
        not layer.training
        and not torch.is_grad_enabled()
        and not is_traced()
        and dispatch.named_backend() is None
        and (dispatch.only_pytorch_runs("attention", x) or _defers_attention(layer.self_attn, x))
    )


def _defers_attention(attention: Any, x: Tensor) -> bool:
    """True if the dispatcher selects PyTorch for self-attention on x."""
    heads = attention.num_heads
    batch, length = (1, *x.shape[:-1])[-2:]
    if x.dim() == 3 and not attention.batch_first:
        batch, length = length, batch
    # The call is only described, so its tensors need no memory.
    query = x.as_strided((batch, heads, length, x.shape[-1] // heads), (0, 0, 0, 0))
    call = dispatch.make_call(AttentionArguments(query, query, query), False)
    return dispatch.select(call).backend in ("torch", "reference")


def may_have_fast_path(layer: Any) -> bool:
    """True if torch.nn runs the encoder layer as one operator for some inputs.

    Like torch.nn it checks attributes only, not the classes of the layer's modules.
    """
    attention = layer.self_attn
    return bool(
        layer.activation_relu_or_gelu
        and getattr(attention, "batch_first", False)
        and getattr(attention, "_qkv_same_embed_dim", False)
        and getattr(attention, "in_proj_bias", None) is not None
        and getattr(attention, "num_heads", 1) % 2 == 0
        and getattr(layer.norm1, "eps", None) == getattr(layer.norm2, "eps", None)
        and all(hasattr(m, "weight") for m in (layer.linear1, layer.linear2, layer.norm1))
    )


def has_fast_path(layer: torch.nn.TransformerEncoderLayer, x: Tensor) -> bool:
    """True if torch.nn runs an encoder layer like this one as one operator without gradients."""
    attention, norms = layer.self_attn, (layer.norm1, layer.norm2)
    return (
        torch.backends.mha.get_fastpath_enabled()
        and x.dim() == 3
        and not layer.training
        and isinstance(attention, torch.nn.MultiheadAttention)
        and all(isinstance(norm, torch.nn.LayerNorm) for norm in norms)
        and may_have_fast_path(layer)
    )


def _in_fast_path_dtype(layer: torch.nn.TransformerEncoderLayer, x: Tensor) -> Tensor:
    """Returns x in the dtype of the CPU's autocast if torch.nn would run its fast path on it.

    The fast path returns that dtype, torch.nn's composed layer the dtype of the residual. Only autocast
    for CUDA disables the fast path, even on the CPU.
    """
    if (
        torch.is_autocast_enabled("cuda")
        or not has_fast_path(layer, x)
        or any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())
    ):
        return x
    tensors = (x, *layer.parameters())
    if wants_grad(*tensors) or torch.overrides.has_torch_function(tensors):
        return x
    return autocast(x)[0]  # type: ignore[return-value]


@_adopting
class TransformerEncoderLayer(DropIn, torch.nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer`, run by the ops of `transformer_fast.functional`.

    ``x = norm1(x + dropout1(self_attn(x)))``, ``x = norm2(x + dropout2(ffn(x)))``; with
    ``norm_first`` the norms come before the attention and the FFN. Arguments, attributes and
    state_dict are PyTorch's.

    The residual, its dropout and the following norm run as one op, and so does the FFN. If one of the
    modules involved is hooked, replaced or parametrised, the modules are called instead. Overridden
    ``_sa_block`` and ``_ff_block`` are called. Dropout in the fused ops draws other elements than in
    PyTorch. For fully masked queries, nested tensors and tracing, see `MultiheadAttention`.

    Source: "Attention Is All You Need", section 3.1; Xiong et al. 2020 for norm_first.
    """

    self_attn: MultiheadAttention
    norm1: torch.nn.LayerNorm
    norm2: torch.nn.LayerNorm

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Returns the layer's output, of src's shape.

        Args:
            src: (S, B, M), or (B, S, M) if batch_first, or (S, M).
            src_mask: (S, S) or (B * H, S, S). bool: True = hidden; float: added.
            src_key_padding_mask: (B, S), or (S) if unbatched. bool: True = ignored; float: added.
            is_causal: declares src_mask, which is required, to be the causal mask.
        """
        if runs_torch_forward(src, torch.nn.TransformerEncoderLayer) or not src.is_floating_point():
            return by_torch(self, super().forward, src, src_mask, src_key_padding_mask, is_causal)
        own = fused_layers.NO_MASKS
        is_masked = src_mask is not None or src_key_padding_mask is not None or is_causal
        if src.is_cuda and not is_masked and _prefers_torch_layer(self, src):
            return super().forward(src)
        if src.is_cpu and torch.is_autocast_enabled("cpu"):
            src = _in_fast_path_dtype(self, src)
        if is_masked:
            src_mask, src_key_padding_mask = masks.check_masks(
                src_mask, "src_mask", src_key_padding_mask, "src_key_padding_mask", src.dtype
            )
            if (
                fusion.overridden(self, "_sa_block", torch.nn.TransformerEncoderLayer)
                or type(self.self_attn) is not MultiheadAttention
            ):
                # torch.nn passes float masks to attention; a user's own attention may rely on it.
                src_mask = masks.additive(src_mask, src.dtype)
                src_key_padding_mask = masks.additive(src_key_padding_mask, src.dtype)
            own = fused_layers.Masks(src_mask, src_key_padding_mask, is_causal)

        done = fused_layers.try_run(self, src, own)
        if done is not None:
            return done
        if torch.is_grad_enabled() and fused_layers.is_trained(self):
            done = fused_layers.try_compose(self, src, own)
            if done is not None:
                return done
        else:
            # If only the network must be composed, attention is still one call.
            done = fused_layers.try_run(self, src, own, network=False)
            if done is not None:
                return fusion.compose(self, done, ())

        def attend(x: Tensor) -> tuple[Tensor, torch.nn.Module | None]:
            given = src_mask, src_key_padding_mask
            if fusion.overridden(self, "_sa_block", torch.nn.TransformerEncoderLayer):
                return self._sa_block(x, *given, is_causal=is_causal), None
            return _attended(self.self_attn, self.dropout1, x, x, *given, is_causal)

        return fusion.compose(self, src, (attend,))


@_adopting
class TransformerDecoderLayer(DropIn, torch.nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer`, run by the ops of `transformer_fast.functional`.

    ``x = norm1(x + dropout1(self_attn(x)))``,
    ``x = norm2(x + dropout2(multihead_attn(x, memory)))``, ``x = norm3(x + dropout3(ffn(x)))``;
    with ``norm_first`` the norms come before the attentions and the FFN. Otherwise as
    `TransformerEncoderLayer`; overridden ``_sa_block``, ``_mha_block`` and ``_ff_block`` are called.

    Source: "Attention Is All You Need", section 3.1; Xiong et al. 2020 for norm_first.
    """

    self_attn: MultiheadAttention
    multihead_attn: MultiheadAttention
    norm1: torch.nn.LayerNorm
    norm2: torch.nn.LayerNorm
    norm3: torch.nn.LayerNorm

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Returns the layer's output, of tgt's shape.

        Args:
            tgt: (T, B, M), or (B, T, M) if batch_first, or (T, M).
            memory: (S, B, M), or (B, S, M) if batch_first, or (S, M).
            tgt_mask: (T, T) or (B * H, T, T). bool: True = hidden; float: added.
            memory_mask: (T, S) or (B * H, T, S).
            tgt_key_padding_mask: (B, T), or (T) if unbatched. bool: True = ignored; float: added.
            memory_key_padding_mask: (B, S), or (S) if unbatched.
            tgt_is_causal: declares tgt_mask, which is required, to be the causal mask.
            memory_is_causal: the same for memory_mask.
        """
        if runs_torch_forward(tgt, torch.nn.TransformerDecoderLayer):
            return by_torch(
                self, super().forward, tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask,
                memory_key_padding_mask, tgt_is_causal, memory_is_causal,
            )  # fmt: skip
        masks.warn_of_zeros_and_ones(
            tgt_mask=tgt_mask, memory_mask=memory_mask, tgt_key_padding_mask=tgt_key_padding_mask,
            memory_key_padding_mask=memory_key_padding_mask,
        )  # fmt: skip

        own = fused_layers.Masks(tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        cross = fused_layers.Masks(memory_mask, memory_key_padding_mask, memory_is_causal)
        done = fused_layers.try_run(self, tgt, own, memory, cross)
        if done is not None:
            return done

        def attend(x: Tensor) -> tuple[Tensor, torch.nn.Module | None]:
            if fusion.overridden(self, "_sa_block", torch.nn.TransformerDecoderLayer):
                return self._sa_block(x, tgt_mask, tgt_key_padding_mask, tgt_is_causal), None
            return _attended(
                self.self_attn, self.dropout1, x, x, tgt_mask, tgt_key_padding_mask, tgt_is_causal
            )

        def attend_to_memory(x: Tensor) -> tuple[Tensor, torch.nn.Module | None]:
            masks = memory_mask, memory_key_padding_mask, memory_is_causal
            if fusion.overridden(self, "_mha_block", torch.nn.TransformerDecoderLayer):
                return self._mha_block(x, memory, *masks), None
            return _attended(self.multihead_attn, self.dropout2, x, memory, *masks)

        return fusion.compose(self, tgt, (attend, attend_to_memory))
