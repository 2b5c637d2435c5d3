"""The shape of a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from calls import Drawn
from hypothesis.strategies import SearchStrategy
from torch import Tensor

from transformer_fast.specs import OPS
from transformer_fast.specs.spec import Draw

Arguments = tuple[Any, ...]


def _no_terms(arguments: Arguments, results: tuple[Tensor | None, ...] = ()) -> float:
    return 0.0


@dataclass(frozen=True)
class Row:
    """What tests know of an op that the op table does not."""

    #: Planted bugs: the case in which each is looked for, and the op with it.
    bugs: dict[str, tuple[str, Callable[..., Any]]]
    #: What is swept: the arguments when one of the call's sizes is n.
    sweeps: dict[str, Callable[[Draw, int], Arguments]]
    #: Few elements, for finite differences. The last call has gradients of all arguments that can.
    small: Callable[[Draw], list[Arguments]]
    #: Work for several threads, split by rows, by columns and by heads.
    large: Callable[[Draw], list[Arguments]]
    #: The fuzz's calls in a dtype.
    drawn: Callable[[torch.dtype], SearchStrategy[Drawn]]
    #: The definition in NumPy and fp64, see `definitions`: takes the reference's arguments.
    defined: Callable[..., Any]
    #: The reference with its sums in another order: takes a `fuzz_checks.Orders`, then the arguments.
    in_order: Callable[..., Any]
    #: The name of a case with as much as a call can have.
    sample: str
    #: Calls like `large` that leave NaN in all scratch memory; None: those.
    filling: Callable[[Draw], list[Arguments]] | None = None
    #: Whether those of PyTorch's samples are held to PyTorch's; gradgradcheck has all.
    second_derivatives: bool = True
    #: By how much the terms of differences exceed the results, and the gradients, in fp64: takes the
    #: arguments and the exact results.
    terms: Callable[[Arguments, tuple[Any, ...]], float] = _no_terms
    gradient_terms: Callable[[Arguments], float] = _no_terms


def wrong(op: str, then: Callable[..., Any] | None = None, **changes: Any) -> Callable[..., Any]:
    """The reference with other arguments: values, or functions of the call, which has all by name.

    ``then`` makes other results of the call and the right ones.
    """

    def run(*arguments: Any) -> Any:
        call = SimpleNamespace(**OPS[op].named(arguments))
        new = {name: x(call) if callable(x) else x for name, x in changes.items()}
        results = OPS[op].reference(*{**vars(call), **new}.values())
        if then is None:
            return results
        return then(call, *(results if isinstance(results, tuple) else (results,)))

    return run


def some(n: int, least: int = 300) -> int:
    """How many rows of n make enough elements for a fair ratio."""
    return least // max(1, n) + 1


def at(x: Tensor | None, order: Tensor) -> Tensor | None:
    return None if x is None else x.reshape(-1)[order]


def size_of(x: Tensor) -> float:
    """The largest finite absolute value."""
    return torch.where(x.isfinite(), x.abs(), 0.0).max().item() if x.numel() else 0.0
