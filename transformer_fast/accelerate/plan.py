"""What `accelerate` is going to change in a model, and what it then has to tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from . import torch_nn
from .change import Change, class_of_ours
from .find import find, recorded
from .report import Entry, Report
from .who_runs import who_runs


def make_plan(
    model: torch.nn.Module,
    filter_fn: Callable[[torch.nn.Module, str], bool] | None,
    report: Report,
) -> list[Change]:
    """The changes for all modules of the model; every module that is known gets an entry."""
    changes: list[Change] = []
    for name, module in model.named_modules():
        kind = type(module).__name__
        if recorded(name, module) or torch_nn.is_ours(module):
            report.entries.append(Entry(name, kind, "already", _now(name, module)))
            continue
        found = find(name, module)
        if found is None:
            continue
        if not isinstance(found, str) and filter_fn is not None and not filter_fn(module, name):
            found = "filter_fn said no"
        if isinstance(found, str):
            report.entries.append(Entry(name, kind, "left", reason=found))
        else:
            changes.append(found)
            report.entries.append(Entry(name, kind, "swapped", found.now))
    return changes


def _now(name: str, module: torch.nn.Module) -> str:
    changes = recorded(name, module)
    return changes[0].now if changes else class_of_ours(type(module))


def tell(model: torch.nn.Module, report: Report) -> None:
    """Complete the report, the changes being made or taken back."""
    report.entries = [_completed(entry, model, report.verified) for entry in report.entries]
    report.notes += _remarks(model, report)


def _completed(entry: Entry, model: torch.nn.Module, verified: bool | None) -> Entry:
    if entry.outcome == "left":
        return entry
    if entry.outcome == "swapped" and verified is False:
        reason = "verify found other numbers, and everything was taken back"
        return replace(entry, outcome="left", now="", reason=reason)
    module = model.get_submodule(entry.name)
    inference, training = who_runs(module)
    return replace(entry, inference=inference, training=training)


def _remarks(model: torch.nn.Module, report: Report) -> list[str]:
    remarks = []
    if isinstance(model, torch.jit.ScriptModule):
        remarks.append("A TorchScript module cannot be changed; accelerate it before scripting.")
    elif not report.entries:
        known = ", ".join(torch_nn.unknown_names(model)[:8])
        about = f" It is built of {known}." if known else ""
        remarks.append(
            f"Nothing in this model is of a class that accelerate knows.{about} For attention "
            'written by hand use torch.compile(model, backend="transformer_fast"), '
            "transformer_fast.enable_sdpa(), or register_converter."
        )
    for entry in report.swapped:
        parent, _, _ = entry.name.rpartition(".")
        layer = model.get_submodule(parent) if entry.name else None
        is_theirs = isinstance(layer, torch.nn.TransformerEncoderLayer) and not torch_nn.is_ours(
            layer
        )
        if is_theirs and entry.name.endswith("self_attn"):
            remarks.append(
                f"{parent} was left as it is; its inference path in torch does not call "
                f"{entry.name}, which therefore runs on transformer_fast in training only."
            )
    return remarks
