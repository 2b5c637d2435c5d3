"""What `accelerate` is going to change in a model, and what it then has to tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from . import torch_nn
from .change import Change, class_of_ours
from .find import Finder, recorded
from .in_parts import in_parts
from .others import others
from .report import Entry, Report
from .who_runs import who_runs


def make_plan(
    model: torch.nn.Module,
    filter_fn: Callable[[torch.nn.Module, str], bool] | None,
    report: Report,
) -> list[Change]:
    """The changes for all modules of the model; every module that is known gets an entry."""
    changes: list[Change] = []
    find = Finder(model)
    for name, module in model.named_modules():
        kind = type(module).__name__
        if recorded(name, module) or torch_nn.is_ours(module):
            own = None if recorded(name, module) else torch_nn.overrides_ours(module)
            if own is not None:
                report.entries.append(Entry(name, kind, "left", reason=own))
            else:
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
    return replace(entry, inference=inference, training=training, in_parts=in_parts(module))


def _remarks(model: torch.nn.Module, report: Report) -> list[str]:
    remarks = []
    scripted = [n for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        which = f" ({scripted[0]})" if scripted[0] else ""
        remarks.append(
            f"A TorchScript module{which} cannot be changed; accelerate it before scripting."
        )
    if scripted[:1] != [""]:
        remarks += _about_others(others(model, report), bool(report.entries))
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


def _about_others(unknown: dict[str, int], is_known: bool) -> list[str]:
    """About modules of classes that nobody knows, which were left as they were."""
    names = [name if count == 1 else f"{count} {name}" for name, count in unknown.items()]
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    advice = (
        'For attention written by hand use torch.compile(model, backend="transformer_fast"), '
        "transformer_fast.enable_sdpa(), or register_converter."
    )
    if not is_known:
        about = f" It is built of {shown}." if names else ""
        return [f"Nothing in this model is of a class that accelerate knows.{about} {advice}"]
    if names:
        return [f"Of classes that accelerate does not know, and as they were: {shown}. {advice}"]
    return []
