"""Transformer models: encoder, decoder, encoder-decoder (the paper's) and decoder-only."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import nn
from ..functional import causal_mask
from ..functional._check import named_activation
from ..functional.layer_norm import annotated_layer_norm
from ..reference.linear import ACTIVATIONS
from .attention_weights import evaluating
from .embedding import OutputProjection, TokenEmbedding, make_positions
from .generation import Generated, Method, generate, stream
from .generation.generate import (
    check_lengths,
    check_method,
    check_new_tokens,
    check_source_rows,
    with_signature_of,
)
from .tokens import check_mask, check_padding_mask, check_tokens, padding_mask

__all__ = ["AnnotatedLayerNorm", "Decoder", "Encoder", "LanguageModel", "Transformer"]


class AnnotatedLayerNorm(torch.nn.Module):
    """``y = weight * (x - mean(x)) / (std(x) + eps) + bias`` with the unbiased std.

    `LayerNorm` divides by ``sqrt(var + eps)`` with the biased variance. Weights trained with one of the
    two need the same one later. It runs on the kernels of `RMSNorm`.

    Args:
        d_model: size M of the last dimension, at least 2 (one value has no unbiased std).
        eps: added to the std, outside the square root.

    Source: "The Annotated Transformer" (Rush 2018; Huang et al. 2022), class LayerNorm.
    """

    def __init__(
        self,
        d_model: int,
        eps: float = 1e-6,
        *,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if d_model < 2:
            raise ValueError(f"d_model must be at least 2 for an unbiased std, not {d_model}")
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(d_model, device=device, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(d_model, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        return annotated_layer_norm(input, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


NORMS = ("layer_norm", "annotated")


class _Half(torch.nn.Module):
    _layer: Callable[..., torch.nn.Module]
    _stack: Callable[..., torch.nn.Module]
    #: Name of the argument with the tokens, for error messages.
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

        if isinstance(activation, str):  # torch.nn's layers accept only relu and gelu by name
            named_activation(activation)
            activation = ACTIVATIONS[activation]
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
            # Vectors at padding reach no result; skipping them makes padding free.
            self.stack.skips_padding = True
        for parameter in self.stack.parameters():  # like torch.nn.Transformer
            if parameter.dim() > 1:
                torch.nn.init.xavier_uniform_(parameter)

    def padding_mask(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor | None:
        """Returns the padding (B, L) that `forward` uses: the given mask, or True at pad_token."""
        name = self.tokens_name
        return padding_mask("padding", name, tokens, self.embedding.pad_token, padding)

    def _mask_among(
        self, tokens: Tensor, mask: Tensor | None, is_causal: bool
    ) -> tuple[Tensor | None, bool]:
        """Returns the mask among the tokens, and whether it is exactly the causal mask."""
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


def options_of_half(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `Encoder` and `Decoder` among a model's ``locals()``."""
    names = set(inspect.signature(_Half.__init__).parameters) - {"self"}
    return {name: value for name, value in given.items() if name in names}


