"""The change for one module: by a registered converter, or as one of a library's we know."""

from __future__ import annotations

import torch

from ..nn.swapped import RECORD
from . import converters, torch_nn
from .change import Change, ClassChange
from .hugging_face import models


def find(name: str, module: torch.nn.Module) -> Change | str | None:
    """The change for a module, a sentence why it stays as it is, or None: its class is unknown."""
    target = converters.convert(module)
    if target is None and models.is_loaded():
        found = models.find(name, module)
        if found is not None:
            return torch_nn.replaced_forward(module) or found
    target = target or torch_nn.convert(module)
    if target is None:
        return None
    reason = target if isinstance(target, str) else torch_nn.replaced_forward(module)
    if reason is not None:
        return reason
    assert isinstance(target, type)
    return ClassChange(name, module, type(module), target)


def recorded(name: str, module: torch.nn.Module) -> list[Change]:
    """The changes that the module remembers."""
    found: list[Change] = []
    attention = models.recorded(name, module)
    if attention is not None:
        found.append(attention)
    classes = module.__dict__.get(RECORD)
    if classes is not None:
        found.append(ClassChange(name, module, *classes))
    return found
