"""``python -m benchmarks compare BASE``: finds cases that are slower than in BASE.

BASE is a result file of this machine, or a git revision. A revision is built in a worktree and timed
alternately with this tree. As long as a case looks slower or faster, another pass is timed, up to
``--passes``, and all passes must agree.

Times are compared relative to PyTorch's in the same rounds of the same process, because the speed of
the machine differs between runs. A slow-down counts if its 95 % interval lies above the tolerance in
every pass.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean as mean
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from transformer_fast._console import bullets, columns, output
from transformer_fast.cli import form
from transformer_fast.measure import machine
from transformer_fast.measure.benchmark_case import Row
from transformer_fast.measure.clock import bootstrap, interval

from . import findings
from .findings import by_case

ROOT = Path(__file__).resolve().parents[1]
_SUITES = ("ops", "layers")

#: PyTorch's candidates, whose code is the same before and after.
_CONTROLS = ("torch", "torch eager", "torch fast path")

#: Name -> suite, as returned by `findings.read`.
Suites = dict[str, Any]
#: Benchmark key: (suite, op, case, candidate).
Key = tuple[str, str, str, str]
#: (before, after)
Pass = tuple[Suites, Suites]


class Change(NamedTuple):
    """New time / old time, both relative to PyTorch's, with its 95 % interval."""

    value: float
    low: float
    high: float
    #: True if no PyTorch row exists to normalise by: ``value`` is a ratio of absolute times.
    raw: bool


def _timed(rows: Sequence[Row], candidate: str | None) -> Row | None:
    return next((row for row in rows if row.candidate == candidate and row.samples), None)


def change(old: Sequence[Row], new: Sequence[Row], candidate: str) -> Change | None:
    """Returns the change of ``candidate`` between the old and new rows of a case; None: not timed.

    If it was not timed before, it is compared with the candidate that was chosen then: the dispatcher
    may have chosen other backends for a module, such as 'cpu+torch' instead of 'cpu'.
    """
    after, before = _timed(new, candidate), _timed(old, candidate)
    if before is None and after is not None and after.chosen:
        before = next((row for row in old if row.chosen and row.samples), None)
    if before is None or after is None:
        return None
    name = next((one for one in _CONTROLS if _timed(old, one) and _timed(new, one)), None)
    exact, draws = [], []
    for seed, (row, rows) in enumerate(((before, old), (after, new)), start=1):
        control = _timed(rows, name)
        middle, drawn = bootstrap([row.samples, *([control.samples] if control else [])], seed)
        exact.append((middle[0] / middle[1] if control else middle[0]).item())
        draws.append(drawn[0] / drawn[1] if control else drawn[0])
    return Change(exact[1] / exact[0], *interval(draws[1] / draws[0]), name is None)


def judge(passes: Sequence[Pass]) -> tuple[dict[Key, list[Change]], dict[Key, str]]:
    """Returns (changes, lost). Changes: of each row of ours that both sides have, one per pass.

    ``lost``: key -> reason, for rows that were timed before and are not any more.
    """
    found: dict[Key, list[Change]] = {}
    lost: dict[Key, str] = {}
    for old, new in passes:
        for name, suite in new.items():
            known = by_case(old[name]["rows"]) if name in old else {}
            for (op, case), after in by_case(suite["rows"]).items():
                before = known.get((op, case), [])
                for row in after:
                    if not row.ours or row.candidate == "reference":
                        continue
                    key = name, op, case, row.candidate
                    if (seen := change(before, after, row.candidate)) is not None:
                        found.setdefault(key, []).append(seen)
                    elif not row.samples and _timed(before, row.candidate):
                        lost[key] = row.reason or "it was not timed"
    return found, lost


def verdict(seen: Sequence[Change], tolerance: float) -> str:
    """Returns 'slower' or 'faster' if every pass shows it beyond the tolerance, else ''."""
    if all(one.low > 1.0 + tolerance for one in seen):
        return "slower"
    return "faster" if all(one.high < 1.0 - tolerance for one in seen) else ""


