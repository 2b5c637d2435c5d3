"""``python -m benchmarks.readme --write | --check``: README's tables, from what they are about.

What stands between ``<!-- generated: NAME -->`` and ``<!-- end -->`` is written here: the table of
ops and backends from the op table and the dispatcher's records, the figures from the result files.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from transformer_fast.cli import form
from transformer_fast.cli.limits import dtype_names
from transformer_fast.dispatch import BACKENDS, Kernel, kernels
from transformer_fast.measure import machine
from transformer_fast.measure.contest import Row
from transformer_fast.specs import OPS

from . import store
from .findings import Finding, findings, losses
from .pages import Grid, interval, roof
from .report import Machine, headline, hurried, is_scaling, machines

README = Path(__file__).resolve().parents[1] / "README.md"
_MARKED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

#: Of the ops suite, besides each op's first case.
_SHOWN = re.compile(r"attention \(4,8,1024,64\), (causal|key)|feed_forward (256|1)x|linear 1x")

_SPLIT = (
    "A roof of 100 % is the peak of fp32's multiply-adds. With AMX, products of fp32 can be made of "
    "six products of bfloat16 pieces, as precise as fp32's, and exceed it; in parentheses is the "
    "share of the roof that this has, a sixth of the tiles' bfloat16 rate."
)


def _cell(kernel: Kernel | None) -> str:
    if kernel is None:
        return "-"
    parts = [dtype_names(kernel.dtypes)]
    if not kernel.gradients:
        parts.append("forward")
    elif kernel.op == "attention" and not kernel.mask_gradient:
        parts.append("forward, backward (not of masks)")
    else:
        parts.append("forward, backward")
    if kernel.op in ("add_layer_norm", "attention", "feed_forward"):
        parts.append("dropout" if kernel.dropout else "no dropout")
    return ", ".join(parts)


def _section(paper: str) -> str:
    """'section 3.2.1' of '"Attention Is All You Need", section 3.2.1'."""
    found = re.search(r"sections? .*", paper)
    return found[0] if found else paper


def ops_table() -> str:
    """Ops and backends, with limits that do not depend on the machine."""
    every = {(k.op, k.backend): k for op in OPS for k in kernels(op)}
    shown = [name for name in reversed(BACKENDS) if any(backend == name for _, backend in every)]
    rows = [
        (f"`{op}`", _section(spec.paper), *(_cell(every.get((op, name))) for name in shown))
        for op, spec in OPS.items()
    ]
    headings = ("op", "in the paper", *(f"`{name}`" for name in shown))
    return Grid(headings, rows, words=len(headings)).markdown()


def _shown(suite: str, found: Sequence[Finding]) -> list[Finding]:
    kind = suite.partition(", ")[0]
    if kind in ("layers", "models", "training", "hand-written", "decode"):
        return list(found)
    if kind not in ("ops", "backward"):
        return []
    first = {finding.chosen.op: finding for finding in reversed(found)}
    return [
        finding
        for finding in found
        if finding is first[finding.chosen.op]
        or (kind == "ops" and _SHOWN.match(f"{finding.chosen.op} {finding.chosen.case}"))
    ]


def _work(suite: str, chosen: Row) -> str:
    kind, _, dtype = suite.partition(", ")
    parts = [f"{chosen.op} {chosen.case}"]
    if kind == "backward":
        parts.append("and its gradients")
    return ", ".join([*parts, dtype] if dtype else parts)


def _title(one: Machine) -> str:
    return f"**{one.line}**"


def _figures_of(one: Machine) -> str:
    rows, every = [], []
    for name, suite in one.suites.items():
        found = [] if is_scaling(name) else findings(suite["rows"])
        every += found if name != "overhead" else []
        for chosen, rival, against, _ in _shown(name, found):
            assert chosen.time is not None
            rows.append(
                (
                    _work(name, chosen),
                    chosen.contender,
                    form.seconds(chosen.time.median),
                    interval(chosen.vs_torch),
                    roof(chosen),
                    "" if rival is None else f"{rival.contender}: {interval(against)}",
                )
            )
    lost = losses(every)
    split = any(finding.chosen.split_share is not None for finding in every)
    head = ("work", "on", "time", "vs torch's best (95 %)", "roof", "vs the fastest other (95 %)")
    tail = (
        f"{form.count(len(every), 'case')} in all; in {len(lost)} of them another is faster. All "
        "of them, losses first: [benchmarks/results/report.md](benchmarks/results/report.md)."
    )
    table = Grid(head, rows, words=2).markdown()
    parts = [_title(one), table, _SPLIT if split else "", hurried(one), tail]
    return "\n\n".join(part for part in parts if part)


def _held_back(one: Machine) -> str:
    return f"{_title(one)}\n\n{headline(one)}"


def figures(folder: Path = store.FOLDER) -> str:
    """What was measured, machine by machine."""
    found = [one for one in machines(folder) if not all(map(is_scaling, one.suites))]
    if not found:
        return "No figures have been taken yet; `make figures` takes them."
    whole = [one for one in found if machine.forced_isa(one.about) is None]
    rest = [one for one in found if one not in whole]
    return "\n\n".join([*map(_figures_of, whole), *map(_held_back, rest)])


_PARTS: dict[str, Callable[[], str]] = {"ops": ops_table, "figures": figures}


def generated(text: str) -> str:
    """The README with its generated parts as they must be. Raises ValueError for an unknown one."""

    def part(found: re.Match[str]) -> str:
        if found[2] not in _PARTS:
            raise ValueError(f"there is no generated part {found[2]!r}")
        return f"{found[1]}{_PARTS[found[2]]()}\n{found[3]}"

    missing = set(_PARTS) - {found[2] for found in _MARKED.finditer(text)}
    if missing:
        raise ValueError(f"README has no place for {', '.join(sorted(missing))}")
    return _MARKED.sub(part, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if ``--check`` finds that README is not what it would be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    before = README.read_text(encoding="utf-8")
    after = generated(before)
    if options.write:
        README.write_text(after, encoding="utf-8")
        return 0
    if before != after:
        lines = (before.splitlines(), after.splitlines(), "README.md", "generated")
        print("\n".join(difflib.unified_diff(*lines, lineterm="", n=0)))
        print("README.md is out of date; run `python -m benchmarks.readme --write`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
