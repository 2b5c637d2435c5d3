"""Encoder and Decoder: an embedding and a stack of layers each, whole models' two halves."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import nn
from ..functional import causal_mask
from .annotated_layer_norm import AnnotatedLayerNorm
from .embedding import TokenEmbedding
from .positions import make_positions
from .tokens import check_mask, check_padding_mask, check_tokens, padding_mask

NORMS = ("layer_norm", "annotated")


class _Half(torch.nn.Module):
    _layer: Callable[..., torch.nn.Module]
    _stack: Callable[..., torch.nn.Module]
    #: What errors call the tokens.
    tokens_name = "tokens"

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 512,
        nhead: int = 8,
        num_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        norm_first: bool = False,
        *,
        norm: str = "layer_norm",
        final_norm: bool | None = None,
        bias: bool = True,
        embedding_size: int | None = None,
        embedding_scale: float | None = None,
        positions: str | None = "sinusoidal",
        max_len: int = 5000,
        pad_token: int | None = None,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}, not {norm!r}")
        if d_model < 1 or nhead < 1 or d_model % nhead:
            raise ValueError(
                f"d_model must be a positive multiple of nhead, not {d_model} for nhead={nhead}"
            )
        self.max_len = max_len
        self.embedding = TokenEmbedding(
            vocab_size,
            d_model,
            embedding_size=embedding_size,
            positions=make_positions(positions, max_len, d_model, device, dtype),
            dropout=dropout,
            scale=embedding_scale,
            pad_token=pad_token,
            device=device,
            dtype=dtype,
        )

        def make_norm() -> torch.nn.Module:
            if norm == "annotated":
                return AnnotatedLayerNorm(d_model, layer_norm_eps, device=device, dtype=dtype)
            return nn.LayerNorm(d_model, layer_norm_eps, bias=bias, device=device, dtype=dtype)

        layer = self._layer(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, True, norm_first,
            bias, device, dtype,
        )  # fmt: skip
        if norm != "layer_norm":
            for name in ("norm1", "norm2", "norm3"):
                if hasattr(layer, name):
                    setattr(layer, name, make_norm())
        normed = norm_first if final_norm is None else final_norm
        self.stack = self._stack(layer, num_layers, make_norm() if normed else None)
        if isinstance(self.stack, nn.TransformerEncoder):
            # What stands at padded places reaches no result; without it padding costs nothing.
            self.stack.skips_padding = True
        for parameter in self.stack.parameters():  # as torch.nn.Transformer does
            if parameter.dim() > 1:
                torch.nn.init.xavier_uniform_(parameter)

    def padding_mask(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor | None:
        """What `forward` takes for padding (B, L): the given mask, or where pad_token stands."""
        name = self.tokens_name
        return padding_mask("padding", name, tokens, self.embedding.pad_token, padding)

    def _mask_among(
        self, tokens: Tensor, mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor | None, bool]:
        """The mask among the tokens, and whether it is the causal mask and nothing else."""
        length = tokens.shape[1]
        if mask is not None:
            check_mask("mask", mask, length, length)
        if not is_causal:
            return mask, False
        causal = causal_mask(length, true_means="hidden", device=tokens.device)
        return (causal, True) if mask is None else (mask | causal, False)

    def _check(self, tokens: Tensor) -> None:
        check_tokens(self.tokens_name, tokens, self.embedding.vocab_size)
        if tokens.shape[1] > self.max_len:
            raise ValueError(
                f"{self.tokens_name} has {tokens.shape[1]} tokens, more than max_len={self.max_len}"
            )


def config_of(given: dict[str, Any]) -> dict[str, Any]:
    """The ``locals()`` with which a model's ``__init__`` starts, without what is no option."""
    return {k: v for k, v in given.items() if k not in ("self", "__class__", "device", "dtype")}


def options_of_half(given: dict[str, Any]) -> dict[str, Any]:
    """Those of a model's ``locals()`` that `Encoder` and `Decoder` take."""
    names = set(inspect.signature(_Half.__init__).parameters) - {"self"}
    return {name: value for name, value in given.items() if name in names}


