"""Checks of what generation is asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..tokens import check_ids
from .methods import BeamSearch, Greedy, Method, Sampling


def check_method(method: Method | None) -> Method:
    if method is None:
        return Greedy()
    if not isinstance(method, (Greedy, Sampling, BeamSearch)):
        raise TypeError(
            "method must be Greedy(), Sampling(...), BeamSearch(...) or None, not "
            f"{type(method).__name__}"
        )
    return method


def check_prompt(name: str, prompt: Any) -> Tensor:
    check_ids(name, prompt)
    if prompt.dim() != 2 or prompt.shape[1] == 0:
        raise ValueError(
            f"{name} must have shape (batch, length) with at least one token, not "
            f"{list(prompt.shape)}"
        )
    return prompt.long()  # type: ignore[no-any-return]


def check_lengths(name: str, lengths: Any, prompt_name: str, prompt: Tensor) -> Tensor | None:
    """Lengths of the prompts, on the CPU; None if all are as long as the tensor."""
    if lengths is None:
        return None
    if (
        not isinstance(lengths, Tensor)
        or lengths.is_floating_point()
        or lengths.dtype == torch.bool
    ):
        kind = lengths.dtype if isinstance(lengths, Tensor) else type(lengths).__name__
        raise TypeError(f"{name} must be an integer Tensor, not {kind}")
    if tuple(lengths.shape) != (prompt.shape[0],):
        raise ValueError(
            f"{name} must have shape [{prompt.shape[0]}], one length per row of {prompt_name}, not "
            f"{list(lengths.shape)}"
        )
    lengths = lengths.cpu().long()
    if lengths.numel() == 0 or bool((lengths == prompt.shape[1]).all()):
        return None
    if int(lengths.min()) < 1 or int(lengths.max()) > prompt.shape[1]:
        raise ValueError(
            f"{name} must lie in [1, {prompt.shape[1]}], the length of {prompt_name}, but has "
            f"{int(lengths.min())} to {int(lengths.max())}"
        )
    return lengths


def check_source_rows(name: str, padding: Tensor | None) -> None:
    """Raise where a row of a source is nothing but padding."""
    if padding is not None and padding.numel():
        empty = padding.all(dim=1).nonzero().flatten().tolist()
        if empty:
            raise ValueError(f"{name} is empty: row {empty[0]} has nothing but padding")


def check_new_tokens(max_new_tokens: Any) -> None:
    if not isinstance(max_new_tokens, int) or isinstance(max_new_tokens, bool):
        raise TypeError(f"max_new_tokens must be an int, not {type(max_new_tokens).__name__}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
