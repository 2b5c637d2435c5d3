"""Reads and writes result files; evaluates them case by case; formats tables.

Each machine has one JSON file, with one line per row:

    {"format": 1, "suites": {NAME: {"machine": ..., "options": ..., "rows": [ROW, ...]}}}

A row is a `measure.benchmark_case.Row`; times are in seconds, samples in microseconds. A run replaces
its own suites in the file and keeps the others.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from transformer_fast.cli import form
from transformer_fast.measure import machine
from transformer_fast.measure.benchmark_case import Row
from transformer_fast.measure.clock import Ratio, Summary, speed_up

FORMAT = 1
FOLDER = Path(__file__).parent / "results"

_TUPLES = {"time": Summary, "vs_reference": Ratio, "vs_torch": Ratio}

_ROUNDED = (
    *("error", "error_ratio", "roof_share", "split_share"),
    *("flops", "useful_flops", "bytes"),
)


class ResultsError(ValueError):
    """Raised for a file that is not a result file."""


def _short(value: float | None, digits: int) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def row_to_json(row: Row) -> dict[str, Any]:
    """Converts a row to a dict without fields that are None or empty."""
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
    """Reads the suites of a file, with rows as `Row`. Raises ResultsError, OSError."""
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


def write(path: Path, suites: dict[str, Any], partial: bool = False) -> None:
    """Writes these suites to the file; keeps its other suites.

    ``partial``: keeps the other cases of these suites, too, with their date and commit.
    """
    before = read(path) if path.exists() else {}
    for name in suites.keys() & before.keys() if partial else ():
        cases = by_case(suites[name]["rows"])
        taken = machine.taken(before[name]["machine"])
        same = taken == machine.taken(suites[name]["machine"])
        kept = [
            replace(row, taken=row.taken or (None if same else taken))
            for row in before[name]["rows"]
            if (row.op, row.case) not in cases
        ]
        suites = suites | {name: suites[name] | {"rows": [*kept, *suites[name]["rows"]]}}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(before | suites), encoding="utf-8")


def files(folder: Path = FOLDER) -> list[Path]:
    """Returns all result files, sorted by name: a machine's own before those of a forced ISA."""
    return sorted(folder.glob("*.json"), key=lambda path: path.stem)


class Finding(NamedTuple):
    """One case: the row of the dispatcher's choice, compared with the fastest other candidate."""

    chosen: Row
    #: The fastest other candidate, which may be ours, too; None if there is none.
    rival: Row | None
    #: The speed-up of `chosen` over `rival`.
    against: Ratio | None
    #: The suite's name; forward and backward suites have cases of the same names.
    suite: str = ""

    @property
    def lost(self) -> bool:
        """True if the rival is significantly faster."""
        return self.against is not None and self.against.high < 1.0


def taken(suite: dict[str, Any]) -> dict[str, int]:
    """Returns the number of cases by when they were taken, date and commit; the oldest first."""
    last = machine.taken(suite["machine"])
    counts = Counter(rows[0].taken or last for rows in by_case(suite["rows"]).values())
    return dict(sorted(counts.items()))


