"""Modules that do work and that `accelerate` says nothing else about, for the report."""

from __future__ import annotations

import torch

from .report import Report

#: Packages whose classes get entries of their own, or wrap what does.
_SILENT = ("peft", "torch", "transformer_fast", "transformers")


def others(model: torch.nn.Module, report: Report) -> dict[str, int]:
    """How many modules there are of each class that accelerate does not know, by name.

    Counted are modules with parameters or linear maps of their own, for that is what layers and
    attention written by hand are made of; the model as a whole only if there is nothing else.
    """
    told = {entry.name for entry in report.entries}
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        kind = type(module)
        silent = name in told or kind.__module__.split(".")[0] in _SILENT
        if not silent and (name or not told) and _does_work(module):
            found[kind.__name__] = found.get(kind.__name__, 0) + 1
    return found


def _does_work(module: torch.nn.Module) -> bool:
    if next(module.parameters(recurse=False), None) is not None:
        return True
    return any(isinstance(child, torch.nn.Linear) for child in module.children())
