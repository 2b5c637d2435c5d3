"""`explain`: which backend a call runs on, and why the others are not used."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from . import fast_path, functional
from .dispatch import ANNOTATED, OPS, Call, Explanation, explain_call
from .functional._checked_call import FUNCTIONS, checked_call

_LAYERS = ("encoder_layer", "decoder_layer")
_NAMES = (*OPS, *ANNOTATED, "scaled_dot_product_attention", *_LAYERS)


def explain(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Explain which backend a call runs on, and why the others are not used. Runs nothing.

    >>> print(transformer_fast.explain("layer_norm", torch.randn(4096, 512), 512))
    layer_norm runs on 'cpu'.
      not 'torch', 'reference': the selected backend comes first in the order.
      not 'cuda', 'triton': the tensors are on the CPU.
      call: layer_norm(input float32 (4096, 512), normalized_shape (512,), eps 1e-05)

    Args:
        op: one of

            - an op's name: "attention", "layer_norm", ...;
            - a function of `transformer_fast.functional`;
            - "encoder_layer" or "decoder_layer", which some backends run in one call;
            - a module of `transformer_fast.nn` that is one of those: an encoder or decoder layer,
              ``Linear``, ``LayerNorm``, ``RMSNorm`` or ``CrossEntropyLoss``, or
              ``models.AnnotatedLayerNorm``.
        args, kwargs: the arguments of the call. For a function its own, ``backend`` included; for
            "encoder_layer" and "decoder_layer" the layer, then its call's arguments; for a module
            its call's arguments.

    Returns:
        An `Explanation`: ``.backend``, ``.reasons``, and sentences from ``str()``.

    Raises:
        ValueError: unknown op. TypeError: a module that runs several ops, or none of this package.
            For wrong arguments, the exceptions of the function.
    """
    if isinstance(op, torch.nn.Module):
        op, args, kwargs = _call_of(op, args, kwargs)
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    if name not in _NAMES:
        raise ValueError(f"op must be one of {', '.join(_NAMES)}, not {name!r}")
    if name in _LAYERS:
        from .nn.fused_layers import explain as explain_layer

        return explain_layer(name, *args, **kwargs)
    backend = kwargs.pop("backend", None)
    function = FUNCTIONS.get(name) or getattr(functional, name)
    return explain_public(checked_call(function, *args, **kwargs), backend)


def explain_public(call: Call, backend: str | None = None) -> Explanation:
    """`explain_call` for the public function, which runs small calls in an entry in C++."""
    found = explain_call(call, backend)
    if backend is not None or found.backend != "torch" or not fast_path.runs_in_entry(call):
        return found
    reasons = found.reasons | {"torch": ["its entry in C++ runs calls this small"], "cpu": []}
    return replace(found, backend="cpu", reasons=reasons, remark="in its entry in C++")


def _call_of(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Returns the op, arguments and keywords that a module's call corresponds to."""
    from . import models, nn

    for name, kind in (
        ("encoder_layer", torch.nn.TransformerEncoderLayer),
        ("decoder_layer", torch.nn.TransformerDecoderLayer),
    ):
        if isinstance(module, kind):
            return name, (module, *args), kwargs
    forward = type(module).forward  # a subclass may override it and call other ops
    kinds: tuple[tuple[Any, str, str, str], ...] = (
        (nn.Linear, "linear", "weight bias", ""),
        (nn.LayerNorm, "layer_norm", "normalized_shape weight bias eps", ""),
        (nn.RMSNorm, "rms_norm", "normalized_shape weight eps", ""),
        (models.AnnotatedLayerNorm, "annotated_layer_norm", "weight bias eps", ""),
        (nn.CrossEntropyLoss, "cross_entropy", "weight", "ignore_index reduction label_smoothing"),
    )
    for kind, name, attributes, options in kinds:
        if forward is kind.forward:
            given = inspect.signature(forward).bind(module, *args, **kwargs).args[1:]
            given += tuple(getattr(module, each) for each in attributes.split())
            return name, given, {each: getattr(module, each) for each in options.split()}
    if forward.__module__.startswith("torch.nn."):
        raise TypeError(
            f"{type(module).__name__} is torch.nn's, which PyTorch runs: use transformer_fast.nn or "
            "transformer_fast.accelerate(model)"
        )
    raise TypeError(
        f"{type(module).__name__} is not one op: explain its ops, for example "
        'explain("attention", query, key, value), or its layers'
    )
