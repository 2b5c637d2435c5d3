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

import torch
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
    #: True if there is no PyTorch row to normalise by; then absolute times of two processes.
    raw: bool


def _relative(row: Row, control: Row | None, seed: int) -> tuple[float, torch.Tensor]:
    """Returns the median and bootstrap samples of the row's time, relative to the control's if given."""
    series = [row.samples] if control is None else [row.samples, control.samples]
    exact, draws = bootstrap(series, seed)
    if control is None:
        return exact[0].item(), draws[0]
    return (exact[0] / exact[1]).item(), draws[0] / draws[1]


def _timed(rows: Sequence[Row], candidate: str | None) -> Row | None:
    return next((row for row in rows if row.candidate == candidate and row.samples), None)


def _before(rows: Sequence[Row], after: Row) -> Row | None:
    """Returns the baseline of ``after``: the same candidate, else the one that was chosen then.

    The dispatcher may have chosen other backends for a module, such as 'cpu+torch' instead of 'cpu'.
    """
    same = _timed(rows, after.candidate)
    if same is None and after.chosen:
        same = next((row for row in rows if row.chosen and row.samples), None)
    return same


def change(old: Sequence[Row], new: Sequence[Row], candidate: str) -> Change | None:
    """Returns the change of ``candidate`` between the old and new rows of a case; None: not timed."""
    after = _timed(new, candidate)
    before = None if after is None else _before(old, after)
    if before is None or after is None:
        return None
    name = next((one for one in _CONTROLS if _timed(old, one) and _timed(new, one)), None)
    was, was_draws = _relative(before, _timed(old, name), 1)
    now, now_draws = _relative(after, _timed(new, name), 2)
    return Change(now / was, *interval(now_draws / was_draws), name is None)


def judge(passes: Sequence[Pass]) -> tuple[dict[Key, list[Change]], dict[Key, str]]:
    """Returns (changes, lost): the changes in all passes of each row of ours that both sides have.

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


def slower(seen: Sequence[Change], tolerance: float) -> bool:
    """True if every pass shows a slow-down beyond the tolerance."""
    return all(one.low > 1.0 + tolerance for one in seen)


def faster(seen: Sequence[Change], tolerance: float) -> bool:
    return all(one.high < 1.0 - tolerance for one in seen)


def other_machines(old: Suites, new: Suites) -> list[str]:
    """Returns sentences on how the machines of the two differ; empty if it is the same machine."""
    found: list[str] = []
    for name in new:
        if name in old:
            found += machine.differences(old[name]["machine"], new[name]["machine"])
    return list(dict.fromkeys(found))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", help="a result file, or a git revision")
    parser.add_argument(
        "new", metavar="NEW", nargs="?", type=Path,
        help="a result file (default: time this tree now)",
    )  # fmt: skip
    parser.add_argument("--tolerance", type=float, default=0.05, help="slow-down allowed (0.05)")
    parser.add_argument(
        "--passes",
        type=int,
        default=3,
        help="maximum number of passes, all of which must show a slow-down (3)",
    )
    parser.add_argument("--suite", nargs="+", default=list(_SUITES), help="ops layers")
    parser.add_argument("--op", nargs="+", help="only these ops")
    parser.add_argument("--quick", action="store_true", help="small cases, few rounds")


def _table(found: Mapping[Key, Sequence[Change]], tolerance: float) -> Table:
    table = columns(("suite", "op", "case", "on"), ("new / old", "95 %", "passes", ""))
    order = [(mean([one.value for one in seen]), key, seen) for key, seen in found.items()]
    for middle, key, seen in sorted(order, key=lambda item: -item[0]):
        low, high = min(one.low for one in seen), max(one.high for one in seen)
        verdict = ""
        if slower(seen, tolerance):
            verdict = "[bold red]slower"
        elif faster(seen, tolerance):
            verdict = "[green]faster"
        if any(one.raw for one in seen):
            verdict += " (not relative)"
        table.add_row(*key, f"{middle:.3f}", f"{low:.3f}-{high:.3f}", str(len(seen)), verdict)
    return table


def _call(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    """Runs a command and returns its output. Raises CalledProcessError."""
    env = {**os.environ, **environment}
    options: Any = {"check": True, "capture_output": True, "text": True}
    return subprocess.run([*map(str, command)], cwd=cwd, env=env, **options).stdout.strip()


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
    command = [sys.executable, "-m", "benchmarks", "run", "--peer", "--json", path]
    command += ["--suite", *options.suite]
    command += ["--op", *options.op] if options.op else []
    command += ["--quick"] if options.quick else []
    path.unlink(missing_ok=True)
    # Exit status 1: a result is wrong. Its row then has no speed to compare.
    status = subprocess.call([*map(str, command)], cwd=tree, stdout=subprocess.DEVNULL)
    if status not in (0, 1) or not path.exists():
        raise RuntimeError(f"the suite ended with status {status} in {tree}")
    return findings.read(path)


def _passes(options: argparse.Namespace, console: Console) -> Iterator[Pass]:
    """Yields passes, each of which is timed when it is requested."""
    if options.passes < 1:
        raise ValueError(f"argument --passes: must be at least 1, not {options.passes}")
    base, now = Path(options.base), machine.describe()
    old: Suites = {}
    if base.is_file():
        old = findings.read(base)
        if options.new is not None:
            yield old, findings.read(options.new)
            return
        if other_machines(old, {name: {"machine": now} for name in old}):
            # Other machine: return before timing anything.
            yield old, {name: {"machine": now, "rows": []} for name in old}
            return
    elif options.new is not None:
        raise ValueError("NEW can be given only if BASE is a result file")
    tree = None if base.is_file() else _worktree(options.base, console)
    folder = ROOT / "build" / "compare"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(options.passes):
        of = f"pass {number + 1} of at most {options.passes}"
        console.print(of if options.passes > 1 else "one pass", style="dim")
        if tree is not None:
            old = _time(tree, options, folder / f"old-{number}.json")
        yield old, _time(ROOT, options, folder / f"new-{number}.json")


def _judged(options: argparse.Namespace, console: Console) -> list[Pass]:
    """Runs passes until the result is clear. Raises the exceptions of `_passes`."""
    done: list[Pass] = []
    for one in _passes(options, console):
        done.append(one)
        open_still = any(
            slower(seen, options.tolerance) or faster(seen, options.tolerance)
            for seen in judge(done)[0].values()
        )
        if other_machines(*one) or not open_still:
            break
    return done


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Returns 1 if a row is slower or is no longer timed, 2 if nothing can be compared, else 0."""
    console = output()
    try:
        passes = _judged(options, console)
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or "").strip().splitlines()[-3:]
        why = "\n".join(lines) or str(error)
        parser.error(f"{options.base!r} is no result file, and as a revision: {why}")
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(str(error))
    unlike = other_machines(*passes[0])
    if unlike:
        console.print("[bold red]These are results of different machines:[/]")
        bullets(console, unlike)
        return 2
    found, gone = judge(passes)
    if not found and not gone:
        console.print("[bold red]The two have no timed rows in common.[/]")
        return 2
    console.print(_table(found, options.tolerance))
    worse = [key for key, seen in found.items() if slower(seen, options.tolerance)]
    if gone:
        console.print("\n[bold red]Timed before, and not any more:[/]")
        bullets(console, [f"{' '.join(key)}: {reason}" for key, reason in gone.items()])
    console.print(
        f"\n{form.count(len(found), 'row')}, {len(worse)} slower by more than "
        f"{form.percent(options.tolerance)}",
        style="bold red" if worse else "bold green",
    )
    return 1 if worse or gone else 0
