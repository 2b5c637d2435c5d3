"""Drop-in `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import fast_path
from .._context import is_plain_eager, is_traced, only_torch_supports, settings
from ..functional.attention import attend
from ..ops.arguments import AttentionArguments
from ..ops.autograd import savable
from . import fusion, masks
from .drop_in import DropIn, by_torch, runs_torch_forward
from .int8 import INT8, run_linear

#: Private in PyTorch; None where it is gone.
_in_one_call: Any = getattr(torch, "_native_multi_head_attention", None)


class MultiheadAttention(DropIn, torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention`, run by the ops of `transformer_fast.functional`.

    ``Concat(head_1, ..., head_H) W_o`` with ``head_i = Attention(Q W_q_i, K W_k_i, V W_v_i)``.
    Arguments, attributes, state_dict, shapes and mask polarity (True = hidden) are PyTorch's.

    Differences from PyTorch:

    - A query with every key masked gets attention output 0 (so the result is ``out_proj.bias``) and
      weights 0, in every mode. In PyTorch it gets NaN or 0, depending on need_weights, grad mode and
      training mode.
    - ``is_causal=True`` declares attn_mask to be the causal mask. With ``need_weights=False`` the mask is
      not read, even with a key_padding_mask (PyTorch reads it then). With ``need_weights=True`` the
      mask is read, as in PyTorch.
    - ``out_proj`` is called as a module if it is hooked, replaced (also its class's ``forward``) or
      parametrised; PyTorch only reads its weight.
    - A key_padding_mask is never expanded to the T x S scores.
    - Float masks must not be changed in place before the backward, which reads them. Inputs may be
      changed if PyTorch allows it: with ``batch_first=True``, because PyTorch saves a copy then.

    Nested tensors, inputs on meta and dtypes that no op supports run on PyTorch's own implementation.
    torch.jit.script is not supported.

    Source: "Attention Is All You Need", section 3.2.2.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query to key and value.

        Args:
            query: (T, B, M), or (B, T, M) if batch_first, or (T, M).
            key: (S, B, kdim), or (B, S, kdim) if batch_first, or (S, kdim).
            value: as key, with vdim.
            key_padding_mask: (B, S), or (S) if unbatched. bool: True = ignored; float: added.
            need_weights: also return the weights.
            attn_mask: (T, S) or (B * H, T, S). bool: True = hidden; float: added.
            average_attn_weights: return the mean of the weights over the heads, not each head's.
            is_causal: declares attn_mask, which is required, to be the causal mask.

        Returns:
            Output of query's shape; weights (B, T, S), or (B, H, T, S) if not averaged, after
            dropout; without B if unbatched; None if not needed.

        Raises:
            AssertionError, RuntimeError: shapes or dtypes do not match (PyTorch's errors).
        """
        nested = (
            runs_torch_forward(query, torch.nn.MultiheadAttention)
            or key.is_nested
            or value.is_nested
        )
        # True for batched self-attention without masks, if all sizes fit.
        plain = (
            not nested
            and query is key
            and key is value
            and attn_mask is None
            and key_padding_mask is None
            and not is_causal
            and query.dim() == 3
            and query.shape[2] == self.embed_dim
            and self._qkv_same_embed_dim
            and self.bias_k is None
            and self.bias_v is None
            and not self.add_zero_attn
        )
        if plain and not self.training and (found := self._for_one_call(query)) is not None:
            return _in_one_call(
                query, key, value, self.embed_dim, self.num_heads, *found, None, need_weights,
                average_attn_weights,
            )  # fmt: skip
        if (
            nested
            or only_torch_supports(
                query, key, value, *self._parameters.values(), *self.out_proj._parameters.values()
            )
            or self._mixes_dtypes(query)
        ):
            return by_torch(
                self, super().forward, query, key, value, key_padding_mask, need_weights,
                attn_mask, average_attn_weights, is_causal,
            )  # fmt: skip
        if plain:
            return self._attend(query, key, value, None, False, need_weights, average_attn_weights)
        attn_mask, key_padding_mask = masks.check_masks(
            attn_mask, "attn_mask", key_padding_mask, "key_padding_mask", query.dtype
        )
        batched = query.dim() == 3
        F._mha_shape_check(  # type: ignore[attr-defined]
            query, key, value, key_padding_mask, attn_mask, self.num_heads
        )
        if is_causal and attn_mask is None:
            raise RuntimeError(
                "Need attn_mask if specifying the is_causal hint. "
                "You may use the Transformer module method "
                "`generate_square_subsequent_mask` to create this mask."
            )

        if not self._fits(query, key, value):  # torch raises
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights,
                is_causal,
            )  # fmt: skip
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        sequence = 1 if self.batch_first or not batched else 0

        appended = int(self.bias_k is not None) + int(self.add_zero_attn)
        # torch.jit.trace makes tensors of flags.
        causal = (
            bool(is_causal) and not need_weights and (key_padding_mask is None or appended == 0)
        )
        mask = masks.to_attention_mask(
            None if causal else attn_mask, key_padding_mask, query, key, sequence, self.num_heads,
            appended,
        )  # fmt: skip
        output, weights = self._attend(
            query, key, value, mask, causal, need_weights, average_attn_weights, sequence
        )
        if not batched:
            output = output.squeeze(0)
            weights = None if weights is None else weights.squeeze(0)
        return output, weights

    def _mixes_dtypes(self, query: Tensor) -> bool:
        """True if no op supports these dtypes: PyTorch's forward adds other biases, or raises."""
        if not isinstance(query, Tensor) or not query.is_floating_point():
            return True
        dtype, own = query.dtype, self._parameters
        weight, bias = own.get("in_proj_weight"), own.get("in_proj_bias")
        right = weight is None or weight.dtype is dtype
        if right and (bias is None or bias.dtype is dtype):
            return False
        return not torch.is_autocast_enabled(query.device.type)

    def _for_one_call(self, query: Tensor) -> list[Tensor] | None:
        """Returns the projections' parameters if PyTorch's single operator is faster, else None."""
        out = self.out_proj
        if not (
            _in_one_call is not None
            and self.batch_first
            and self.num_heads % 2 == 0
            and query.numel() < fast_path.MULTIHEAD_ATTENTION.below[0]
            and settings.current.falls_back
            and query.dtype is fast_path.FLOAT
            and fusion.is_unhooked(out, fusion.LINEAR)
            and INT8 not in self.__dict__
            and INT8 not in out.__dict__
        ):
            return None
        found = [*fusion.affine(self, "in_proj_weight", "in_proj_bias"), *fusion.affine(out)]
        if (
            any(parameter is None for parameter in found)
            or is_plain_eager(query, *found) is not False
            or fast_path.direct_kernel("linear", (query, *found)) is None
        ):
            return None
        return found  # type: ignore[return-value]

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        causal: bool,
        need_weights: bool,
        average_attn_weights: bool,
        sequence: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the result of checked, batched arguments; ``sequence`` is the dimension of T."""
        if sequence is None:
            sequence = int(self.batch_first)
        q, k, v = self._project(query, key, value, sequence)
        if self.bias_k is not None or self.add_zero_attn:
            k, v = self._append(k, self.bias_k), self._append(v, self.bias_v)

        dropout_p = self.dropout if self.training else 0.0
        if not 0.0 <= dropout_p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
        output, weights = attend(
            AttentionArguments(
                q, k, v, mask, is_causal=causal, dropout_p=dropout_p, need_weights=need_weights
            )
        )
        # (B, H, T, D) to (B, T, H * D) or (T, B, H * D)
        merged = output.transpose(1, 2) if sequence == 1 else output.permute(2, 0, 1, 3)
        output = fusion.linear(self.out_proj, merged.flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        return output, weights

    def _fits(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """True if sizes match each other and the projections."""
        batch = 0 if self.batch_first else 1
        return (
            query.shape[-1] == self.embed_dim
            and key.shape[-1] == self.kdim
            and value.shape[-1] == self.vdim
            and key.shape[:-1] == value.shape[:-1]
            and (query.dim() == 2 or key.shape[batch] == query.shape[batch])
            and (self.bias_k is None) == (self.bias_v is None)
        )

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, sequence: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values (B, H, L, D), views of as few projections as possible."""
        width = self.embed_dim
        weight, bias = fusion.affine(self, "in_proj_weight", "in_proj_bias")
        if self._qkv_same_embed_dim and query is key and key is value:
            packed = run_linear(self._saved(query), weight, bias)
            q, k, v = self._heads(packed, sequence, 3)
            return q, k, v
        inputs = (query, key) if key is value and self._qkv_same_embed_dim else (query, key, value)
        sizes = [width, 2 * width] if len(inputs) == 2 else [width, width, width]
        if self._qkv_same_embed_dim:
            weights = weight.split(sizes)
        else:
            names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
            weights = [fusion.affine(self, name, "in_proj_bias")[0] for name in names]
        biases = (None,) * len(sizes) if bias is None else bias.split(sizes)
        heads = []
        for x, weight, part, size in zip(inputs, weights, biases, sizes, strict=True):
            projected = run_linear(self._saved(x), weight, part)
            heads += self._heads(projected, sequence, size // width)
        q, k, v = heads
        return q, k, v

    def _saved(self, x: Tensor) -> Tensor:
        """Returns the tensor that a projection of x saves for backward: a copy if PyTorch saves one.

        With a copy, users may change x in place after the call.
        """
        weight = self._parameters.get("in_proj_weight")
        if (
            self.batch_first
            and torch.is_grad_enabled()
            and (weight is None or weight.requires_grad)
            and not is_traced()
            and x.shape[0] > 1
            and x.shape[1] > 1
        ):
            return x.clone()
        return savable(x)

    def _heads(self, projected: Tensor, sequence: int, parts: int) -> list[Tensor]:
        """Splits (..., parts * M) into tensors (B, H, L, D)."""
        rows, columns, _ = projected.shape
        split = projected.view(rows, columns, parts * self.num_heads, self.head_dim)
        # Split before transposing, so that autograd joins the gradients in the projection's layout.
        tensors = split.chunk(parts, dim=2) if parts > 1 else (split,)
        if sequence == 1:
            return [x.transpose(1, 2) for x in tensors]
        return [x.permute(1, 2, 0, 3) for x in tensors]

    def _append(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Appends the learned key or value, then the zero one, to (B, H, S, D)."""
        batch, heads, _, size = x.shape
        parts = [x]
        if bias is not None:
            parts.append(bias.to(x.dtype).view(1, heads, 1, size).expand(batch, -1, -1, -1))
        if self.add_zero_attn:
            parts.append(x.new_zeros((batch, heads, 1, size)))
        return torch.cat(parts, dim=2)
