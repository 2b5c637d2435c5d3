"""The change for one module: by a registered converter, or as one of a library's we know."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..nn.swapped import RECORD
from . import converters, torch_nn
from .change import Change, ClassChange
from .hugging_face import models
from .hugging_face.own_attention import Own, find_own


class Finder:
    """Finds the change for each module of one model."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._own: Sequence[Own] = find_own(root) if models.is_loaded() else ()

    def __call__(self, name: str, module: torch.nn.Module) -> Change | str | None:
        """The change, a sentence why the module stays as it is, or None: its class is unknown."""
        target = converters.convert(module)
        if target is None and models.is_loaded():
            found = models.find(name, module, self._own)
            if found is not None:
                return torch_nn.replaced_forward(module) or found
        target = target or torch_nn.convert(module) or converters.why_not_converted(module)
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
