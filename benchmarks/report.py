"""``python -m benchmarks report``: one Markdown file from the result files, and its plots."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from transformer_fast.cli import form, notes
from transformer_fast.cli.console import output
from transformer_fast.measure import machine

from . import plots, store
from .findings import LOST, SUMMARY, Finding, findings, losses, table

LEGEND = (
    "Every figure is the median of samples taken in rounds, in which all candidates of a case run "
    "in shuffled order in one process, on fresh inputs, after their results were checked against "
    "fp64. Ratios carry the 95 % interval of a bootstrap over rounds. *on*: what the dispatcher "
    "chooses. *roof*: share of the speed that the arithmetic peak and the bandwidth, measured "
    "beside the case, would allow for the work that masks leave to do. On AMX an fp32 product can "
    "be made of six products of bfloat16 pieces on tiles, with fp32's precision: 100 % is then "
    "still the peak of fp32's multiply-adds, which may be exceeded, and in parentheses stands the "
    "share of a sixth of the tiles' rate. *MiB*: peak memory of a "
    "call beyond what was there before. *error in refs*: largest error against fp64 in units of "
    "the reference's own."
)


@dataclass(frozen=True)
class Machine:
    """One machine's suites, of one or several files."""

    slug: str
    line: str
    suites: dict[str, Any]

    @property
    def about(self) -> dict[str, Any]:
        return next(iter(self.suites.values()))["machine"]

    @cached_property
    def ordinary(self) -> list[tuple[str, dict[str, Any], list[Finding]]]:
        """The suites that are tables of cases, with their findings, whose bootstrap takes time."""
        return [
            (name, suite, findings(suite["rows"], name))
            for name, suite in self.suites.items()
            if not is_scaling(name)
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=store.FOLDER, help="folder of JSON files")
    parser.add_argument("--out", type=Path, help="where report.md and its plots go (the folder)")


def machines(folder: Path) -> list[Machine]:
    """The machines of a folder; the scaling file of a machine joins its other one."""
    found: dict[str, Machine] = {}
    for path in store.files(folder):
        slug = path.stem.removesuffix("-scaling")
        suites = store.read(path)
        if not suites:
            continue
        line = machine.line(next(iter(suites.values()))["machine"])
        known = found.get(slug)
        joined = suites if known is None else known.suites | suites
        found[slug] = Machine(slug, line if known is None else known.line, joined)
    return list(found.values())


def is_scaling(suite: str) -> bool:
    """Whether the suite of that name is drawn, and not a table of cases."""
    return suite.startswith("scaling: ")


def all_findings(one: Machine) -> list[Finding]:
    """All but those of small calls and of growth with size."""
    return [finding for name, _, found in one.ordinary if name != "overhead" for finding in found]


def headline(one: Machine) -> str:
    """How the machine's cases went, in a sentence."""
    found = all_findings(one)
    if not found:
        return "Only how time grows with size was measured."
    lost = losses(found)
    ratios = [f.chosen.vs_torch.value for f in found if f.chosen.vs_torch is not None]
    parts = [f"{form.count(len(found), 'case')} timed"]
    if ratios:
        mean = form.times(geometric_mean(ratios))
        parts.append(f"on average {mean} as fast as PyTorch's best (geometric mean)")
    parts.append(f"another is faster in {len(lost)}")
    return ", ".join(parts) + "."


#: Peers with threads of their own and calls of milliseconds.
_OTHER_THREADS = ("OpenVINO", "ONNX Runtime")


def hurried(one: Machine) -> str:
    """A warning where figures are from before candidates waited for one another's threads."""
    suites = [
        name
        for name, suite in one.suites.items()
        if "rest" not in suite.get("plan", {})
        and any(row.candidate in _OTHER_THREADS and row.time for row in suite["rows"])
    ]
    if not suites:
        return ""
    return (
        f"Taken before candidates waited for one another's threads ({', '.join(suites)}): "
        f"{' and '.join(_OTHER_THREADS)} look up to 10 ms a call slower there than they are."
    )


def _beside(one: Machine) -> str:
    """Below the headline: peaks, the versions of peers that ever took part, a warning."""
    versions: dict[str, str] = {}
    for suite in one.suites.values():
        versions |= suite["machine"].get("peers") or {}
    parts = [f"{name} {version}" for name, version in sorted(versions.items())]
    peers = f"Peers: {', '.join(parts)}." if parts else ""
    return " ".join(text for text in (machine.peaks_line(one.about), peers, hurried(one)) if text)


def _picture(svg: str, name: str, file: Path) -> str:
    """A link to the file, which is written; '' without a picture."""
    if not svg:
        return ""
    file.write_text(svg, encoding="utf-8")
    return f"![{name}]({file.parent.name}/{file.name})"


def _parts(found: list[Machine], pictures: Path) -> Iterator[str]:
    """The paragraphs of the whole report; '' is none."""
    yield "# Benchmarks"
    yield LEGEND
    for one in found:
        yield f"## {one.line}"
        yield f"{headline(one)} {_beside(one)}".strip()
        failed = {name: notes.failures(suite["rows"]) for name, suite in one.suites.items()}
        if wrong := [f"- {name}: {line}" for name, lines in failed.items() for line in lines]:
            yield "### Wrong results"
            yield "\n".join(wrong)
        yield "### Losses: cases in which another is faster"
        lost = losses(all_findings(one))
        yield table(lost, LOST) if lost else "None."

        def file(name: str, slug: str = one.slug) -> Path:
            plain = "".join(c if c.isalnum() else "-" for c in name.lower())
            return pictures / f"{slug}-{plain}.svg"

        for name, suite, cases in one.ordinary:
            yield f"### {name}"
            line = machine.line(suite["machine"])
            yield "" if line == one.line else f"Taken at another time: {line}"
            svg = plots.speed_ups(cases, f"{name}: {one.slug}")
            yield _picture(svg, "speed-ups", file(name))
            yield table(cases, SUMMARY)
        for name, suite in one.suites.items():
            if is_scaling(name) and (svg := plots.scaling(suite["rows"], name)):
                yield f"### {name}"
                yield _picture(svg, name, file(name))


def markdown(found: list[Machine], pictures: Path) -> str:
    """The whole report; pictures are written beside it."""
    return "\n\n".join(filter(None, _parts(found, pictures))) + "\n"


def main(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """0, or 2 if there is nothing to report."""
    console = output()
    try:
        found = machines(options.results)
    except (OSError, store.ResultsError) as error:
        parser.error(str(error))
    if not found:
        parser.error(f"there are no result files in {options.results}; run `make bench` first")
    out = options.out or options.results
    pictures = out / "plots"
    pictures.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(markdown(found, pictures), encoding="utf-8")
    for one in found:
        console.print(f"{one.line}\n  {headline(one)}")
    console.print(f"written: {out / 'report.md'}")
    return 0
