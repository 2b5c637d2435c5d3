"""The encoder-decoder of "Attention Is All You Need"."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .embedding import OutputProjection
from .encoder_decoder import Decoder, Encoder, config_of, options_of_half
from .generation import Generated, Method, generate, stream
from .generation.from_model import encoder_decoder_arguments
from .tokens import check_token


class Transformer(torch.nn.Module):
    """The Transformer: token ids in, logits of the next token out.

    ``logits = output(decoder(target, encoder(source)))``. Its parts: ``encoder`` and ``decoder``
    (`Encoder`, `Decoder`: embedding and stack of `transformer_fast.nn` layers each), ``output``
    (`OutputProjection`). The defaults are the paper's base model.

    Args:
        source_vocab_size: number of source token ids.
        target_vocab_size: number V of target token ids. None: source and target share one
            vocabulary and one embedding table.
        d_model ... norm_first: as in torch.nn.Transformer; so are bias, device and dtype.
        norm, final_norm, embedding_size, embedding_scale, positions, max_len: as in `Encoder`.
            (torch.nn.Transformer always has final norms; the paper's post-norm model has none.)
        tie_output: whether the output's weight is the target embedding's table, as in the paper.
        output_bias: whether the logits have a bias.
        pad_token: id, of both vocabularies, that stands for padding; None: no id does, and masks
            say what is padding.
        start_token, end_token: target ids that begin and end a sequence, for `generate`.

    Raises:
        ValueError: an option that is unknown or out of range.

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
        super().__init__()
        self.config = config_of(given)
        shared = target_vocab_size is None
        vocab_size = source_vocab_size if target_vocab_size is None else target_vocab_size
        check_token("pad_token", pad_token, min(source_vocab_size, vocab_size))
        check_token("start_token", start_token, vocab_size)
        check_token("end_token", end_token, vocab_size)
        half = options_of_half(given)
        self.max_len, self.pad_token = max_len, pad_token
        self.start_token, self.end_token = start_token, end_token
        self.encoder = Encoder(source_vocab_size, num_layers=num_encoder_layers, **half)
        self.decoder = Decoder(vocab_size, num_layers=num_decoder_layers, **half)
        self.encoder.tokens_name, self.decoder.tokens_name = "source", "target"
        if shared:
            self.decoder.embedding.table = self.encoder.embedding.table
        self.output = OutputProjection(
            d_model,
            vocab_size,
            tied_to=self.decoder.embedding if tie_output else None,
            bias=output_bias,
            device=device,
            dtype=dtype,
        )

    def encode(
        self,
        source: Tensor,
        source_padding: Tensor | None = None,
        *,
        source_mask: Tensor | None = None,
    ) -> Tensor:
        """The memory (B, S, M) of source tokens (B, S); `Encoder.forward`."""
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
        """The vectors (B, T, M) of target tokens (B, T), given the memory; `Decoder.forward`.

        ``memory_padding`` is ``model.encoder.padding_mask(source)``; ``model.output`` makes logits
        of the result.
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
        """Logits (B, T, V) of the token after each target token, the true ones before it given.

        With ``expected``, losses (B, T) instead, without ever having all logits in memory.

        Args:
            source: int64 or int32 (B, S).
            target: int64 or int32 (B, T), beginning with the start token (teacher forcing).
            source_padding: bool (B, S), True at tokens to ignore; None: where pad_token stands.
            target_padding: bool (B, T), the same of the target.
            source_mask: bool (S, S) or (B * H, S, S), True where hidden; None: hides nothing.
            target_mask: bool (T, T) or (B * H, T, T), the same of the target; what is not causal is
                hidden besides, unless is_causal is False.
            memory_mask: bool (T, S) or (B * H, T, S), the same of the memory.
            is_causal: target token t sees target tokens s <= t only.
            expected, smoothing, ignored: the tokens (B, T) that are right, and what counts as their
                loss, as in `OutputProjection.forward`.

        Raises:
            TypeError, ValueError, IndexError: tokens that are no ids, of another shape, empty,
                longer than max_len, or not in the vocabulary; masks that do not fit.
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
        """``log_softmax(forward(...))`` (B, T, V), in fp32 at least."""
        logits = self(source, target, source_padding, target_padding)
        return F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))

    def generate(
        self,
        source: Tensor,
        method: Method | None = None,
        *,
        max_new_tokens: int | None = None,
        source_padding: Tensor | None = None,
        prefix: Tensor | None = None,
        end_token: int | None = None,
        use_cache: bool | None = None,
    ) -> Generated:
        """Target tokens for source tokens (B, S), one after the other.

        Works without gradients and without dropout, in whatever mode the model is.

        Args:
            method: `Greedy()` (None means that), `Sampling(...)` or `BeamSearch(...)`.
            max_new_tokens: most tokens to generate, the end token included; None: the source's
                length + 50 (the paper's), as far as max_len allows.
            source_padding: bool (B, S), True at tokens to ignore; None: where pad_token stands.
            prefix: tokens (B, P) each target begins with; None: the start token. They are no part
                of the result.
            end_token: token that ends a sequence; None: the model's; -1: none, each sequence has
                max_new_tokens.
            use_cache: as in `generate`.

        Raises:
            ValueError: no end token, no start token, an empty source, a sequence longer than
                max_len, beams larger than the vocabulary.
            TypeError, IndexError: as `forward`.
        """
        arguments = encoder_decoder_arguments(
            self, source, method, max_new_tokens, source_padding, prefix, end_token, use_cache
        )
        return generate(**arguments)

    def stream(
        self,
        source: Tensor,
        method: Method | None = None,
        *,
        max_new_tokens: int | None = None,
        source_padding: Tensor | None = None,
        prefix: Tensor | None = None,
        end_token: int | None = None,
        use_cache: bool | None = None,
    ) -> Iterator[Tensor]:
        """The tokens of `generate`, (B,) at a time, as soon as each step knows them.

        Sequences that have ended give pad_token (the end token if there is none). Not for beam
        search, which knows nothing before the end.
        """
        arguments = encoder_decoder_arguments(
            self, source, method, max_new_tokens, source_padding, prefix, end_token, use_cache
        )
        return stream(**arguments)
