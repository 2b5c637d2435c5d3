"""Creates bool masks, in the polarity of `scaled_dot_product_attention` or of torch.nn, and warns
of float masks that were probably meant to be bool."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from .._context import no_active_modes, values_are_known
from ._check import require_tensor, wrong_type

__all__ = ["causal_mask", "padding_mask"]


def _true_is_visible(true_means: str) -> bool:
    if true_means not in ("visible", "hidden"):
        raise ValueError(f'true_means must be "visible" or "hidden", not {true_means!r}')
    return true_means == "visible"


def causal_mask(
    length: int, *, true_means: str = "visible", device: torch.types.Device = None
) -> Tensor:
    """Returns the bool mask (T, T) in which query t attends to the keys s <= t.

    ``is_causal=True`` of `scaled_dot_product_attention` is equivalent and faster, without a mask.

    Args:
        length: T.
        true_means: "visible": True = may attend (lower triangle), for
            `scaled_dot_product_attention` and for code with ``masked_fill(mask == 0, ...)``. "hidden":
            True = may not attend (above the diagonal), for ``attn_mask``, ``src_mask`` and
            ``tgt_mask`` of the nn modules, and for `transformer_fast.models`.
        device: device of the mask; None: PyTorch's default.

    Raises:
        ValueError: true_means has another value, or length is no length.
    """
    visible = _true_is_visible(true_means)
    if isinstance(length, (int, float, str)) and (not isinstance(length, int) or length < 0):
        raise ValueError(f"length must be a whole number, 0 or more, not {length!r}")
    ones = torch.ones((length, length), dtype=torch.bool, device=device)
    return ones.tril_() if visible else ones.triu_(1)


def padding_mask(tokens: Tensor, pad_token: int, *, true_means: str = "visible") -> Tensor:
    """Returns the bool mask that hides the keys at which ``tokens`` (B, S) is ``pad_token``.

    Args:
        tokens: token ids (B, S).
        pad_token: id of padding.
        true_means: "visible": True = may attend, of shape (B, 1, 1, S), which broadcasts to the
            scores (B, H, T, S): ``padding_mask(tokens, 0) & causal_mask(T)`` is a decoder's mask.
            "hidden": True = padding, of shape (B, S), for ``key_padding_mask``,
            ``src_key_padding_mask`` and the like of the nn modules, and for
            `transformer_fast.models`.

    Raises:
        TypeError: tokens is no tensor, or pad_token no int. ValueError: true_means has another value, or
            tokens are not (B, S).
    """
    visible = _true_is_visible(true_means)
    require_tensor("padding_mask", "tokens", 1, tokens)
    if not hasattr(pad_token, "__index__"):
        raise wrong_type("padding_mask", "pad_token", 2, "int", pad_token)
    if tokens.dim() != 2:
        raise ValueError(f"tokens must have shape (batch, length), not {list(tokens.shape)}")
    return (tokens != pad_token)[:, None, None, :] if visible else tokens == pad_token


#: (dtype, shape) of masks; cleared at the limit, since every batch may have its own sizes.
_looked_at: set[tuple[torch.dtype, torch.Size]] = set()
_MOST_LOOKED_AT = 4096


def is_looked_at(mask: Tensor) -> bool:
    """True if `warn_of_zeros_and_ones` has read a mask of this dtype and shape."""
    return (mask.dtype, mask.shape) in _looked_at


def warn_of_zeros_and_ones(name: str, mask: Tensor, instead: str) -> None:
    """Warns if a float mask holds only 0 and 1: they are added to the scores and hide nothing.

    Reads the whole mask, once for each dtype and shape. Does not read masks on a GPU, where the
    host would wait, masks that are learned, and masks in traced programs.
    """
    if mask.dtype == torch.bool or not mask.is_cpu or torch.compiler.is_compiling():
        return
    if type(mask) is not Tensor or (key := (mask.dtype, mask.shape)) in _looked_at:
        return
    if mask.requires_grad or not values_are_known(mask) or not no_active_modes():
        return
    if len(_looked_at) >= _MOST_LOOKED_AT:
        _looked_at.clear()
    _looked_at.add(key)
    if mask.numel() and mask.max() == 1 and bool(((mask == 0) | (mask == 1)).all()):
        warnings.warn(
            f"{name} is a float mask that holds only 0 and 1. Float masks are added to the scores, "
            f"so it hides nothing. {instead}",
            stacklevel=2,
        )
