"""Results as files: one JSON for each machine, one line for each row.

    {"format": 1, "suites": {NAME: {"machine": ..., "options": ..., "rows": [ROW, ...]}}}

A row is a `measure.benchmark_case.Row`; times are seconds, samples microseconds. A run replaces the
suites that it ran and leaves the others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from transformer_fast.measure.benchmark_case import Row
from transformer_fast.measure.summary import Ratio, Summary

FORMAT = 1
FOLDER = Path(__file__).parent / "results"

_TUPLES = {"time": Summary, "vs_reference": Ratio, "vs_torch": Ratio}

_ROUNDED = (
    *("error", "error_ratio", "roof_share", "split_share"),
    *("flops", "useful_flops", "bytes"),
)


class ResultsError(ValueError):
    """A file that is not ours."""


def _short(value: float | None, digits: int) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def row_to_json(row: Row) -> dict[str, Any]:
    """What is None or empty is left out."""
    found = asdict(row)
    for name in _TUPLES:
        value = getattr(row, name)
        found[name] = value and {k: _short(v, 5) for k, v in value._asdict().items()}
    for name in _ROUNDED:
        found[name] = _short(found[name], 4)
    found["samples"] = [_short(1e6 * sample, 5) for sample in row.samples]
    return {k: v for k, v in found.items() if v is not None and v != []}


def row_from_json(found: dict[str, Any]) -> Row:
    known = {field.name for field in fields(Row)}
    values = {k: v for k, v in found.items() if k in known}
    for name, kind in _TUPLES.items():
        if name in values:
            values[name] = kind(**values[name])
    if values.get("time") is not None:
        values["time"] = values["time"]._replace(rounds=int(values["time"].rounds))
    values["samples"] = [sample / 1e6 for sample in values.get("samples", [])]
    return Row(**values)


def read(path: Path) -> dict[str, Any]:
    """The suites of a file, rows as `Row`. Raises ResultsError, OSError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise ResultsError(f"{path} has format {found['format']}, not {FORMAT}")
        return {
            name: suite | {"rows": [row_from_json(row) for row in suite["rows"]]}
            for name, suite in found["suites"].items()
        }
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path} holds no benchmark results: {error!r}") from None


def _text(suites: dict[str, Any]) -> str:
    parts = []
    for name, suite in suites.items():
        head = {k: v for k, v in suite.items() if k != "rows"}
        rows = ",\n".join(f"   {json.dumps(row_to_json(row))}" for row in suite["rows"])
        inside = json.dumps(head, indent=1)[1:-1].rstrip().replace("\n", "\n ")
        parts.append(f'  {json.dumps(name)}: {{{inside},\n   "rows": [\n{rows}\n  ]}}')
    return f'{{"format": {FORMAT}, "suites": {{\n' + ",\n".join(parts) + "\n}}\n"


def write(path: Path, suites: dict[str, Any]) -> None:
    """Put these suites into the file; others in it stay."""
    before = read(path) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(before | suites), encoding="utf-8")


def files(folder: Path = FOLDER) -> list[Path]:
    """All result files, by name: a machine's before those that are held to an instruction set."""
    return sorted(folder.glob("*.json"), key=lambda path: path.stem)
