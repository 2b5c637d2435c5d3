"""A decoder-only model: the encoder's stack under a causal mask, and logits on top."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .embedding import OutputProjection
from .encoder_decoder import Encoder, config_of, options_of_half
from .generation import Generated, Method, generate, stream
from .generation.from_model import decoder_only_arguments
from .tokens import check_token


class LanguageModel(torch.nn.Module):
    """Decoder-only Transformer: logits of the next token from the tokens so far.

    ``logits = output(encoder(tokens, is_causal=True))``.

    Args:
        vocab_size: number V of token ids.
        d_model ... positions: as in `Encoder`.
        tie_output, output_bias, end_token: as in `Transformer`.

    Raises:
        ValueError: an option that is unknown or out of range.

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
        super().__init__()
        self.config = config_of(given)
        check_token("pad_token", pad_token, vocab_size)
        check_token("end_token", end_token, vocab_size)
        self.max_len, self.pad_token, self.end_token = max_len, pad_token, end_token
        self.encoder = Encoder(**options_of_half(given))
        self.output = OutputProjection(
            d_model,
            vocab_size,
            tied_to=self.encoder.embedding if tie_output else None,
            bias=output_bias,
            device=device,
            dtype=dtype,
        )

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
        """Logits (B, L, V) of the token after each of tokens (B, L).

        With ``expected`` (B, L), losses (B, L) instead, as in `OutputProjection.forward`. Other
        arguments and errors: as `Encoder.forward`.
        """
        encoded = self.encoder(tokens, padding, mask=mask, is_causal=True)
        return self.output(encoded, expected, smoothing, ignored)

    def log_probabilities(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        """``log_softmax(forward(...))`` (B, L, V), in fp32 at least."""
        logits = self(tokens, padding)
        return F.log_softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))

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
        """The tokens that follow the prompts (B, P), without gradients and without dropout.

        Args:
            method, end_token, use_cache: as in `Transformer.generate`.
            max_new_tokens: most tokens to generate for each prompt, the end token included.
            prompt_lengths: int (B,), how many tokens of each row are its prompt; the rest is
                padding and not looked at. None: all. Beam search wants one length for all.

        Raises:
            ValueError: no end token, an empty prompt, prompt and new tokens longer than max_len,
                beams larger than the vocabulary.
            TypeError, IndexError: as `Encoder.forward`.
        """
        arguments = decoder_only_arguments(
            self, prompt, method, max_new_tokens, prompt_lengths, end_token, use_cache
        )
        return generate(**arguments)

    def stream(
        self,
        prompt: Tensor,
        method: Method | None = None,
        *,
        max_new_tokens: int,
        prompt_lengths: Tensor | None = None,
        end_token: int | None = None,
        use_cache: bool | None = None,
    ) -> Iterator[Tensor]:
        """The tokens of `generate`, (B,) at a time, as soon as each step knows them.

        Rows that have ended, or whose prompt goes on, give pad_token (the end token if there is
        none). Not for beam search, which knows nothing before the end.
        """
        arguments = decoder_only_arguments(
            self, prompt, method, max_new_tokens, prompt_lengths, end_token, use_cache
        )
        return stream(**arguments)
