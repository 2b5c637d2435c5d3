"""``torch.compile(model, backend="transformer_fast")``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule

from .inner import compile_rest, why_not
from .report import GraphReport, remember
from .rewrite import rewrite

_log = logging.getLogger("transformer_fast")

#: The option ``inner`` that is not given.
INNER: Callable[..., Any] | None = compile_rest


def compile_backend(
    module: GraphModule,
    example_inputs: list[Any],
    *,
    options: dict[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The backend: rewrites a captured graph to our ops and runs the rest as PyTorch would.

    Recognised, however it is written: attention around a softmax, feed-forward networks,
    norms with the residual sum in front, linear maps, calls of F.scaled_dot_product_attention.
    The numbers stay the user's, up to rounding; in training, dropout draws other elements. Rows
    that see nothing keep their meaning where it is a number (a finite fill like -1e9: all keys
    alike) and give 0 where it is NaN (a fill of -inf).

    Args:
        module, example_inputs: what torch.compile passes to a backend.

    Options of ``torch.compile(..., options={...})``:
        inner: what compiles the rewritten graph: name or function of another backend, or None for
            nothing. By default inductor, for inference on a CPU where a C++ compiler is found, unless
            masks are looked at while the program runs.
        report: a function that is given each `GraphReport`.

    What was done: `transformer_fast.compile_reports`, and the log at level INFO.

    Raises:
        ValueError: an unknown option, or a mode.
    """
    inner, tell = _options(options, mode)
    report = rewrite(module)
    if inner is compile_rest:
        reason = why_not(module, example_inputs)
        report.rest = "compiled by inductor" if reason is None else f"as written, since {reason}"
        inner = compile_rest if reason is None else None
    remember(report)
    _log.info("%s", report)
    if tell is not None:
        tell(report)
    if inner is None:
        return module.forward
    compiled: Callable[..., Any] = inner(module, example_inputs)
    return compiled


def _options(
    options: dict[str, Any] | None, mode: str | None
) -> tuple[Callable[..., Any] | None, Callable[[GraphReport], Any] | None]:
    if mode is not None:
        raise ValueError(f'backend "transformer_fast" has no modes, and mode={mode!r} was given')
    given = dict(options or {})
    inner, tell = given.pop("inner", INNER), given.pop("report", None)
    if given:
        raise ValueError(
            f'backend "transformer_fast" has the options inner and report, not {", ".join(given)}'
        )
    if isinstance(inner, str):
        inner = torch._dynamo.lookup_backend(inner)
    return inner, tell
