"""``python -m benchmarks.readme --write | --check``: generates README's headline and tables.

The text between ``<!-- generated: NAME -->`` and ``<!-- end -->`` is generated. The table of ops and
backends comes from the op table and the dispatcher's records, the figures from the result files.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import geometric_mean

from transformer_fast.cli import form
from transformer_fast.cli.info import kernel_row
from transformer_fast.dispatch import BACKENDS, Kernel, kernels
from transformer_fast.measure import machine
from transformer_fast.specs import OPS

from . import findings
from .findings import FIGURES, TEXT, markdown, table, text_summary, work
from .report import (
    Machine,
    all_findings,
    headline,
    hurried,
    is_of_int8,
    is_scaling,
    machines,
    mean_vs_torch,
    speedups_over_torch,
)

README = Path(__file__).resolve().parents[1] / "README.md"
_MARKED = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

#: The cases that README shows for the first machine.
_SHOWN = (
    "attention (4,8,1024,64)",
    "attention (4,8,1024,64), causal",
    "attention (4,8,1024,64) with gradients",
    "feed_forward 4096x512x2048, relu",
    "add_layer_norm 4096x512",
    "linear_cross_entropy 1024x512x32000, smoothing 0.1",
    "encoder_layer (32,128)",
    "encoder_layer (32,128), bfloat16",
    "encoder_layer (1,32)",
    "training step 6+6, (8,128), V = 32000",
    "greedy decoding 6+6, (16,32), 64 new, V = 32000",
    "hand-written transformer 2+2, (8,128), V = 8000",
)


_SPLIT = (
    "A roof of 100 % is the peak of fp32's multiply-adds. With AMX, products of fp32 can be made of "
    "six products of bfloat16 pieces, as precise as fp32's, and exceed it; in parentheses is the "
    "share of the roof that this has, a sixth of the tiles' bfloat16 rate."
)

#: Above the table of sentence encoders.
_TEXTS = (
    'Sentence encoders after `accelerate(model)`, int8 after `accelerate(model, quantize="int8")`, '
    "on\n{} ({}):\nsentences a second and, in parentheses, the cosine of the worst sentence to fp64's."
)


def _cell(kernel: Kernel | None) -> str:
    if kernel is None:
        return "-"
    _, _, _, dtypes, gradients, dropout, _ = kernel_row(kernel)
    passes = {"no": "forward", "yes": "forward, backward"}
    dropped = {"": "", "no": ", no dropout", "yes": ", dropout"}[dropout]
    return f"{dtypes}, {passes.get(gradients, 'forward, backward (not of masks)')}{dropped}"


def ops_table() -> str:
    """Returns the table of ops and backends, with limits that do not depend on the machine."""
    every = {(k.op, k.backend): k for op in OPS for k in kernels(op)}
    shown = [name for name in reversed(BACKENDS) if any(backend == name for _, backend in every)]
    rows = [
        # 'section 3.2.1' of '"Attention Is All You Need", section 3.2.1'.
        (
            f"`{op}`",
            re.sub(r"^.*?(sections? )", r"\1", spec.paper),
            *(_cell(every.get((op, name))) for name in shown),
        )
        for op, spec in OPS.items()
    ]
    headings = ("op", "in the paper", *(f"`{name}`" for name in shown))
    return markdown(headings, rows, words=len(headings))


def _figures_of(one: Machine) -> str:
    found = {work(finding): finding for finding in all_findings(one)}
    shown = [found[name] for name in _SHOWN if name in found] or list(found.values())[: len(_SHOWN)]
    split = any(finding.chosen.split_share is not None for finding in shown)
    tail = f"{headline(one)} All cases, losses first: [report](benchmarks/results/report.md)."
    parts = [f"**{one.line}**", table(shown, FIGURES), _SPLIT if split else "", hurried(one), tail]
    return "\n\n".join(part for part in parts if part)


def _machines(folder: Path) -> list[Machine]:
    """Returns the machines in README's order: no forced instruction set, complete, newest first."""
    found = [one for one in machines(folder) if not all(map(is_scaling, one.suites))]

    def rank(one: Machine) -> tuple[bool, bool, str]:
        own = machine.forced_isa(one.about) is None
        return own, len(all_findings(one)) >= 150, one.line.rpartition(" · ")[2]

    return sorted(found, key=rank, reverse=True)


