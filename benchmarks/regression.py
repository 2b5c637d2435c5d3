"""``python -m benchmarks compare BASE``: is anything slower than it was?

BASE is a result file of this machine, or a git revision, which is then built in a worktree of its
own and timed in turn with this tree.

What is compared is not a time but a time relative to PyTorch's in the same rounds of the same
process, because the machine is never twice as fast or as slow as it was. A slow-down counts if its
95 % interval lies above the tolerance, in every pass.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from transformer_fast.cli import form
from transformer_fast.cli.console import bullets, output
from transformer_fast.measure import machine
from transformer_fast.measure.contest import Row

from . import store

ROOT = Path(__file__).resolve().parents[1]
_RESAMPLES = 2000
#: PyTorch's contenders, any of which is the same code before and after.
_CONTROLS = ("torch", "torch eager", "torch fast path")
_SUITES = ("ops", "layers")


class Change(NamedTuple):
    """New time / old time, both relative to PyTorch's, with its 95 % interval."""

    value: float
    low: float
    high: float
    #: Without PyTorch to compare with: times as they are, of two processes.
    raw: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="BASE", help="a result file, or a git revision")
    parser.add_argument(
        "new", metavar="NEW", nargs="?", type=Path,
        help="a result file (default: this tree is timed now)",
    )  # fmt: skip
    parser.add_argument("--tolerance", type=float, default=0.05, help="slow-down allowed (0.05)")
    parser.add_argument("--passes", type=int, default=3, help="with a revision: times in turn (3)")
    parser.add_argument("--suite", nargs="+", default=list(_SUITES), help="ops layers")
    parser.add_argument("--op", nargs="+", help="only these ops")
    parser.add_argument("--quick", action="store_true", help="small cases, few rounds")


def _medians(samples: Sequence[Sequence[float]], seed: int) -> torch.Tensor:
    """Bootstrap medians (series, draws) of paired series."""
    paired = torch.tensor([list(series) for series in samples], dtype=torch.float64)
    rounds = torch.randint(
        paired.shape[1],
        (_RESAMPLES, paired.shape[1]),
        generator=torch.Generator().manual_seed(seed),
    )
    return torch.quantile(paired[:, rounds], 0.5, dim=-1)


def _relative(row: Row, control: Row | None, seed: int) -> tuple[float, torch.Tensor]:
    """The row's time over the control's (or 1): median, and bootstrap draws."""
    series = [row.samples] if control is None else [row.samples, control.samples]
    exact = torch.quantile(torch.tensor(series, dtype=torch.float64), 0.5, dim=-1)
    draws = _medians(series, seed)
    if control is None:
        return exact[0].item(), draws[0]
    return (exact[0] / exact[1]).item(), draws[0] / draws[1]


def _control(rows: list[Row], other: list[Row]) -> str | None:
    timed = {row.contender for row in rows if row.samples}
    timed &= {row.contender for row in other if row.samples}
    return next((name for name in _CONTROLS if name in timed), None)


def change(old: list[Row], new: list[Row], contender: str) -> Change | None:
    """How ``contender`` changed between the rows of one case, then and now; None: not timed."""
    before = next((r for r in old if r.contender == contender and r.samples), None)
    after = next((r for r in new if r.contender == contender and r.samples), None)
    if before is None or after is None:
        return None
    name = _control(old, new)
    controls = [next((r for r in rows if r.contender == name), None) for rows in (old, new)]
    was, was_draws = _relative(before, controls[0], 1)
    now, now_draws = _relative(after, controls[1], 2)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.quantile(now_draws / was_draws, ends).tolist()
    return Change(now / was, low, high, name is None)


