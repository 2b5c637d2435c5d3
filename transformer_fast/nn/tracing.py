"""Calls that are torch's business: nested tensors and torch.fx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Proxy


def is_torchs(input: Any) -> bool:
    """Whether a module called on ``input`` should leave the call to `by_torch`."""
    return isinstance(input, Proxy) or getattr(input, "is_nested", False)


def by_torch(
    module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """The result of ``forward``, torch's own; for torch.fx one node that calls ``module``.

    torch.fx does not look into the modules of torch.nn, and so must not look into ours.
    """
    if isinstance(args[0], Proxy):
        tracer: Any = args[0].tracer
        return tracer.create_proxy("call_module", tracer.path_of_module(module), args, kwargs)
    return forward(*args, **kwargs)
