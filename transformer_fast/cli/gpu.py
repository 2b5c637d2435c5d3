"""The GPU kernels in `compare`'s table: what its run of `prove` found, by op, dtype and kernel."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from .. import proof
from ..dispatch import OPS, kernels
from ..measure.benchmark_case import Row, worse
from ..measure.device import Finding
from ..measure.summary import speed_up, summarise
from ..proof import Proof
from ..specs.gpu import COMMON
from .prove import Measured


def ops(options: argparse.Namespace) -> list[str]:
    """Those whose GPU kernels `compare` measures; none without a GPU, or if it is not to."""
    if options.device or options.backend or options.quick or not torch.cuda.is_available():
        return []
    wanted = [
        op
        for op in OPS
        if op in options.op
        and any(one.proven is not None and one.unavailable is None for one in kernels(op))
    ]
    # Where the time is too short, it is the op with most classes that lacks some.
    return sorted(wanted, key=lambda op: len(COMMON[op]))


def _selected(known: Proof | None) -> set[tuple[object, ...]]:
    """The keys of the verdicts by which the dispatcher selects a kernel."""
    best: dict[tuple[object, ...], proof.Verdict] = {}
    for verdict in known.verdicts if known else ():
        call = verdict.op, *verdict[2:5]
        if verdict.chosen and (call not in best or verdict.gain > best[call].gain):
            best[call] = verdict
    return {verdict[:5] for verdict in best.values()}


def rows(findings: Sequence[Finding], known: Proof | None) -> list[Row]:
    """A row for each op, dtype and kernel: its worst error, and the time of one call of each case."""
    selected = _selected(known)
    found: dict[tuple[str, str, str], list[Finding]] = {}
    for one in findings:
        op, backend, dtype = one.verdict[:3]
        found.setdefault((op, dtype, backend), []).append(one)
    result = []
    for op, dtype, backend in sorted(found):
        mine = found[op, dtype, backend]
        chosen = any(one.verdict[:5] in selected for one in mine)
        row = Row(op, f"GPU, {dtype}", backend, True, chosen)
        wrong = [one.verdict for one in mine if not one.verdict.right]
        row.ok = not wrong
        for one in mine:
            if one.error is not None and one.error_ratio is not None:
                row.error = worse(row.error, one.error)
                row.error_ratio = worse(row.error_ratio, one.error_ratio)
        timed = [one for one in mine if one.samples and one.torch_samples]
        if wrong:
            row.reason = f"{wrong[0].shape}: {wrong[0].problem}"
        elif timed:
            # One piece of work is all cases, as a case on text is several batches.
            row.samples = [
                sum(times) for times in zip(*(one.samples for one in timed), strict=True)
            ]
            theirs = [
                sum(times) for times in zip(*(one.torch_samples for one in timed), strict=True)
            ]
            row.time, row.vs_torch = summarise(row.samples), speed_up(theirs, row.samples)
        else:
            row.reason = mine[0].verdict.problem
        result.append(row)
    return result


def remarks(measured: Measured, kept: tuple[Proof, Path] | None) -> list[str]:
    """What the dispatcher goes by from now on."""
    verdicts = measured.verdicts
    chosen = sum(verdict.chosen for verdict in verdicts)
    lines = [
        f"{chosen} of {len(verdicts)} verdicts are right and faster than PyTorch "
        f"({measured.seconds:.0f} seconds)"
    ]
    if kept is None:
        return [*lines, "nothing was written"]
    known, path = kept
    return [*lines, f"the dispatcher goes by {path}{proof.longer_way(known)}"]
