"""Why some work has no row, or did not run on a kernel of ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..measure.benchmark_case import Row
from . import form

#: Kernels of ours, as opposed to what they are measured against.
_FALLBACKS = ("reference", "torch")


def absent(rows: Iterable[Row]) -> list[str]:
    """Candidates that were not measured, by reason: 'triton: it runs on ... (all 9 cases)'."""
    rows = list(rows)
    cases: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.time is None and not row.failed:
            place = f"{row.op} {row.case}"
            cases.setdefault((row.candidate, row.reason or "no reason given"), []).append(place)
    lines = []
    for (candidate, reason), places in cases.items():
        total = len({(row.op, row.case) for row in rows if row.candidate == candidate})
        if len(places) == total and total > 1:
            where = f"all {total} cases"
        elif len(places) <= 3:
            where = "; ".join(places)
        else:
            where = form.count(len(places), "case")
        lines.append(f"{candidate}: {reason} ({where})")
    return lines


def failures(rows: Iterable[Row]) -> list[str]:
    return [f"{row.op} {row.case} on {row.candidate}: {row.reason}" for row in rows if row.failed]


def fallbacks(rows: Sequence[Row]) -> list[str]:
    """Cases that run on the reference or on PyTorch's ops, with the reasons."""
    lines = []
    for row in rows:
        if row.chosen and row.candidate in _FALLBACKS:
            others = [
                f"{other.candidate}: {other.reason}"
                for other in rows
                if (other.op, other.case) == (row.op, row.case)
                and other.candidate not in _FALLBACKS
                and other.reason
            ]
            because = f", because {'; '.join(others)}" if others else ""
            lines.append(f"{row.op} {row.case} runs on '{row.candidate}'{because}")
    return lines


def inside(
    module: str, reasons: Mapping[tuple[str, str], Mapping[str, Sequence[str]]]
) -> list[str]:
    """The same for ops inside a module (what `calls.record` found), alike ones together."""
    found: dict[tuple[str, str], list[str]] = {}
    for (op, backend), against in reasons.items():
        if backend in _FALLBACKS:
            told = "; ".join(
                f"{name}: {', '.join(why)}"
                for name, why in against.items()
                if why and name not in _FALLBACKS
            )
            found.setdefault((backend, told), []).append(op)
    return [
        f"{', '.join(ops)} in {module} run on '{backend}'" + (f", because {told}" if told else "")
        for (backend, told), ops in found.items()
    ]