class Encoder(_Half):
    """Embedding, positions and a stack of `transformer_fast.nn.TransformerEncoderLayer`.

    By itself it is an encoder-only model (put a head on its output), with ``is_causal=True`` the
    body of a decoder-only one (`LanguageModel`), and it is the encoder of `Transformer`.

    Args:
        vocab_size: number V of token ids.
        d_model ... norm_first: as in torch.nn.TransformerEncoderLayer; so are bias, device, dtype.
        num_layers: number of layers.
        norm: "layer_norm", or "annotated" for `AnnotatedLayerNorm`.
        final_norm: whether a norm follows the last layer; None: only with norm_first.
        embedding_size: size E of the embedding's rows, projected to d_model where it differs; None
            means d_model.
        embedding_scale: multiplies the embeddings; None means sqrt(E), the paper's.
        positions: "sinusoidal", "learned", or None for none.
        max_len: longest sequence.
        pad_token: id that stands for padding; None: no id does.

    Raises:
        ValueError: an option that is unknown or out of range.

    Source: "Attention Is All You Need", section 3.1.
    """

    _layer, _stack = nn.TransformerEncoderLayer, nn.TransformerEncoder

    def forward(
        self,
        tokens: Tensor,
        padding: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """The vectors (B, L, M) of tokens (B, L).

        Args:
            padding: bool (B, L), True at tokens to ignore; None: where pad_token stands.
            mask: bool (L, L) or (B * H, L, L), True where token t (row) may not see token s, as in
                torch.nn; padding and is_causal hide besides. None: hides nothing.
            is_causal: token t sees tokens s <= t only. Kept apart from the padding: neither mask is
                expanded into the other.

        Raises:
            TypeError, ValueError, IndexError: tokens that are no ids, of another shape, empty,
                longer than max_len, or not in the vocabulary; a mask that does not fit.
        """
        self._check(tokens)
        padding = self.padding_mask(tokens, padding)
        mask, is_causal = self._mask_among(tokens, mask, is_causal)
        return self.stack(self.embedding(tokens), mask, padding, is_causal)


class Decoder(_Half):
    """Embedding, positions and a stack of `transformer_fast.nn.TransformerDecoderLayer`.

    Args: as in `Encoder`.

    Source: "Attention Is All You Need", section 3.1.
    """

    _layer, _stack = nn.TransformerDecoderLayer, nn.TransformerDecoder

    def forward(
        self,
        tokens: Tensor,
        memory: Tensor,
        memory_padding: Tensor | None = None,
        padding: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        is_causal: bool = True,
    ) -> Tensor:
        """The vectors (B, T, M) of tokens (B, T), each seeing those before it and the memory.

        Args:
            memory: (B, S, M), the encoder's output.
            memory_padding: bool (B, S), True at places of the memory to ignore; None: none.
            padding: bool (B, T), True at tokens to ignore; None: where pad_token stands.
            mask, is_causal: as in `Encoder.forward`, but is_causal is the default: without it each
                token sees all that ``mask`` does not hide.
            memory_mask: bool (T, S) or (B * H, T, S), True where token t may not see place s of the
                memory; None: hides nothing.

        Raises:
            TypeError, ValueError, IndexError: as `Encoder`.
        """
        self._check(tokens)
        padding = self.padding_mask(tokens, padding)
        if memory.dim() != 3 or memory.shape[0] != tokens.shape[0]:
            raise ValueError(
                f"memory must have shape (batch, length, d_model) with batch {tokens.shape[0]}, as "
                f"{self.tokens_name} has, not {list(memory.shape)}"
            )
        if memory_padding is not None:
            check_padding_mask("memory_padding", memory_padding, "memory", tuple(memory.shape[:2]))
        if memory_mask is not None:
            check_mask("memory_mask", memory_mask, tokens.shape[1], memory.shape[1])
        mask, is_causal = self._mask_among(tokens, mask, is_causal)
        return self.stack(
            self.embedding(tokens),
            memory,
            tgt_mask=mask,
            memory_mask=memory_mask,
            tgt_key_padding_mask=padding,
            memory_key_padding_mask=memory_padding,
            tgt_is_causal=is_causal,
        )
