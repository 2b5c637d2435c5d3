"""Attention inside a model of transformers that does not go the way of the library's own.

A subclass with a forward of its own, or a module put in an attention's place, may never look into
the registry, and takes masks in the form that the model's attention had. The code of some models
compares the name of their attention with 'sdpa'.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable
from functools import cache
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
    """An attention module, or a whole model, that may do something of its own."""

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
    from .models import class_of_theirs, is_model

    places: dict[torch.nn.Module, str] = {}
    for module in root.modules():
        theirs = class_of_theirs(module)
        for place in _PLACES.get(theirs.__name__, ()) if theirs is not None else ():
            inner = getattr(module, place, None)
            if isinstance(inner, torch.nn.Module):
                places[inner] = place
    found = []
    for name, module in root.named_modules():
        if is_model(module):
            reason = _reason_of_model(module)
        else:
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


def _classes(model: torch.nn.Module) -> Iterable[type]:
    """The classes of all modules in the model, and their bases.

    Without those of torch and of transformers' core, which knows all registered names.
    """
    return dict.fromkeys(
        kind
        for module in model.modules()
        for kind in type(module).__mro__
        if kind.__module__.split(".")[0] not in ("builtins", "torch", "transformers")
        or kind.__module__.startswith("transformers.models.")
    )


def registries(model: torch.nn.Module) -> list[Any]:
    """The registries of attention functions that the code of the model looks into."""
    found = (sys.modules.get(kind.__module__) for kind in _classes(model))
    registries = (getattr(code, "ALL_ATTENTION_FUNCTIONS", None) for code in found)
    return [registry for registry in registries if registry is not None]


def _reason_of_model(model: torch.nn.Module) -> str | None:
    """Why another name than 'sdpa' would change more than which function is called."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if any(found.get("sdpa") is not sdpa_attention_forward for found in registries(model)):
        return "what is registered as its attention 'sdpa' is not transformers' own"
    for kind in _classes(model):
        if kind.__name__ in _asking_for_sdpa(kind.__module__):
            return f"{kind.__name__} does something else for 'sdpa' than for other names"
    return None


@cache
def _asking_for_sdpa(code: str) -> frozenset[str]:
    """The classes in a Python module that compare something with the name."""
    try:
        source = inspect.getsource(sys.modules[code])
    except (KeyError, OSError, TypeError):
        return frozenset()
    if re.search("[\"']sdpa[\"']", source) is None:
        return frozenset()
    return frozenset(
        kind.name
        for kind in ast.walk(ast.parse(source))
        if isinstance(kind, ast.ClassDef)
        for node in ast.walk(kind)
        if isinstance(node, ast.Compare)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and part.value == "sdpa"
    )
