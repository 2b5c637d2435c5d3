"""One thing that `accelerate` changes in a living model, and how to take it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..nn.drop_in import RECORD


class Change(Protocol):
    """A change of one module; ``apply`` and ``undo`` either do all of it or raise."""

    name: str
    module: torch.nn.Module

    @property
    def now(self) -> str:
        """What the module runs as then, for the report."""

    def apply(self) -> None: ...

    def undo(self) -> None: ...


@dataclass
class ClassChange:
    """The module gets another class and remembers its own; all it holds stays where it is."""

    name: str
    module: torch.nn.Module
    before: type
    after: type

    @property
    def now(self) -> str:
        return class_of_ours(self.after)

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


def class_of_ours(cls: type) -> str:
    """The name of the class, ours or the user's, that does the work."""
    for base in cls.__mro__:
        if base.__module__.startswith("transformer_fast."):
            parts = base.__module__.split(".")
            return ".".join([*parts[: 3 if parts[1] == "accelerate" else 2], base.__name__])
    return f"{cls.__module__}.{cls.__qualname__}"