class Encoder(_Half):
    """Embedding, positions and a stack of `transformer_fast.nn.TransformerEncoderLayer`.

    It is an encoder-only model (add a head to its output), with ``is_causal=True`` the body of a
    decoder-only model (`LanguageModel`), and the encoder of `Transformer`.

    Args:
        vocab_size: number V of token ids.
        d_model ... norm_first, bias, device, dtype: as in torch.nn.TransformerEncoderLayer.
        num_layers: number of layers.
        norm: "layer_norm", or "annotated" for `AnnotatedLayerNorm`.
        final_norm: True: a norm follows the last layer; None: only with norm_first.
        embedding_size: size E of the embedding's rows, projected to d_model if it differs; None:
            d_model.
        embedding_scale: factor of the embeddings; None: sqrt(E), as in the paper.
        positions: "sinusoidal", "learned", or None for none.
        max_len: maximum length of a sequence.
        pad_token: id of padding; None: there is none.

    Raises:
        ValueError: an option is unknown or out of range.

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
        """Returns the vectors (B, L, M) of tokens (B, L).

        Args:
            padding: bool (B, L), True at tokens to ignore; None: the tokens that are pad_token.
            mask: bool (L, L) or (B * H, L, L), True where token t (row) may not see token s, as in
                torch.nn; padding and is_causal are applied too. None: no mask.
            is_causal: token t sees only tokens s <= t. Padding and causality are never combined into
                one expanded mask.

        Raises:
            TypeError, ValueError, IndexError: tokens are not ids, have another shape, are empty, longer
                than max_len or outside the vocabulary; or a mask does not match.
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
        """Returns the vectors (B, T, M) of tokens (B, T), each seeing earlier tokens and the memory.

        Args:
            memory: (B, S, M), the encoder's output.
            memory_padding: bool (B, S), True at memory positions to ignore; None: no padding.
            padding: bool (B, T), True at tokens to ignore; None: the tokens that are pad_token.
            mask, is_causal: as in `Encoder.forward`, but is_causal is the default. With
                ``is_causal=False`` each token sees every token that ``mask`` does not hide.
            memory_mask: bool (T, S) or (B * H, T, S), True where token t may not see memory position s;
                None: no mask.

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


class _Model(torch.nn.Module):
    """Base class of whole models.

    Args:
        given: the ``locals()`` at the start of ``__init__``.
        tokens: name of each special token, and the size of its vocabulary.
    """

    max_len: int
    pad_token: int | None
    end_token: int | None
    output: OutputProjection

    def __init__(self, given: dict[str, Any], tokens: dict[str, int]) -> None:
        super().__init__()
        no_options = ("self", "__class__", "device", "dtype")
        self.config = {name: value for name, value in given.items() if name not in no_options}
        for name, vocab_size in tokens.items():
            if given[name] is not None and not 0 <= given[name] < vocab_size:
                raise ValueError(
                    f"{name} must be a token id in [0, {vocab_size}), not {given[name]}"
                )
        for name in ("max_len", *tokens):
            setattr(self, name, given[name])

    def _project_with(self, embedding: TokenEmbedding, given: dict[str, Any]) -> None:
        """Creates the output projection to the vocabulary of ``embedding``."""
        self.output = OutputProjection(
            given["d_model"], embedding.vocab_size,
            tied_to=embedding if given["tie_output"] else None, bias=given["output_bias"],
            device=given["device"], dtype=given["dtype"],
        )  # fmt: skip

    def _log_softmax(self, logits: Tensor) -> Tensor:
        return F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))

    def _arguments(self, half: Any, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of `generation.generate` that both models derive in the same way."""
        end = self.end_token if given["end_token"] is None else given["end_token"]
        if end is None:
            raise ValueError(
                "the end token is missing: give end_token, here or to the model (-1 here: nothing "
                "ends a sequence)"
            )
        return {
            "decoder": half.stack,
            "method": check_method(given["method"]),
            "embed": half.embedding.vectors,
            "project": self.output,
            "end_token": end,
            "pad_token": self.pad_token,
            "use_cache": given["use_cache"],
        }

    def _check_room(self, prompt: int, new_tokens: int) -> None:
        check_new_tokens(new_tokens)
        # The last token is not fed back, so it needs no position.
        if prompt + new_tokens - 1 > self.max_len:
            raise ValueError(
                f"max_new_tokens={new_tokens} behind {prompt} tokens is longer than "
                f"max_len={self.max_len}"
            )


