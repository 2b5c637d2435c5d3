"""What `generate` needs, taken from our own models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tokens import check_tokens
from .checks import check_lengths, check_method, check_new_tokens, check_source_rows
from .methods import Method
from .recomputed import evaluating


def _end_token(model: Any, given: int | None) -> int:
    end = model.end_token if given is None else given
    if end is None:
        raise ValueError(
            "the end token is missing: give end_token, here or to the model (-1 here: nothing ends "
            "a sequence)"
        )
    return end


def _check_room(model: Any, prompt: int, new_tokens: int) -> None:
    check_new_tokens(new_tokens)
    # The last token is not fed back, so it needs no position.
    if prompt + new_tokens - 1 > model.max_len:
        raise ValueError(
            f"max_new_tokens={new_tokens} behind {prompt} tokens is longer than "
            f"max_len={model.max_len}"
        )


def _common(
    model: Any, half: Any, method: Method | None, end: int, use_cache: bool | None
) -> dict[str, Any]:
    return {
        "decoder": half.stack,
        "method": check_method(method),
        "embed": half.embedding.vectors,
        "project": model.output,
        "end_token": end,
        "pad_token": model.pad_token,
        "use_cache": use_cache,
    }


@torch.no_grad()
def encoder_decoder_arguments(
    model: Any,
    source: Tensor,
    method: Method | None,
    max_new_tokens: int | None,
    source_padding: Tensor | None,
    prefix: Tensor | None,
    end_token: int | None,
    use_cache: bool | None,
) -> dict[str, Any]:
    """Arguments of `generate` for a `Transformer`; the source is encoded here."""
    arguments = _common(model, model.decoder, method, _end_token(model, end_token), use_cache)
    check_tokens("source", source, model.encoder.embedding.vocab_size)
    if prefix is not None:
        check_tokens("prefix", prefix, model.decoder.embedding.vocab_size)
    elif model.start_token is None:
        raise ValueError("the start token is missing: give start_token to the model, or prefix")
    length = 1 if prefix is None else prefix.shape[1]
    if max_new_tokens is None:
        max_new_tokens = max(1, min(source.shape[1] + 50, model.max_len - length + 1))
    _check_room(model, length, max_new_tokens)
    padding = model.encoder.padding_mask(source, source_padding)
    check_source_rows("source", padding)
    with evaluating(model):
        memory = model.encode(source, padding)
    return arguments | {
        "memory": memory,
        "memory_key_padding_mask": padding,
        "prefix": model.start_token if prefix is None else prefix,
        "max_new_tokens": max_new_tokens,
    }


def decoder_only_arguments(
    model: Any,
    prompt: Tensor,
    method: Method | None,
    max_new_tokens: int,
    prompt_lengths: Tensor | None,
    end_token: int | None,
    use_cache: bool | None,
) -> dict[str, Any]:
    """Arguments of `generate` for a `LanguageModel`."""
    arguments = _common(model, model.encoder, method, _end_token(model, end_token), use_cache)
    check_tokens("prompt", prompt, model.encoder.embedding.vocab_size)
    lengths = check_lengths("prompt_lengths", prompt_lengths, "prompt", prompt)
    longest = prompt.shape[1] if lengths is None else int(lengths.max())
    _check_room(model, longest, max_new_tokens)
    return arguments | {
        "memory": None,
        "prefix": prompt,
        "prefix_lengths": lengths,
        "max_new_tokens": max_new_tokens,
    }