def headline_part(folder: Path = findings.FOLDER) -> str:
    """Returns the first machine's speed-ups, worst case and plot, and the other machines' means."""
    first, *rest = _machines(folder)
    found = all_findings(first)
    others = [
        (f, f.rival, f.against)
        for f in found
        if f.rival is not None and f.against is not None and not _is_ours(f.rival.candidate)
        and not is_of_int8(f)
    ]  # fmt: skip
    mean, best = mean_vs_torch(first) or math.nan, geometric_mean(r.value for _, _, r in others)
    worst, rival, ratio = min(others, key=lambda one: one[2].value)
    slowest = "PyTorch's" if rival.candidate == "torch" else f"{rival.candidate}'s"
    parts = [
        f"- **{form.times(mean)}** the speed of PyTorch's best (eager or compiled) on {first.title}\n"
        f"  (geometric mean of {form.count(len(speedups_over_torch(first)), 'case')}; {_taken(first)})"
        f"{_elsewhere(first, rest)}",
        f"- **{form.times(best)}** the speed of the best alternative in each of {len(others)} cases\n"
        f"  ({', '.join(_alternatives(first))})",
        f"- slowest case: {ratio.value:.2f} times {slowest} speed ({work(worst)})",
        "- the same weights, `state_dict` and numbers as `torch.nn`: every result is within an error\n"
        "  budget against fp64",
    ]
    with_text = next((one for one in (first, *rest) if TEXT in one.suites), None)
    if with_text is not None and (texts := text_summary(with_text.suites[TEXT]["rows"])):
        about = with_text.suites[TEXT]["machine"]
        taken = machine.taken(about)
        parts.append(f"\n{_TEXTS.format(with_text.title, taken)}\n\n{texts}")
    if "layers" in first.suites:
        parts.append(
            f"\n![Encoder layers: times the speed of PyTorch's best, on {first.title}]"
            f"(benchmarks/results/plots/{first.slug}-layers.svg)\n\n"
            f"Encoder layers in float32 on {first.title} "
            f"({machine.taken(first.suites['layers']['machine'])}).\n"
            "(8,128): 8 sequences of 128 tokens; 65% real: the rest is padding."
            f"{_layers_elsewhere(first, rest)}"
        )
    return "\n".join(parts)


def _taken(one: Machine) -> str:
    """Returns the dates and commits of the machine's results: '2026-11-26, f2ab0742f354'."""
    return " to ".join(dict.fromkeys(one.taken))


def _others(first: Machine, rest: Iterable[Machine]) -> dict[str, Machine]:
    """Returns CPU name -> machine, the first for each other CPU without a restricted instruction set."""
    found: dict[str, Machine] = {}
    for one in rest:
        if machine.forced_isa(one.about) is None and machine.cpu(one.about) != machine.cpu(
            first.about
        ):
            found.setdefault(machine.cpu(one.about), one)
    return found


def _elsewhere(first: Machine, rest: Iterable[Machine]) -> str:
    """Returns the other machines' speed-ups, such as '; 1.73x on AMD EPYC (Zen 4), 91 cases'."""
    return "".join(
        f";\n  {form.times(mean)} on {name}, "
        f"{form.count(len(speedups_over_torch(one)), 'case')} ({_taken(one)})"
        for name, one in _others(first, rest).items()
        if (mean := mean_vs_torch(one)) is not None
    )


def _layers_elsewhere(first: Machine, rest: Iterable[Machine]) -> str:
    """Returns a sentence such as 'The same layers: 1.12x to 1.81x on AMD EPYC (Zen 4).'"""
    ranges = []
    for name, one in _others(first, rest).items():
        for suite, _, cases in one.ordinary:
            ratios = [f.chosen.vs_torch.value for f in cases if f.chosen.vs_torch is not None]
            if suite == "layers" and ratios:
                ranges.append(f"{form.times(min(ratios))} to {form.times(max(ratios))} on {name}")
    return f"\nThe same layers: {', '.join(ranges)}." if ranges else ""


def _alternatives(one: Machine) -> list[str]:
    """Returns the names of the other software that was timed on the machine; PyTorch first."""
    timed = {
        row.candidate
        for name, suite in one.suites.items()
        if not is_scaling(name)
        for row in suite["rows"]
        if row.time is not None and not row.ours
    }
    names = {
        re.sub(r"^(torch|inductor).*", "PyTorch", name.split(" prepacked")[0]) for name in timed
    }
    return sorted(names, key=lambda name: (name != "PyTorch", name.lower()))


def _is_ours(candidate: str) -> bool:
    return (
        candidate in (*BACKENDS, "rewritten", "accelerated") and candidate != "torch"
    ) or "fast.nn" in candidate


def figures(folder: Path = findings.FOLDER) -> str:
    """Returns a dozen rows of the first machine, and a sentence for each of the others."""
    found = _machines(folder)
    if not found:
        return "No figures have been taken yet; `make figures` takes them."
    rest = "\n".join(f"- {one.line}: {headline(one)}" for one in found[1:])
    return f"{_figures_of(found[0])}\n\n{rest}".rstrip()


_PARTS: dict[str, Callable[[], str]] = {
    "headline": headline_part,
    "ops": ops_table,
    "figures": figures,
}


def generated(text: str) -> str:
    """Returns README with its generated parts replaced; raises ValueError for unknown parts."""

    def part(found: re.Match[str]) -> str:
        if found[2] not in _PARTS:
            raise ValueError(f"there is no generated part {found[2]!r}")
        return f"{found[1]}{_PARTS[found[2]]()}\n{found[3]}"

    missing = set(_PARTS) - {found[2] for found in _MARKED.finditer(text)}
    if missing:
        raise ValueError(f"README has no place for {', '.join(sorted(missing))}")
    return _MARKED.sub(part, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if ``--check`` finds that README is out of date, else 0."""
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
