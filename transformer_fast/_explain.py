"""`explain`: which backend a call runs on, and why the others are not used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import functional
from .dispatch import OPS, Explanation, checked_call, explain_call

_LAYERS = ("encoder_layer", "decoder_layer")
_NAMES = (*OPS, "scaled_dot_product_attention", *_LAYERS)


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Explain which backend a call runs on, and why the others are not used. Runs nothing.

    >>> print(transformer_fast.explain("layer_norm", torch.randn(4096, 512), 512))
    layer_norm runs on 'cpu'.
      not 'cuda': ...

    Args:
        op: the op's name ("attention", "layer_norm", ...) or the function of
            `transformer_fast.functional`; or "encoder_layer" or "decoder_layer", which some backends
            run as a whole.
        args, kwargs: what the function would be called with, ``backend`` included; of a layer itself,
            and what it would be called with.

    Returns:
        An `Explanation`: ``.backend``, ``.reasons``, and sentences from ``str()``.

    Raises:
        ValueError: unknown op. Whatever the function raises for wrong arguments.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in _NAMES:
        raise ValueError(f"op must be one of {', '.join(_NAMES)}, not {name!r}")
    if name in _LAYERS:
        from .nn.fused_layers import explain as explain_layer

        return explain_layer(name, *args, **kwargs)
    backend = kwargs.pop("backend", None)
    function = getattr(functional, "scaled_dot_product_attention" if name == "attention" else name)
    return explain_call(checked_call(function, *args, **kwargs), backend)