class Transformer(_Model):
    """The encoder-decoder Transformer: from token ids to logits of the next token.

    ``logits = output(decoder(target, encoder(source)))``. ``encoder`` (`Encoder`) and ``decoder``
    (`Decoder`) each have an embedding and a stack of `transformer_fast.nn` layers; ``output`` is an
    `OutputProjection`. The defaults are the paper's base model.

    Args:
        source_vocab_size: number of source token ids.
        target_vocab_size: number V of target token ids. None: source and target share one
            vocabulary and one embedding table.
        d_model ... norm_first, bias, device, dtype: as in torch.nn.Transformer.
        norm, final_norm, embedding_size, embedding_scale, positions, max_len: as in `Encoder`.
            (torch.nn.Transformer always has final norms; the paper's post-norm model has none.)
        tie_output: True: the output shares its weight with the target embedding, as in the paper.
        output_bias: True: the logits have a bias.
        pad_token: id of padding in both vocabularies; None: there is none, and masks mark the padding.
        start_token, end_token: target ids that begin and end a sequence, for `generate`.

    Raises:
        ValueError: an option is unknown or out of range.

    ``config`` holds the arguments, so that ``Transformer(**model.config)`` builds the same model.

    Source: "Attention Is All You Need", section 3.
    """

    def __init__(
        self,
        source_vocab_size: int,
        target_vocab_size: int | None = None,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
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
        tie_output: bool = False,
        output_bias: bool = True,
        pad_token: int | None = None,
        start_token: int | None = None,
        end_token: int | None = None,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        given = dict(locals())
        vocab_size = source_vocab_size if target_vocab_size is None else target_vocab_size
        pads = min(source_vocab_size, vocab_size)
        super().__init__(
            given, {"pad_token": pads, "start_token": vocab_size, "end_token": vocab_size}
        )
        half = options_of_half(given)
        self.encoder = Encoder(source_vocab_size, num_layers=num_encoder_layers, **half)
        self.decoder = Decoder(vocab_size, num_layers=num_decoder_layers, **half)
        self.encoder.tokens_name, self.decoder.tokens_name = "source", "target"
        if target_vocab_size is None:
            self.decoder.embedding.table = self.encoder.embedding.table
        self._project_with(self.decoder.embedding, given)

    def encode(
        self,
        source: Tensor,
        source_padding: Tensor | None = None,
        *,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """Returns the memory (B, S, M) of source tokens (B, S), by `Encoder.forward`."""
        return self.encoder(source, source_padding, mask=source_mask)

    def decode(
        self,
        target: Tensor,
        memory: Tensor,
        memory_padding: Tensor | None = None,
        target_padding: Tensor | None = None,
        *,
        target_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        is_causal: bool = True,
    ) -> Tensor:
        """Returns the vectors (B, T, M) of target tokens (B, T), given the memory, by `Decoder.forward`.

        ``memory_padding`` is ``model.encoder.padding_mask(source)``; ``model.output`` computes logits
        from the result.
        """
        return self.decoder(
            target, memory, memory_padding, target_padding,
            mask=target_mask, memory_mask=memory_mask, is_causal=is_causal,
        )  # fmt: skip

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_padding: Tensor | None = None,
        target_padding: Tensor | None = None,
        *,
        source_mask: Tensor | None = None,
        target_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        is_causal: bool = True,
        expected: Tensor | None = None,
        smoothing: float = 0.0,
        ignored: int | None = None,
    ) -> Tensor:
        """Returns the logits (B, T, V) of the token after each target token (teacher forcing).

        With ``expected``, returns losses (B, T) instead and never has all logits in memory.

        Args:
            source: int64 or int32 (B, S).
            target: int64 or int32 (B, T), beginning with the start token.
            source_padding: bool (B, S), True at tokens to ignore; None: the tokens that are pad_token.
            target_padding: bool (B, T), the same for the target.
            source_mask: bool (S, S) or (B * H, S, S), True where hidden; None: no mask.
            target_mask: bool (T, T) or (B * H, T, T), the same for the target; applied in addition to
                causality, unless is_causal is False.
            memory_mask: bool (T, S) or (B * H, T, S), the same for the memory.
            is_causal: target token t sees only target tokens s <= t.
            expected, smoothing, ignored: the correct tokens (B, T) and the options of their loss, as in
                `OutputProjection.forward`.

        Raises:
            TypeError, ValueError, IndexError: tokens are not ids, have another shape, are empty, longer
                than max_len or outside the vocabulary; or masks do not match.
        """
        memory = self.encode(source, source_padding, source_mask=source_mask)
        source_padding = self.encoder.padding_mask(source, source_padding)
        decoded = self.decode(
            target, memory, source_padding, target_padding,
            target_mask=target_mask, memory_mask=memory_mask, is_causal=is_causal,
        )  # fmt: skip
        return self.output(decoded, expected, smoothing, ignored)

    def log_probabilities(
        self,
        source: Tensor,
        target: Tensor,
        source_padding: Tensor | None = None,
        target_padding: Tensor | None = None,
    ) -> Tensor:
        """Returns ``log_softmax(forward(...))`` (B, T, V), in fp32 at least."""
        return self._log_softmax(self(source, target, source_padding, target_padding))

    def generate(
        self,
        source: Tensor,
        method: Method | None = None,
        *,
        max_new_tokens: int | None = None,
        source_padding: Tensor | None = None,
        prefix: int | Tensor | None = None,
        prefix_lengths: Tensor | None = None,
        end_token: int | None = None,
        use_cache: bool | None = None,
    ) -> Generated:
        """Generates target tokens for source tokens (B, S).

        Runs without gradients and without dropout, even in training mode.

        Args:
            method: `Greedy()` (the default), `Sampling(...)` or `BeamSearch(...)`.
            max_new_tokens: maximum number of tokens to generate, including the end token; None: the
                source's length + 50, as in the paper, if max_len allows.
            source_padding: bool (B, S), True at tokens to ignore; None: the tokens that are pad_token.
            prefix: the first token of each target, or tokens (B, P), not part of the result; None: the
                start token.
            prefix_lengths: int (B,), number of prefix tokens of each row; the rest is ignored. None: all.
                Beam search requires equal lengths.
            end_token: token that ends a sequence; None: the model's; -1: no token, each sequence has
                max_new_tokens.
            use_cache: as in `generate`.

        Raises:
            ValueError: there is no end token or start token, a source is empty, a sequence is longer
                than max_len, or there are more beams than tokens in the vocabulary.
            TypeError, IndexError: as `forward`.
        """
        return generate(**self._generation(locals()))

    @with_signature_of(generate)
    def stream(self, **given: Any) -> Iterator[Tensor]:
        """Yields the tokens of `generate`, (B,) at a time, as soon as each step has computed them.

        Arguments: as in `generate`.

        Ended sequences yield pad_token (the end token if there is none). Not for beam search, whose
        tokens are final only at the end.
        """
        return stream(**self._generation(given))

    @torch.no_grad()
    def _generation(self, given: dict[str, Any]) -> dict[str, Any]:
        """Encodes the source; returns the arguments of `generation.generate` for those of `generate`."""
        source, prefix, limit = given["source"], given["prefix"], given["max_new_tokens"]
        arguments = self._arguments(self.decoder, given)
        check_tokens("source", source, self.encoder.embedding.vocab_size)
        if prefix is None:
            prefix = self.start_token
            if prefix is None:
                raise ValueError(
                    "the start token is missing: give start_token to the model, or prefix"
                )
        if isinstance(prefix, int):
            prefix = torch.full((source.shape[0], 1), prefix, device=source.device)
        check_tokens("prefix", prefix, self.decoder.embedding.vocab_size)
        lengths = check_lengths("prefix_lengths", given["prefix_lengths"], "prefix", prefix)
        length = prefix.shape[1] if lengths is None else int(lengths.max())
        if limit is None:
            limit = max(1, min(source.shape[1] + 50, self.max_len - length + 1))
        self._check_room(length, limit)
        padding = self.encoder.padding_mask(source, given["source_padding"])
        check_source_rows("source", padding)
        with evaluating(self):
            memory = self.encode(source, padding)
        return arguments | {
            "memory": memory,
            "memory_key_padding_mask": padding,
            "prefix": prefix,
            "prefix_lengths": lengths,
            "max_new_tokens": limit,
        }


class LanguageModel(_Model):
    """Decoder-only Transformer: from tokens to logits of the next token.

    ``logits = output(encoder(tokens, is_causal=True))``.

    Args:
        vocab_size: number V of token ids.
        d_model ... positions: as in `Encoder`.
        tie_output, output_bias, end_token: as in `Transformer`.

    Raises:
        ValueError: an option is unknown or out of range.

    ``config`` holds the arguments, so that ``LanguageModel(**model.config)`` builds the same model.

    Source: Liu et al. 2018 and Radford et al. 2018, after "Attention Is All You Need".
    """

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
        tie_output: bool = False,
        output_bias: bool = True,
        pad_token: int | None = None,
        end_token: int | None = None,
        device: torch.types.Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        given = dict(locals())
        super().__init__(given, {"pad_token": vocab_size, "end_token": vocab_size})
        self.encoder = Encoder(**options_of_half(given))
        self._project_with(self.encoder.embedding, given)

    def forward(
        self,
        tokens: Tensor,
        padding: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        expected: Tensor | None = None,
        smoothing: float = 0.0,
        ignored: int | None = None,
    ) -> Tensor:
        """Returns the logits (B, L, V) of the token after each of tokens (B, L).

        With ``expected`` (B, L), returns losses (B, L) instead, as in `OutputProjection.forward`. Other
        arguments and errors: as in `Encoder.forward`.
        """
        encoded = self.encoder(tokens, padding, mask=mask, is_causal=True)
        return self.output(encoded, expected, smoothing, ignored)

    def log_probabilities(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """Returns ``log_softmax(forward(...))`` (B, L, V), in fp32 at least."""
        return self._log_softmax(self(tokens, padding))

    def generate(
        self,
        prompt: Tensor,
        method: Method | None = None,
        *,
        max_new_tokens: int,
        prompt_lengths: Tensor | None = None,
        end_token: int | None = None,
        use_cache: bool | None = None,
    ) -> Generated:
        """Generates tokens after the prompts (B, P), without gradients and without dropout.

        Args:
            method, end_token, use_cache: as in `Transformer.generate`.
            max_new_tokens: maximum number of tokens to generate for each prompt, including the end
                token.
            prompt_lengths: int (B,), number of tokens of each prompt; the rest of the row is padding and
                ignored. None: all. Beam search requires equal lengths.

        Raises:
            ValueError: there is no end token, a prompt is empty, prompt and new tokens are longer than
                max_len, or there are more beams than tokens in the vocabulary.
            TypeError, IndexError: as `Encoder.forward`.
        """
        return generate(**self._generation(locals()))

    @with_signature_of(generate)
    def stream(self, **given: Any) -> Iterator[Tensor]:
        """Yields the tokens of `generate`, (B,) at a time, as soon as each step has computed them.

        Arguments: as in `generate`.

        Rows that have ended, or whose prompt is longer, yield pad_token (the end token if there is
        none). Not for beam search, whose tokens are final only at the end.
        """
        return stream(**self._generation(given))

    def _generation(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns the arguments of `generation.generate` for those of `generate`."""
        prompt, limit = given["prompt"], given["max_new_tokens"]
        arguments = self._arguments(self.encoder, given)
        check_tokens("prompt", prompt, self.encoder.embedding.vocab_size)
        lengths = check_lengths("prompt_lengths", given["prompt_lengths"], "prompt", prompt)
        self._check_room(prompt.shape[1] if lengths is None else int(lengths.max()), limit)
        return arguments | {
            "memory": None,
            "prefix": prompt,
            "prefix_lengths": lengths,
            "max_new_tokens": limit,
        }
