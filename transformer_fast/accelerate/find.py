"""The change for one module: by a registered converter, or as one of torch's."""

from __future__ import annotations

import torch

from . import converters, torch_nn
from .change import Change, ClassChange


def find(name: str, module: torch.nn.Module) -> Change | str | None:
    """The change for a module, a sentence why it stays as it is, or None: its class is unknown."""
    target = converters.convert(module) or torch_nn.convert(module)
    if target is None:
        return None
    reason = target if isinstance(target, str) else torch_nn.replaced_forward(module)
    if reason is not None:
        return reason
    assert isinstance(target, type)
    return ClassChange(name, module, type(module), target)
