"""`explain`: which backend a call runs on, and why the others are not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .dispatch import Explanation, explain_call
from .functional.attention import prepare_scaled_dot_product_attention
from .functional.cross_entropy import prepare_cross_entropy, prepare_linear_cross_entropy
from .functional.feed_forward import prepare_feed_forward
from .functional.layer_norm import (
    prepare_add_layer_norm,
    prepare_add_rms_norm,
    prepare_layer_norm,
    prepare_rms_norm,
)
from .functional.linear import prepare_linear

_PREPARE: dict[str, Callable[..., Any]] = {
    "layer_norm": prepare_layer_norm,
    "add_layer_norm": prepare_add_layer_norm,
    "rms_norm": prepare_rms_norm,
    "add_rms_norm": prepare_add_rms_norm,
    "attention": prepare_scaled_dot_product_attention,
    "scaled_dot_product_attention": prepare_scaled_dot_product_attention,
    "linear": prepare_linear,
    "feed_forward": prepare_feed_forward,
    "cross_entropy": prepare_cross_entropy,
    "linear_cross_entropy": prepare_linear_cross_entropy,
}


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Explain which backend a call runs on, and why the others are not used. Runs nothing.

    >>> print(transformer_fast.explain("layer_norm", torch.randn(4096, 512), 512))
    layer_norm runs on 'cpu'.
      not 'cuda': ...

    Args:
        op: the op's name ("attention", "layer_norm", ...) or the function of
            `transformer_fast.functional`.
        args, kwargs: what the function would be called with, ``backend`` included.

    Returns:
        An `Explanation`: ``.backend``, ``.reasons``, and sentences from ``str()``.

    Raises:
        ValueError: unknown op. Whatever the function raises for wrong arguments.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in _PREPARE:
        raise ValueError(f"op must be one of {', '.join(_PREPARE)}, not {name!r}")
    backend = kwargs.pop("backend", None)
    call, _ = _PREPARE[name](*args, **kwargs)
    return explain_call(call, backend)