def other_machines(old: Suites, new: Suites) -> list[str]:
    """Returns a sentence for each difference of the machines; empty if it is the same machine."""
    both = [(old[name]["machine"], new[name]["machine"]) for name in new if name in old]
    return list(dict.fromkeys(text for pair in both for text in machine.differences(*pair)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", help="a result file, or a git revision")
    new = "a result file (default: time this tree now)"
    parser.add_argument("new", metavar="NEW", nargs="?", type=Path, help=new)
    parser.add_argument("--tolerance", type=float, default=0.05, help="slow-down allowed (0.05)")
    how = "maximum number of passes, all of which must show a slow-down (3)"
    parser.add_argument("--passes", type=int, default=3, help=how)
    parser.add_argument("--suite", nargs="+", default=list(_SUITES), help="ops layers")
    parser.add_argument("--op", nargs="+", help="only these ops")
    parser.add_argument("--quick", action="store_true", help="small cases, few rounds")


def _table(found: Mapping[Key, Sequence[Change]], tolerance: float) -> Table:
    table = columns(("suite", "op", "case", "on"), ("new / old", "95 %", "passes", ""))
    order = [(mean([one.value for one in seen]), key, seen) for key, seen in found.items()]
    for middle, key, seen in sorted(order, key=lambda item: -item[0]):
        low, high = min(one.low for one in seen), max(one.high for one in seen)
        raw = " (not relative)" if any(one.raw for one in seen) else ""
        said = verdict(seen, tolerance) + raw
        table.add_row(*key, f"{middle:.3f}", f"{low:.3f}-{high:.3f}", str(len(seen)), said)
    return table


def _call(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    """Runs a command and returns its output. Raises CalledProcessError."""
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env=os.environ | environment, check=True,
        capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip


def _worktree(revision: str, console: Console) -> Path:
    """Checks out and builds the revision. Raises CalledProcessError, FileNotFoundError."""
    name = ["git", "rev-parse", "--verify", "--short=12", f"{revision}^{{commit}}"]
    commit = _call(name, ROOT)
    place = ROOT / "build" / "compare" / commit
    if not place.exists():
        _call(["git", "worktree", "add", "--force", "--quiet", "--detach", place, commit], ROOT)
    if not (place / "benchmarks" / "__main__.py").exists():
        raise FileNotFoundError(f"revision {revision} has no benchmark suite")
    console.print(f"building {commit} in {place}", style="dim")
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    _call(build, place, TRANSFORMER_FAST_BUILD="require")
    return place


def _time(tree: Path, options: argparse.Namespace, path: Path) -> Suites:
    """Runs the suites with the code of that tree. Raises RuntimeError, ResultsError."""
    command = [sys.executable, "-m", "benchmarks", "run", "--peer", "--json", str(path)]
    command += ["--suite", *options.suite, *(["--op", *options.op] if options.op else [])]
    command += ["--quick"] if options.quick else []
    path.unlink(missing_ok=True)
    # Exit status 1: a result is wrong. Its row then has no speed to compare.
    status = subprocess.call(command, cwd=tree, stdout=subprocess.DEVNULL)
    if status not in (0, 1) or not path.exists():
        raise RuntimeError(f"the suite ended with status {status} in {tree}")
    return findings.read(path)


def _passes(options: argparse.Namespace, console: Console) -> Iterator[Pass]:
    """Yields passes, each of which is timed when it is requested."""
    if options.passes < 1:
        raise ValueError(f"argument --passes: must be at least 1, not {options.passes}")
    base, tree, old = Path(options.base), None, Suites()
    if base.is_file():
        old = findings.read(base)
        now = {"machine": machine.describe(), "rows": []}
        elsewhere = dict.fromkeys(old, now)
        if options.new is not None or other_machines(old, elsewhere):
            yield old, elsewhere if options.new is None else findings.read(options.new)
            return
    elif options.new is not None:
        raise ValueError("NEW can be given only if BASE is a result file")
    else:
        tree = _worktree(options.base, console)
    folder = ROOT / "build" / "compare"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(options.passes):
        console.print(f"pass {number + 1} of at most {options.passes}", style="dim")
        if tree is not None:
            old = _time(tree, options, folder / f"old-{number}.json")
        yield old, _time(ROOT, options, folder / f"new-{number}.json")


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Returns 1 if a row is slower or is no longer timed, 2 if nothing can be compared, else 0."""
    console, passes = output(), []
    try:
        for one in _passes(options, console):  # until the result is clear
            passes.append(one)
            changes = judge(passes)[0].values()
            if other_machines(*one) or not any(verdict(x, options.tolerance) for x in changes):
                break
    except subprocess.CalledProcessError as error:
        why = "\n".join((error.stderr or "").strip().splitlines()[-3:]) or str(error)
        parser.error(f"{options.base!r} is no result file, and as a revision: {why}")
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(str(error))
    found, gone = judge(passes)
    unlike = other_machines(*passes[0])
    if unlike or not (found or gone):
        head = "These are results of different machines:" if unlike else "No timed rows in common."
        console.print(f"[bold red]{head}[/]")
        bullets(console, unlike)
        return 2
    console.print(_table(found, options.tolerance))
    worse = sum(verdict(seen, options.tolerance) == "slower" for seen in found.values())
    if gone:
        console.print("\n[bold red]Timed before, and not any more:[/]")
        bullets(console, [f"{' '.join(key)}: {reason}" for key, reason in gone.items()])
    slow = f"{worse} slower by more than {form.percent(options.tolerance)}"
    console.print(f"\n{form.count(len(found), 'row')}, {slow}")
    return 1 if worse or gone else 0
