"""Attention inside a model of transformers that does not go the way of the library's own.

A subclass with a forward of its own, or a module put in an attention's place, may never look into
the registry, and takes masks in the form that the model's attention had.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

#: Classes of attention modules that call what the registry holds.
ATTENTIONS = frozenset(
    {"BartAttention", "BertCrossAttention", "BertSelfAttention", "MarianAttention", "T5Attention"}
)
#: Where layers keep their attention.
_PLACES: dict[str, tuple[str, ...]] = {
    "BartDecoderLayer": ("self_attn", "encoder_attn"),
    "BartEncoderLayer": ("self_attn",),
    "BertAttention": ("self",),
    "MarianDecoderLayer": ("self_attn", "encoder_attn"),
    "MarianEncoderLayer": ("self_attn",),
    "T5LayerCrossAttention": ("EncDecAttention",),
    "T5LayerSelfAttention": ("SelfAttention",),
}


class Own(NamedTuple):
    """An attention module that may do something of its own."""

    name: str
    module: torch.nn.Module
    #: The config that its masks are made by, if it can be told.
    config: Any
    #: What is its own, as a sentence.
    reason: str

    def belongs_to(self, config: Any) -> bool:
        return self.config is None or self.config is config


def find_own(root: torch.nn.Module) -> list[Own]:
    """All of ``root``, in order."""
    from .models import class_of_theirs

    places: dict[torch.nn.Module, str] = {}
    for module in root.modules():
        theirs = class_of_theirs(module)
        for place in _PLACES.get(theirs.__name__, ()) if theirs is not None else ():
            inner = getattr(module, place, None)
            if isinstance(inner, torch.nn.Module):
                places[inner] = place
    found = []
    for name, module in root.named_modules():
        reason = _reason(module, class_of_theirs(module), places.get(module))
        if reason is not None:
            found.append(Own(name, module, getattr(module, "config", None), reason))
    return found


def _reason(module: torch.nn.Module, theirs: type | None, place: str | None) -> str | None:
    kind = type(module)
    if theirs is None or theirs.__name__ not in ATTENTIONS:
        if place is None or _wraps_attention(module):
            return None
        return f"{kind.__name__} is no attention of transformers, and does as it does"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    if kind.forward is not theirs.forward:  # type: ignore[attr-defined]
        return (
            f"{kind.__name__} has its own forward; only what that hands on to "
            f"{theirs.__name__}.forward runs on transformer_fast"
        )
    return None


def _wraps_attention(module: torch.nn.Module) -> bool:
    """Whether there is an attention of theirs inside, as adapters and wrappers have it."""
    from .models import class_of_theirs

    inner = (class_of_theirs(m) for m in module.modules() if m is not module)
    return any(theirs is not None and theirs.__name__ in ATTENTIONS for theirs in inner)
