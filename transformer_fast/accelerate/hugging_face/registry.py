"""Whether models of transformers find their attention in the library's registry, whatever its name."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch


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


def why_not(model: torch.nn.Module) -> str | None:
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
