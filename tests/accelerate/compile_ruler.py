"""Compiling with backend="transformer_fast" in tests: the same numbers, and what was rewritten."""

from __future__ import annotations

import copy
from typing import Any

import torch
from module_ruler import assert_same_numbers

from transformer_fast import compile_backend
from transformer_fast.accelerate.graph.report import GraphReport


def compiled(model: Any) -> tuple[Any, list[GraphReport]]:
    reports: list[GraphReport] = []
    options = {"report": reports.append}
    return torch.compile(model, backend=compile_backend, options=options), reports


def check(model: torch.nn.Module, *args: Any, **counts: int) -> list[GraphReport]:
    """Rewritten as said (at least), and the same numbers in inference and in training."""
    ours, reports = compiled(copy.deepcopy(model))
    assert_same_numbers(ours.train(), model.train(), args, {}, grad=True)
    ours, more = compiled(copy.deepcopy(model))
    assert_same_numbers(ours.eval(), model.eval(), args, {}, grad=False)
    for report in (*reports, *more):
        for op, count in counts.items():
            assert report.counts.get(op, 0) == count, str(report)
    assert reports
    assert more
    return reports
