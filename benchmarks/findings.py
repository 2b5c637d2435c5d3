"""Reads and writes result files; evaluates them case by case.

Each machine has one JSON file, with one line per row:

    {"format": 1, "suites": {NAME: {"machine": ..., "options": ..., "rows": [ROW, ...]}}}

A row is a `measure.benchmark_case.Row`; times are in seconds, samples in microseconds. A run replaces
its own suites in the file and keeps the others.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from transformer_fast.measure import machine
from transformer_fast.measure.benchmark_case import Row
from transformer_fast.measure.clock import Ratio, Summary, speed_up

FORMAT = 1
FOLDER = Path(__file__).parent / "results"

_TUPLES = {"time": Summary, "vs_reference": Ratio, "vs_torch": Ratio}


class ResultsError(ValueError):
    """Raised for a file that is not a result file."""


def _rounded(value: Any) -> Any:
    """Returns the value with five significant digits in all its floats."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, (list, tuple)):
        return [_rounded(one) for one in value]
    return {k: _rounded(v) for k, v in value.items()} if isinstance(value, dict) else value


def row_to_json(row: Row) -> dict[str, Any]:
    """Converts a row to a dict without fields that are None or empty."""
    found = asdict(row)
    for name in _TUPLES:
        value = getattr(row, name)
        found[name] = value and value._asdict()
    found["samples"] = [1e6 * sample for sample in row.samples]
    return {k: _rounded(v) for k, v in found.items() if v not in (None, [], {})}


def row_from_json(found: dict[str, Any]) -> Row:
    known = {field.name for field in fields(Row)}
    values = {k: v for k, v in found.items() if k in known}
    for name, kind in _TUPLES.items():
        if name in values:
            values[name] = kind(**values[name])
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
    whole = path.with_suffix(".tmp")  # an interrupted write leaves the file as it was
    whole.write_text(_text(before | suites), encoding="utf-8")
    whole.replace(path)


class Finding(NamedTuple):
    """One case: the row of the dispatcher's choice, compared with the fastest other candidate."""

    chosen: Row
    #: The fastest other candidate, which may be ours, too; None if there is none.
    rival: Row | None
    #: The speed-up of `chosen` over `rival`.
    against: Ratio | None
    #: The suite's name, since suites with and without gradients have cases of the same names.
    suite: str = ""


def taken(suite: dict[str, Any]) -> dict[str, int]:
    """Returns the number of cases by when they were taken, date and commit; the oldest first."""
    last = machine.taken(suite["machine"])
    counts = Counter(rows[0].taken or last for rows in by_case(suite["rows"]).values())
    return dict(sorted(counts.items()))


def by_case(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Groups the rows by (op, case), in their order."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.case), []).append(row)
    return groups


#: Names of PyTorch's rows: what a user runs without this package and without tuning. A row of ours has
#: such a name if the dispatcher selects PyTorch's op.
PYTORCH = ("torch", "torch eager", "torch fast path", "torch.compile")


def alternatives(rows: Sequence[Row], foreign: bool) -> list[Row]:
    """Returns the correct candidates besides the chosen one, fastest first; ``foreign``: not ours."""
    found = [
        row
        for row in rows
        if row.time and row.ok and not row.chosen
        and not (foreign and row.ours and row.candidate not in PYTORCH)
    ]  # fmt: skip
    return sorted(found, key=attrgetter("time.median"))


def findings(rows: Sequence[Row], suite: str = "", foreign: bool = False) -> list[Finding]:
    """Returns a finding for every case in which the dispatcher's choice was timed.

    ``foreign``: the rival is other software, not another backend of ours.
    """
    found = []
    for group in by_case(rows).values():
        chosen = next((row for row in group if row.chosen and row.time is not None), None)
        if chosen is None:
            continue
        rival = next(iter(alternatives(group, foreign)), None)
        against = None if rival is None else speed_up(rival.samples, chosen.samples)
        found.append(Finding(chosen, rival, against, suite))
    return found


def losses(found: Sequence[Finding]) -> list[Finding]:
    """Returns the cases in which another candidate is significantly faster, worst first."""
    lost = [one for one in found if one.against is not None and one.against.high < 1.0]
    return sorted(lost, key=attrgetter("against.value"))


@dataclass(frozen=True)
class Machine:
    """The suites of one machine, from one or several files."""

    slug: str
    suites: dict[str, Any]

    @property
    def about(self) -> dict[str, Any]:
        """The description of the machine when its last suite was taken."""
        every: list[dict[str, Any]] = [suite["machine"] for suite in self.suites.values()]
        return max(every, key=itemgetter("date"))

    @property
    def title(self) -> str:
        """Such as 'AMD EPYC (Zen 5), avx512_bf16, 2 threads'."""
        isa, threads = self.about["isa"] or "no native module", self.about["threads"]
        return f"{machine.cpu(self.about)}, {isa}, {threads} thread{'s' if threads > 1 else ''}"

    @cached_property
    def ordinary(self) -> dict[str, list[Finding]]:
        """Suite -> its findings, without scaling; cached: the bootstrap is slow."""
        return {
            name: findings(suite["rows"], name)
            for name, suite in self.suites.items()
            if not is_scaling(name)
        }

    def over_torch(self, suite: str | None = None) -> list[float]:
        """Returns the speed-ups over PyTorch's best: of one suite, or all but overhead and scaling.

        8-bit ops are left out: PyTorch has none, and its row is our formula in its operators.
        """
        return [
            row.vs_torch.value
            for name, found in self.suites.items()
            if name == suite or (suite is None and name != "overhead" and not is_scaling(name))
            for row in found["rows"]
            if row.chosen and row.vs_torch and not row.op.startswith("int8_")
        ]

    @property
    def all(self) -> list[Finding]:
        """The findings of all suites except overhead and scaling."""
        return [f for name, found in self.ordinary.items() if name != "overhead" for f in found]


def is_scaling(suite: str) -> bool:
    """True if the suite is shown as a plot instead of a table."""
    return suite.startswith("scaling: ")


def machines(folder: Path = FOLDER) -> list[Machine]:
    """Returns the machines of a folder; a machine's scaling file is merged with its other file."""
    found: dict[str, dict[str, Any]] = {}
    # A machine's own file comes before those of a forced ISA.
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        slug = path.stem.removesuffix("-scaling")
        found[slug] = found.get(slug, {}) | read(path)
    return [Machine(slug, suites) for slug, suites in found.items() if suites]
