"""Generation with hand-written encoder-decoder models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..functional import padding_mask
from .attention_weights import evaluating
from .generation import Generated, Method, generate
from .generation.generate import check_source_rows
from .tokens import check_ids

__all__ = ["HandWritten"]


class HandWritten(torch.nn.Module):
    """Greedy decoding, sampling and beam search for a hand-written model.

        found = HandWritten(model, pad_token=2, start_token=0, end_token=1).generate(
            source, models.BeamSearch(4), max_new_tokens=60
        )

    The model has the methods of The Annotated Transformer: ``memory = encode(source, source_mask)``,
    ``x = decode(memory, source_mask, target, target_mask)`` and ``generator(x)``. For other models pass
    functions of the same arguments:

        HandWritten(
            model,
            encode=lambda source, mask: model.encoder(model.embed(source), mask[:, None]),
            decode=lambda memory, mask, target, target_mask: ...,
            project=model.fc,
        )

    There is no cache: each step computes all tokens again.

    Args:
        model: the module; it is in evaluation mode while it generates.
        encode: function of tokens (B, S) and their mask (B, 1, S) that returns the memory (B, S, M);
            None: ``model.encode``.
        decode: function of memory (B, S, M), its mask (B, 1, S), tokens (B, T) and the causal mask
            (1, T, T) that returns vectors (B, T, M); None: ``model.decode``.
        project: function of vectors (B, 1, M) that returns logits or log-probabilities (B, 1, V); None:
            ``model.generator``.
        pad_token, start_token, end_token: as in `Transformer`.

    All masks are bool, True = may attend.
    """

    batch_first = True
    layers = ()

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        encode: Callable[[Tensor, Tensor], Tensor] | None = None,
        decode: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None,
        project: Callable[[Tensor], Tensor] | None = None,
        pad_token: int | None = None,
        start_token: int,
        end_token: int,
    ) -> None:
        super().__init__()
        self.model = model
        # In a tuple, so that submodules of the model are not registered twice.
        self.calls: tuple[Any, Any, Any] = (
            model.encode if encode is None else encode,
            model.decode if decode is None else decode,
            model.generator if project is None else project,
        )
        self.pad_token, self.start_token, self.end_token = pad_token, start_token, end_token

    def forward(self, tgt: Tensor, memory: Tensor, **masks: Any) -> Tensor:
        """The stack that `generate` calls; its "vectors" are the tokens themselves."""
        hidden = masks["memory_key_padding_mask"]
        return self.calls[1](memory, ~hidden[:, None], tgt, ~masks["tgt_mask"][None])  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(
        self,
        source: Tensor,
        method: Method | None = None,
        *,
        max_new_tokens: int,
        prefix: int | Tensor | None = None,
        prefix_lengths: Tensor | None = None,
    ) -> Generated:
        """Returns target tokens for source tokens (B, S); arguments: as in `Transformer.generate`."""
        check_ids("source", source)
        hidden = torch.zeros_like(source, dtype=torch.bool)
        if self.pad_token is not None:
            hidden = padding_mask(source, self.pad_token, true_means="hidden")
        check_source_rows("source", hidden)
        with evaluating(self):
            memory = self.calls[0](source, ~hidden[:, None])
        return generate(
            self,
            memory,
            method,
            embed=lambda tokens, start: tokens,
            project=self.calls[2],
            prefix=self.start_token if prefix is None else prefix,
            prefix_lengths=prefix_lengths,
            max_new_tokens=max_new_tokens,
            end_token=self.end_token,
            pad_token=self.pad_token,
            memory_key_padding_mask=hidden,
        )