@functools.cache
def commits_behind(when: str) -> int | None:
    """Returns how many commits have changed csrc since results of this date and commit.

    None if this is unknown: the commit is no ancestor of this checkout's, or there is no checkout.
    """
    commit = when.partition(", ")[2].removesuffix("+")
    if not commit or machine.git("merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    count = machine.git("rev-list", "--count", f"{commit}..HEAD", "--", "csrc")
    return None if count is None else int(count)


def by_case(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Groups the rows by (op, case), in their order."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.case), []).append(row)
    return groups


def findings(rows: Sequence[Row], suite: str = "") -> list[Finding]:
    """Returns a finding for every case in which the dispatcher's choice was timed."""
    found = []
    for group in by_case(rows).values():
        chosen = next((row for row in group if row.chosen and row.time is not None), None)
        if chosen is None:
            continue
        others = [row for row in group if row is not chosen and row.time is not None and row.ok]
        rival = min(others, key=attrgetter("time.median"), default=None)
        against = None if rival is None else speed_up(rival.samples, chosen.samples)
        found.append(Finding(chosen, rival, against, suite))
    return found


def losses(found: Sequence[Finding]) -> list[Finding]:
    """Returns the cases in which another candidate is faster, worst first."""
    lost = [finding for finding in found if finding.lost]
    return sorted(lost, key=lambda finding: finding.against.value if finding.against else 1.0)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """Formats a Markdown table; the first ``words`` columns are left-aligned, the others right."""
    marks = ["---"] * words + ["---:"] * (len(headings) - words)
    lines = [headings, marks, *rows]
    escaped = ((cell.replace("|", "\\|") for cell in line) for line in lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in escaped)


def interval(ratio: Ratio | None) -> str:
    """Formats a ratio: '1.70x (1.66-1.75)'."""
    if ratio is None:
        return ""
    return f"{form.times(ratio.value)} ({form.interval(ratio.low, ratio.high)})"


def roof(row: Row) -> str:
    """Formats '57 %', or '113 % (44 %)' with the share of fp32's second roof in parentheses."""
    second = "" if row.split_share is None else f" ({form.percent(row.split_share)})"
    return form.percent(row.roof_share) + second


def seconds(row: Row | None) -> str:
    return form.seconds(row.time.median) if row is not None and row.time is not None else ""


def rates(row: Row) -> str:
    """Formats Gflop/s: '412', or '206 (412)' if half is masked out, dense in parentheses."""
    if row.time is None or row.flops == 0.0:
        return ""
    useful = form.rate(row.useful_flops, row.time.median)
    if row.useful_flops == row.flops:
        return useful
    return f"{useful} ({form.rate(row.flops, row.time.median)})"


def work(finding: Finding) -> str:
    """Formats the case's name: 'attention (4,8,1024,64) with gradients, bfloat16'."""
    kind, _, dtype = finding.suite.partition(", ")
    gradients = " with gradients" if kind == "backward" else ""
    name = f"{finding.chosen.op} {finding.chosen.case}{gradients}"
    return name if not dtype or name.endswith(dtype) else f"{name}, {dtype}"


def _rival(finding: Finding) -> str:
    return "" if finding.rival is None else finding.rival.candidate


def _mebibytes(finding: Finding) -> str:
    amount = finding.chosen.peak_bytes
    return "" if amount is None else form.three_digits(amount / 2**20)


#: Column heading -> function that formats its cells; columns of words come first.
CELLS: dict[str, Callable[[Finding], str]] = {
    "work": work,
    "suite": lambda found: found.suite,
    "op": lambda found: found.chosen.op,
    "case": lambda found: found.chosen.case,
    "on": lambda found: found.chosen.candidate,
    "faster": _rival,
    "time": lambda found: seconds(found.chosen),
    "our time": lambda found: seconds(found.chosen),
    "its time": lambda found: seconds(found.rival),
    "vs reference": lambda found: form.times(getattr(found.chosen.vs_reference, "value", None)),
    "vs torch's best (95 %)": lambda found: interval(found.chosen.vs_torch),
    "fastest other": _rival,
    "vs it (95 %)": lambda found: interval(found.against),
    "vs the fastest other (95 %)": lambda found: (
        _rival(found) and f"{_rival(found)}: {interval(found.against)}"
    ),
    "Gflop/s (dense)": lambda found: rates(found.chosen),
    "roof": lambda found: roof(found.chosen),
    "MiB": _mebibytes,
    "error in refs": lambda found: form.times(found.chosen.error_ratio),
}
SUMMARY = (
    *("op", "case", "on", "time", "vs reference", "vs torch's best (95 %)"),
    *("fastest other", "vs it (95 %)", "Gflop/s (dense)", "roof", "MiB", "error in refs"),
)
FIGURES = ("work", "time", "vs torch's best (95 %)", "roof", "vs the fastest other (95 %)")
LOST = ("suite", "op", "case", "on", "faster", "our time", "its time", "vs it (95 %)")


def table(found: Iterable[Finding], headings: Sequence[str]) -> str:
    """Formats a Markdown table with a line per case and these columns of `CELLS`."""
    words = sum(heading in ("work", "suite", "op", "case", "on", "faster") for heading in headings)
    rows = [[CELLS[heading](one) for heading in headings] for one in found]
    return markdown(headings, rows, words)


# Sentence encoders: what they do in a second, and how close it is to fp64.

#: The suite, whose cases are named "MODEL, ORDER, PRECISION, N threads".
TEXT = "text encoders"


def per_second(row: Row | None) -> str:
    """Formats sentences a second, and the cosine of the worst to fp64's: '231 (0.99993)'."""
    if row is None or row.time is None or row.items is None or row.error is None:
        return ""
    # The error is the distance of unit vectors.
    return f"{form.three_digits(row.items / row.time.median)} ({1 - row.error**2 / 2:.5f})"


def text_rows(rows: Sequence[Row]) -> str:
    """Formats a Markdown table of all cases and candidates of the suite."""
    names = list(dict.fromkeys(row.candidate for row in rows if row.time is not None))
    lines = []
    for (_, case), group in by_case(rows).items():
        known = {row.candidate: row for row in group}
        lines.append([case, *(per_second(known.get(name)) for name in names)])
    return markdown(("sentences a second (cosine)", *names), lines, words=1)


def text_summary(rows: Sequence[Row]) -> str:
    """Formats a Markdown table: each model, order and precision, ours beside the fastest other.

    With the highest number of threads only. Returns '' if nothing of ours was timed.
    """
    most = max((row.case.rpartition(", ")[2] for row in rows), default="")
    eager = {row.case: row for row in rows if row.candidate == "torch eager"}
    lines = []
    for one in findings([row for row in rows if row.case.endswith(most)]):
        name, precision, _ = one.chosen.case.rsplit(", ", 2)
        torch = per_second(eager.get(f"{name}, float32, {most}")).partition(" ")[0]
        other = f"{one.rival.candidate}: {per_second(one.rival)}" if one.rival else ""
        ratio = interval(one.against).partition(" ")[0]
        lines.append([name, precision, torch, per_second(one.chosen), other, ratio])
    heads = ("model, order", "precision", "PyTorch float32", "ours", "fastest other", "ratio")
    return markdown(heads, lines, words=2) if lines else ""
