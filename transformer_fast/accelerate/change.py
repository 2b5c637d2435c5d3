"""One thing that `accelerate` changes in a living model, and how to take it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..nn.swapped import RECORD


class Change(Protocol):
    """A change of one module; ``apply`` and ``undo`` either do all of it or raise."""

    name: str
    module: torch.nn.Module

    def apply(self) -> None: ...

    def undo(self) -> None: ...


@dataclass
class ClassChange:
    """The module gets another class and remembers its own; all it holds stays where it is."""

    name: str
    module: torch.nn.Module
    before: type
    after: type

    def apply(self) -> None:
        self.module.__dict__[RECORD] = (self.before, self.after)
        try:
            self.module.__class__ = self.after
        except BaseException:
            self.module.__dict__.pop(RECORD, None)
            raise

    def undo(self) -> None:
        if type(self.module) is not self.after:
            raise RuntimeError(
                f"{self.name or 'the model'} cannot be restored: since accelerate its class was "
                f"changed again, to {type(self.module).__name__}; take that back first"
            )
        self.module.__class__ = self.before
        self.module.__dict__.pop(RECORD, None)


def apply_all(changes: Sequence[Change]) -> None:
    """All changes, or none if one of them raises."""
    _all_or_none(changes, lambda c: c.apply(), lambda c: c.undo())


def undo_all(changes: Sequence[Change]) -> None:
    """All changes taken back, or none if one of them raises."""
    _all_or_none(list(reversed(changes)), lambda c: c.undo(), lambda c: c.apply())


def _all_or_none(
    changes: Sequence[Change], do: Callable[[Change], Any], reverse: Callable[[Change], Any]
) -> None:
    done: list[Change] = []
    try:
        for change in changes:
            do(change)
            done.append(change)
    except BaseException:
        for change in reversed(done):
            reverse(change)
        raise


@contextmanager
def undone(changes: Sequence[Change]) -> Iterator[None]:
    """Within the block the model is as it was before."""
    undo_all(changes)
    try:
        yield
    finally:
        apply_all(changes)


def recorded(name: str, module: torch.nn.Module) -> list[Change]:
    """The changes that the module remembers."""
    record = module.__dict__.get(RECORD)
    return [] if record is None else [ClassChange(name, module, *record)]
