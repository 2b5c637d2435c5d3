"""Checks of token ids and masks, and padding masks from token ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._context import values_are_known


def check_ids(name: str, tokens: Any) -> None:
    """Raises an error unless ``tokens`` is a Tensor with a dtype of token ids."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be a Tensor of token ids, not {type(tokens).__name__}")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must hold token ids, int64 or int32, not {tokens.dtype}")


def check_tokens(name: str, tokens: Any, vocab_size: int) -> None:
    """Raises an error unless ``tokens`` is (B, L), L >= 1, of ids in [0, vocab_size).

    On a GPU the device checks the ids, without making the host wait: a wrong id raises at the next
    operation that waits for the device.
    """
    check_ids(name, tokens)
    if tokens.dim() != 2:
        raise ValueError(f"{name} must have shape (batch, length), not {list(tokens.shape)}")
    if tokens.shape[1] == 0:
        raise ValueError(f"{name} is empty: each sequence must have at least one token")
    if tokens.numel() == 0 or not values_are_known(tokens):
        return
    if tokens.device.type == "cpu":
        lowest, highest = (x.item() for x in tokens.aminmax())
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise IndexError(f"{name} must hold token ids in [0, {vocab_size}), but holds {wrong}")
    else:
        known = ((tokens >= 0) & (tokens < vocab_size)).all()
        torch._assert_async(known, f"{name} must hold token ids in [0, {vocab_size})")


def _check_bool(name: str, mask: Any, true: str) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a bool Tensor, True {true}, not {kind}")


def check_padding_mask(name: str, mask: Any, tokens_name: str, shape: tuple[int, ...]) -> None:
    _check_bool(name, mask, "at padding")
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"{name} must have the shape of {tokens_name}, {list(shape)}, not {list(mask.shape)}"
        )


def padding_mask(
    name: str, tokens_name: str, tokens: Tensor, pad_token: int | None, given: Tensor | None
) -> Tensor | None:
    """Returns the mask (B, L), True at padding: the given mask, or True at the pad token.

    None if there is no padding, as far as the host knows without waiting for a device.
    """
    if given is not None:
        check_padding_mask(name, given, tokens_name, tuple(tokens.shape))
        return given
    if pad_token is None:
        return None
    mask = tokens == pad_token
    if mask.device.type == "cpu" and values_are_known(mask) and not mask.any():
        return None
    return mask


def check_mask(name: str, mask: Any, length: int, keys: int) -> None:
    _check_bool(name, mask, "where hidden")
    if mask.dim() not in (2, 3) or tuple(mask.shape[-2:]) != (length, keys):
        raise ValueError(
            f"{name} must have shape [{length}, {keys}] or [batch * nhead, {length}, {keys}], not "
            f"{list(mask.shape)}"
        )