def _cases(suites: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """(suite, op, case, contender) of every row of ours."""
    for name, suite in suites.items():
        for row in suite["rows"]:
            if row.ours and row.contender != "reference":
                yield name, row.op, row.case, row.contender


def changes(
    passes: Sequence[tuple[dict[str, Any], dict[str, Any]]],
) -> dict[tuple[str, str, str, str], list[Change]]:
    """The change of every row of ours that both sides have, pass by pass."""
    found: dict[tuple[str, str, str, str], list[Change]] = {}
    for old, new in passes:
        for key in dict.fromkeys(_cases(new)):
            suite, op, case, contender = key
            if suite in old:
                seen = change(
                    store.find(old[suite]["rows"], op, case),
                    store.find(new[suite]["rows"], op, case),
                    contender,
                )
                if seen is not None:
                    found.setdefault(key, []).append(seen)
    return found


def slower(seen: Sequence[Change], tolerance: float) -> bool:
    """Whether every pass shows a slow-down beyond the tolerance."""
    return all(one.low > 1.0 + tolerance for one in seen)


def faster(seen: Sequence[Change], tolerance: float) -> bool:
    return all(one.high < 1.0 - tolerance for one in seen)


def _table(found: dict[Any, list[Change]], tolerance: float) -> Table:
    table = Table(box=None, padding=(0, 1), collapse_padding=True)
    for heading in ("suite", "op", "case", "on"):
        table.add_column(heading)
    for heading in ("new / old", "95 %", "passes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("")
    order = sorted(found.items(), key=lambda item: -_middle(item[1]))
    for key, seen in order:
        low, high = min(one.low for one in seen), max(one.high for one in seen)
        verdict = ""
        if slower(seen, tolerance):
            verdict = "[bold red]slower"
        elif faster(seen, tolerance):
            verdict = "[green]faster"
        if any(one.raw for one in seen):
            verdict += " (not relative)"
        table.add_row(
            *key, f"{_middle(seen):.3f}", f"{low:.3f}-{high:.3f}", str(len(seen)), verdict
        )
    return table


def _middle(seen: Sequence[Change]) -> float:
    return math.exp(sum(math.log(one.value) for one in seen) / len(seen))


def _call(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    """What the command printed. Raises CalledProcessError."""
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    return done.stdout.strip()


def _worktree(revision: str) -> Path:
    """A built checkout of that revision. Raises CalledProcessError, FileNotFoundError."""
    name = ["git", "rev-parse", "--verify", "--short=12", f"{revision}^{{commit}}"]
    commit = _call(name, ROOT)
    place = ROOT / "build" / "compare" / commit
    if not place.exists():
        _call(["git", "worktree", "add", "--force", "--quiet", "--detach", place, commit], ROOT)
    if not (place / "benchmarks" / "__main__.py").exists():
        raise FileNotFoundError(f"revision {revision} has no benchmark suite")
    _call(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
        place,
        TRANSFORMER_FAST_BUILD="require",
    )
    return place


def _time(tree: Path, options: argparse.Namespace, path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks", "run", "--peer", "--json", path]
    command += ["--suite", *options.suite]
    command += ["--op", *options.op] if options.op else []
    command += ["--quick"] if options.quick else []
    path.unlink(missing_ok=True)
    # Exit status 1 says that a result is wrong; its row then has no speed to compare.
    done = subprocess.run(
        [str(c) for c in command], cwd=tree, stdout=subprocess.DEVNULL, check=False
    )
    if done.returncode not in (0, 1) or not path.exists():
        raise RuntimeError(f"the suite ended with status {done.returncode} in {tree}")
    return store.read(path)


def _in_turn(
    options: argparse.Namespace, console: Console
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    tree = _worktree(options.base)
    folder = tree.parent
    passes = []
    for number in range(options.passes):
        console.print(f"pass {number + 1} of {options.passes}", style="dim", highlight=False)
        old = _time(tree, options, folder / f"old-{number}.json")
        passes.append((old, _time(ROOT, options, folder / f"new-{number}.json")))
    return passes


def _other_machines(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name in new:
        if name in old:
            found += machine.differences(old[name]["machine"], new[name]["machine"])
    return list(dict.fromkeys(found))


def _passes(
    options: argparse.Namespace, console: Console
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    base = Path(options.base)
    if not base.is_file():
        if options.new is not None:
            raise ValueError("NEW can be given only if BASE is a result file")
        return _in_turn(options, console)
    old = store.read(base)
    if options.new is not None:
        return [(old, store.read(options.new))]
    folder = ROOT / "build" / "compare"
    folder.mkdir(parents=True, exist_ok=True)
    return [(old, _time(ROOT, options, folder / "new.json"))]


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """0; 1 if something is slower; 2 if the two cannot be compared."""
    console = output()
    try:
        passes = _passes(options, console)
    except subprocess.CalledProcessError as error:
        told = (error.stderr or "").strip().splitlines()[-3:]
        why = "\n".join(told) or str(error)
        parser.error(f"{options.base!r} is no result file, and as a revision: {why}")
    except (OSError, ValueError, RuntimeError) as error:
        parser.error(str(error))
    unlike = _other_machines(*passes[0])
    if unlike:
        console.print("[bold red]These are results of different machines:[/]")
        bullets(console, unlike)
        return 2
    found = changes(passes)
    if not found:
        console.print("[bold red]The two have no timed rows in common.[/]")
        return 2
    console.print(_table(found, options.tolerance), highlight=False)
    worse = [key for key, seen in found.items() if slower(seen, options.tolerance)]
    console.print(
        f"\n{len(found)} rows, {len(worse)} slower by more than {form.percent(options.tolerance)}",
        style="bold red" if worse else "bold green",
        highlight=False,
    )
    return 1 if worse else 0
