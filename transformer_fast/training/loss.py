"""Next-token loss: cross entropy with label smoothing, per real token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..functional import cross_entropy
from ..models import LanguageModel, Transformer

__all__ = ["NextTokenLoss", "label_smoothing_loss"]

_FORWARDS = (Transformer.forward, LanguageModel.forward)


def label_smoothing_loss(
    logits: Tensor,
    expected: Tensor,
    *,
    pad_token: int | None = None,
    smoothing: float = 0.1,
    reduction: str = "mean",
) -> Tensor:
    """``mean over real tokens of (1 - s) * -log p[expected] + s * mean over v of -log p[v]``.

    ``p = softmax(logits)``, in fp32 at least. Without any real token the loss is 0.

    Args:
        logits: (..., V).
        expected: int64 or int32 (...), the correct tokens.
        pad_token: the token of padding, which does not count; None: all tokens count.
        smoothing: s in [0, 1].
        reduction: "mean" or "sum" over real tokens, or "none" for (...), 0 at padding.

    Raises:
        TypeError, ValueError: arguments of another type, or shapes that do not match.
        IndexError: an expected token is outside [0, V) (PyTorch's error, on the CPU).

    Source: "Attention Is All You Need", section 5.4; Szegedy et al. 2015, section 7.
    """
    _check(logits, expected, smoothing, reduction)
    classes = logits.shape[-1]
    flat = logits.reshape(-1, classes)
    target = expected.reshape(-1).long()
    losses = cross_entropy(
        flat.to(torch.promote_types(flat.dtype, torch.float32)),
        target,
        ignore_index=-100 if pad_token is None else pad_token,
        label_smoothing=smoothing,
        reduction="none" if reduction == "none" else "sum",
    )
    if reduction == "none":
        return losses.view(expected.shape)
    if reduction == "sum":
        return losses
    return losses / token_count(target, pad_token).clamp(min=1)


def token_count(expected: Tensor, pad_token: int | None) -> Tensor:
    """Returns the number of real tokens, as an int64 scalar on their device."""
    if pad_token is None:
        return torch.tensor(expected.numel(), device=expected.device)
    return (expected != pad_token).sum()


def _check(logits: Tensor, expected: Tensor, smoothing: float, reduction: str) -> None:
    for name, value in (("logits", logits), ("expected", expected)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a Tensor, not {type(value).__name__}")
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, not {logits.dtype}")
    if expected.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"expected must hold token ids, int64 or int32, not {expected.dtype}")
    if logits.dim() == 0 or logits.shape[:-1] != expected.shape:
        raise ValueError(
            f"expected must have the shape of logits without its last dimension, "
            f"{list(logits.shape[:-1])}, not {list(expected.shape)}"
        )
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"smoothing must lie in [0, 1], not {smoothing}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")


class NextTokenLoss:
    """An objective for `Trainer`: batches ``(*inputs, expected)``, a model that returns logits.

    Batches are ``(source, target, expected)`` for `models.Transformer` and ``(tokens, expected)`` for
    `models.LanguageModel`. These two, also wrapped for several processes or compiled, return the losses
    themselves, so that all logits are never in memory at once. Every other model, and a subclass with
    its own ``forward``, returns logits.

    Args:
        pad_token, smoothing: as in `label_smoothing_loss`.
    """

    def __init__(self, pad_token: int | None, smoothing: float = 0.1) -> None:
        if not 0.0 <= smoothing <= 1.0:
            raise ValueError(f"smoothing must lie in [0, 1], not {smoothing}")
        self.pad_token, self.smoothing = pad_token, smoothing

    def __call__(self, model: Any, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the sum of the losses and the number of real tokens."""
        *inputs, expected = batch
        if _gives_losses(model):
            total = model(
                *inputs, expected=expected, smoothing=self.smoothing, ignored=self.pad_token
            ).sum()
        else:
            total = label_smoothing_loss(
                model(*inputs), expected, pad_token=self.pad_token, smoothing=self.smoothing,
                reduction="sum",
            )  # fmt: skip
        return total, token_count(expected, self.pad_token)


def _gives_losses(model: Any) -> bool:
    """True if the model's forward is that of `Transformer` or `LanguageModel`."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):  # by torch.compile
            model = model._orig_mod
        else:
            break
    return getattr(type(model), "forward", None) in _FORWARDS and "forward" not in vars(model)
