"""`explain`: which backend a call would run on, and why not each of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .dispatch import Explanation, explain_call
from .functional.attention import prepare_scaled_dot_product_attention
from .functional.cross_entropy import prepare_cross_entropy, prepare_linear_cross_entropy
from .functional.feed_forward import prepare_feed_forward
from .functional.layer_norm import prepare_add_layer_norm, prepare_layer_norm
from .functional.linear import prepare_linear

_PREPARE: dict[str, Callable[..., Any]] = {
    "layer_norm": prepare_layer_norm,
    "add_layer_norm": prepare_add_layer_norm,
    "attention": prepare_scaled_dot_product_attention,
    "scaled_dot_product_attention": prepare_scaled_dot_product_attention,
    "linear": prepare_linear,
    "feed_forward": prepare_feed_forward,
    "cross_entropy": prepare_cross_entropy,
    "linear_cross_entropy": prepare_linear_cross_entropy,
}


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Which backend this call would run on, and what stands against each other one.

    Args:
        op: the op's name ("attention", "layer_norm", ...) or the public function itself.
        args, kwargs: what you would pass to the public function, ``backend`` included.

    Returns:
        An `Explanation`: ``.backend``, ``.reasons``, and sentences from ``str()``.

    Raises:
        ValueError: unknown op. What the public function raises for arguments that do not fit.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in _PREPARE:
        raise ValueError(f"op must be one of {', '.join(_PREPARE)}, not {name!r}")
    backend = kwargs.pop("backend", None)
    call, _ = _PREPARE[name](*args, **kwargs)
    return explain_call(call, backend)
