"""The check behind ``accelerate(model, verify=...)``: the model before and after, on examples."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from .change import Change, undone
from .compare_runs import (
    Inputs,
    Run,
    difference,
    forward_only,
    no_trace,
    with_gradients,
    without_dropout,
)
from .report import Report

#: A layer's padding mask, and the argument whose keys it is about.
_PADDING = {
    "key_padding_mask": "key",
    "src_key_padding_mask": "src",
    "tgt_key_padding_mask": "tgt",
    "memory_key_padding_mask": "memory",
}


def verify_changes(
    model: torch.nn.Module, changes: Sequence[Change], example: Any, report: Report
) -> None:
    """Compare the model with ``changes`` (which are applied) and without; tell the report."""
    inputs = _inputs(example)
    inner: Any = model
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        inner = model.module  # gradients of copies are no business of the other processes
    problems: list[str] = []
    with no_trace(inner), _zeros_at_padding(changes):
        calls: dict[str, tuple[torch.nn.Module, Inputs]] = {}
        for mode in ("inference", "evaluation", "training"):
            told = _compare_model(inner, changes, inputs, mode, calls, report)
            if told is not None:
                problems.append(f"{mode}: {told}")
        for name, (module, seen) in calls.items():
            told = _compare_padded(module, changes, seen)
            if told is not None:
                problems.append(f"{name} with padding: {told}")
    report.verified = not problems
    for problem in problems:
        report.notes.append(f"Verify, {problem}.")
    if problems:
        told = "; ".join(problems)
        warnings.warn(
            f"accelerate changed the model's numbers and was taken back ({told})", stacklevel=4
        )


def _inputs(example: Any) -> Inputs:
    if isinstance(example, tuple):
        return Inputs(example, {})
    if isinstance(example, dict):
        return Inputs((), example)
    if isinstance(example, Tensor):
        return Inputs((example,), {})
    raise TypeError(
        "verify must be a tuple of positional arguments, a dict of keyword arguments or a tensor, "
        f"not {type(example).__name__}"
    )


def _compare_model(
    model: torch.nn.Module,
    changes: Sequence[Change],
    inputs: Inputs,
    mode: str,
    calls: dict[str, tuple[torch.nn.Module, Inputs]],
    report: Report,
) -> str | None:
    model.train(mode == "training")
    generator = torch.Generator().manual_seed(0)

    def run(jitter: torch.Generator | None = None) -> Run:
        torch.manual_seed(0)
        if mode == "inference" and jitter is None:
            return forward_only(model, inputs)
        return with_gradients(model, inputs, jitter)

    with without_dropout(model):
        after = run()
        with undone(changes):
            with _recording(changes, calls if mode == "inference" else None):
                before = run()
            if mode == "training" and _is_random(model, inputs, before):
                report.notes.append(
                    "Verify: the model draws random numbers in train mode, which was therefore "
                    "not compared."
                )
                return None
            moved = [run(generator) for _ in range(2)]
    return difference(before, after, moved)


def _is_random(model: torch.nn.Module, inputs: Inputs, before: Run) -> bool:
    torch.manual_seed(1)
    again = with_gradients(model, inputs)
    pairs = zip(before.outputs, again.outputs, strict=True)
    return not all(torch.allclose(x, y, equal_nan=True) for x, y in pairs)


@contextmanager
def _recording(
    changes: Sequence[Change], calls: dict[str, tuple[torch.nn.Module, Inputs]] | None
) -> Iterator[None]:
    """The first call of one module of each class that takes a padding mask."""
    with ExitStack() as stack:
        kinds: set[type] = set()
        for change in changes:
            kind = type(change.module)
            takes = set(_PADDING) & set(inspect.signature(kind.forward).parameters)
            if calls is None or kind in kinds or not takes:
                continue
            kinds.add(kind)

            def note(
                module: Any, args: Any, kwargs: Any, name: str = change.name, kind: type = kind
            ) -> None:
                calls.setdefault(name or kind.__name__, (module, Inputs(args, kwargs)))

            stack.callback(change.module.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield


def _compare_padded(module: torch.nn.Module, changes: Sequence[Change], seen: Inputs) -> str | None:
    """The recorded call once more, with the end of the last sequence hidden."""
    padded = _with_padding(module, seen)
    if padded is None:
        return None
    module.eval()
    after = with_gradients(module, padded)
    with undone(changes):
        before = with_gradients(module, padded)
        generator = torch.Generator().manual_seed(0)
        moved = [with_gradients(module, padded, generator) for _ in range(2)]
    return difference(before, after, moved)


def _with_padding(module: Any, seen: Inputs) -> Inputs | None:
    bound = inspect.signature(module.forward).bind(*seen.args, **seen.kwargs)
    given = bound.arguments
    for mask, about in _PADDING.items():
        if mask not in inspect.signature(module.forward).parameters or given.get(mask) is not None:
            continue
        source = given.get(about, given.get("src"))  # the memory of a whole Transformer is its src
        if not isinstance(source, Tensor) or source.dim() != 3 or source.is_nested:
            return None
        batch_first = _batch_first(module)
        batch, length = source.shape[:2] if batch_first else source.shape[1::-1]
        if batch == 0 or length < 2:
            return None
        hidden = torch.zeros(batch, length, dtype=torch.bool, device=source.device)
        hidden[-1, length - max(1, length // 3) :] = True
        given[mask] = hidden
    arguments = {name: _one_kind(name, value, given) for name, value in given.items()}
    return Inputs((), arguments)


def _one_kind(name: str, value: Any, given: dict[str, Any]) -> Any:
    """A padding mask in the form of a float attention mask next to it: torch warns of mixtures."""
    if name not in _PADDING or value is None or value.dtype != torch.bool:
        return value
    prefix = name.removesuffix("key_padding_mask")
    for other in (f"{prefix}mask", "attn_mask", "mask"):
        mask = given.get(other)
        if isinstance(mask, Tensor) and mask.is_floating_point():
            return torch.zeros_like(value, dtype=mask.dtype).masked_fill(value, -torch.inf)
    return value


def _batch_first(module: Any) -> bool:
    for inner in module.modules():
        if isinstance(inner, torch.nn.MultiheadAttention):
            return bool(inner.batch_first)
    return True


@contextmanager
def _zeros_at_padding(changes: Sequence[Change]) -> Iterator[None]:
    """Stacks give zeros at padded places, which ours and torch's fill differently in inference."""
    with ExitStack() as stack:
        for change in changes:
            for kind, mask in (
                (torch.nn.TransformerEncoder, "src_key_padding_mask"),
                (torch.nn.TransformerDecoder, "tgt_key_padding_mask"),
            ):
                if isinstance(change.module, kind):
                    hook = _zeros_by(mask)
                    handle = change.module.register_forward_hook(hook, with_kwargs=True)
                    stack.callback(handle.remove)
        yield


def _zeros_by(mask: str) -> Any:
    def hook(module: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        hidden = inspect.signature(module.forward).bind(*args, **kwargs).arguments.get(mask)
        if hidden is None or output.dim() != 3 or output.is_nested:
            return None
        hidden = hidden if hidden.dtype == torch.bool else hidden == -torch.inf
        if not _batch_first(module):
            hidden = hidden.transpose(0, 1)
        return output.masked_fill(hidden.unsqueeze(-1), 0.0)

    return hook
