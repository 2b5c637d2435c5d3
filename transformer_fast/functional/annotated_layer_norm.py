"""The Annotated Transformer's layer norm, by the kernels of the other norms.

``y = weight * (x - mean(x)) / (std(x) + eps) + bias``; "The Annotated Transformer" (Rush 2018).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .. import reference
from ..autograd import wants_grad
from ..dispatch import Call, is_traced, select
from ..reference.dropout import draw_seed, dropout
from ._check import is_torchs
from .layer_norm import ANNOTATED, ANNOTATED_BIASED, add_norm_on, norm_on


def annotated_layer_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, unbiased: bool = True
) -> Tensor:
    """The norm alone, over the last dimension; ``unbiased``: which standard deviation."""
    if (backend := _backend("rms_norm", (input, weight, bias), unbiased)) is None:
        return reference.annotated_layer_norm(input, weight, bias, eps, unbiased)
    norm = norm_on(backend, ANNOTATED if unbiased else ANNOTATED_BIASED)
    return norm(input, input.shape[-1:], weight, bias, eps)


def add_annotated_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    unbiased: bool,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """``(norm(sum), sum)`` with ``sum = residual + dropout(input, dropout_p)``."""
    tensors = (input, residual, weight, bias)
    if is_torchs(*tensors):
        total = residual + F.dropout(input, dropout_p)
        return reference.annotated_layer_norm(total, weight, bias, eps, unbiased), total
    seed = draw_seed(input.device) if 0.0 < dropout_p < 1.0 else None
    if (backend := _backend("add_rms_norm", tensors, unbiased, dropout_p)) is None:
        total = residual + dropout(input, dropout_p, seed)
        return reference.annotated_layer_norm(total, weight, bias, eps, unbiased), total
    norm = add_norm_on(backend, ANNOTATED if unbiased else ANNOTATED_BIASED)
    return norm(input, residual, input.shape[-1:], weight, bias, eps, dropout_p, seed)


def _backend(
    op: str, tensors: tuple[Tensor | None, ...], unbiased: bool, dropout_p: float = 0.0
) -> str | None:
    """A backend with kernels of all kinds of norms that takes the call, or None.

    Those that take ``op``, a norm of the same tensors, have them.
    """
    input, *_, weight, bias = tensors
    assert input is not None
    shape = input.shape[-1:]
    if (
        not shape
        or is_traced()
        or is_torchs(*tensors)
        or (unbiased and shape[0] < 2)  # one value has no unbiased std
        or any(each is not None and each.shape != shape for each in (weight, bias))
    ):
        return None
    call = Call(op, tensors, wants_grad(*tensors), dropout_p, normalized_shape=tuple(shape))
    try:
        backend = select(call).backend
    except NotImplementedError:  # of a backend that is named: this norm is no op of the table
        return None
    return None if backend in ("torch", "reference") else backend
