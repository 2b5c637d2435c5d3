"""Calls that `torch.nn` runs: of nested tensors, in torch.fx, and where there are no kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Proxy

from .. import _native, dispatch


def is_torchs(input: Any) -> bool:
    """Whether a module called on ``input`` should leave the call to `by_torch`."""
    return (
        isinstance(input, Proxy)
        or getattr(input, "is_nested", False)
        or (_native.module is None and without_kernels(input))
    )


def without_kernels(input: Any) -> bool:
    """Whether the native module is missing where ``input`` is, so that `torch.nn`'s own forward is the
    fastest. A named backend and strict mode ask for the package's ops."""
    return (
        _native.module is None
        and getattr(input, "is_cpu", False)
        and dispatch.named_backend() is None
        and not dispatch.is_strict()
    )


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
