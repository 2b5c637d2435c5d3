"""``python -m benchmarks report``: one Markdown file and one HTML page from the result files."""

from __future__ import annotations

import argparse
import html
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformer_fast.cli import form
from transformer_fast.cli.console import output
from transformer_fast.measure import machine

from . import pages, plots, store
from .findings import Finding, findings, losses, mean_speed_up

LEGEND = (
    "Every figure is the median of samples taken in rounds, in which all contenders of a case run "
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
    parser.add_argument("--out", type=Path, help="where report.md and report.html go (the folder)")


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


def _all_findings(one: Machine) -> list[Finding]:
    return [finding for name, _, found in one.ordinary if name != "overhead" for finding in found]


def headline(one: Machine) -> str:
    """How the machine's cases went, in a sentence."""
    found = _all_findings(one)
    if not found:
        return "Only how time grows with size was measured."
    lost = losses(found)
    ratios = [f.chosen.vs_torch for f in found if f.chosen.vs_torch is not None]
    mean = mean_speed_up(ratios)
    parts = [f"{form.count(len(found), 'case')} timed"]
    if mean is not None:
        parts.append(f"on average {form.times(mean)} as fast as PyTorch's best (geometric mean)")
    parts.append(f"another is faster in {len(lost)}")
    return ", ".join(parts) + "."


#: Peers with threads of their own and calls of milliseconds.
_OTHER_THREADS = ("OpenVINO", "ONNX Runtime")


def hurried(one: Machine) -> str:
    """A warning where figures are from before contenders waited for one another's threads."""
    suites = [
        name
        for name, suite in one.suites.items()
        if "rest" not in suite.get("plan", {})
        and any(row.contender in _OTHER_THREADS and row.time for row in suite["rows"])
    ]
    if not suites:
        return ""
    return (
        f"Taken before contenders waited for one another's threads ({', '.join(suites)}): "
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


def _wrong(one: Machine) -> list[str]:
    return [
        f"{name}: {row.op} {row.case} on {row.contender}: {row.reason}"
        for name, suite in one.suites.items()
        for row in suite["rows"]
        if row.failed
    ]


def markdown(found: list[Machine], pictures: Path) -> str:
    """The whole report; pictures are written beside it."""
    parts = ["# Benchmarks", LEGEND]
    for one in found:
        parts += [f"## {one.line}", f"{headline(one)} {_beside(one)}".strip()]
        if wrong := _wrong(one):
            parts += ["### Wrong results", "\n".join(f"- {line}" for line in wrong)]
        lost = losses(_all_findings(one))
        parts.append("### Losses: cases in which another is faster")
        parts.append(pages.lost(lost).markdown() if lost else "None.")
        for name, suite, cases in one.ordinary:
            parts.append(f"### {name}")
            if stale := _other_line(one, suite):
                parts.append(stale)
            picture = plots.speed_ups(cases, f"{name}: {one.slug}")
            if picture:
                file = pictures / f"{one.slug}-{_file(name)}.svg"
                file.write_text(picture, encoding="utf-8")
                parts.append(f"![speed-ups]({pictures.name}/{file.name})")
            parts.append(pages.summary(cases).markdown())
        parts += _scaling_markdown(one, pictures)
    return "\n\n".join(parts) + "\n"


def _scaling_markdown(one: Machine, pictures: Path) -> list[str]:
    parts = []
    for name, suite in one.suites.items():
        picture = plots.scaling(suite["rows"], name) if is_scaling(name) else ""
        if picture:
            file = pictures / f"{one.slug}-{_file(name)}.svg"
            file.write_text(picture, encoding="utf-8")
            parts += [f"### {name}", f"![{name}]({pictures.name}/{file.name})"]
    return parts


def _other_line(one: Machine, suite: dict[str, Any]) -> str:
    line = machine.line(suite["machine"])
    return "" if line == one.line else f"Taken at another time: {line}"


def _file(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())


_CSS = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: 3px 9px; border-bottom: 1px solid #8884; text-align: left; white-space: nowrap; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
thead th { position: sticky; top: 0; background: Canvas; }
figure { background: #fff; padding: .6rem; margin: 1rem 0; border-radius: 6px; overflow-x: auto; }
.bad { color: #c00; font-weight: 600; }
summary { cursor: pointer; margin: .6rem 0; }
"""


def page(found: list[Machine]) -> str:
    """One HTML page with everything in it."""
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>transformer_fast benchmarks</title><style>{_CSS}</style></head><body>",
        f"<h1>transformer_fast benchmarks</h1><p>{html.escape(LEGEND.replace('*', ''))}</p>",
    ]
    for one in found:
        about = f"{headline(one)} {_beside(one)}"
        parts.append(f"<h2>{html.escape(one.line)}</h2><p>{html.escape(about)}</p>")
        parts += [f"<p class='bad'>Wrong: {html.escape(line)}</p>" for line in _wrong(one)]
        lost = losses(_all_findings(one))
        parts.append("<h3>Losses: cases in which another is faster</h3>")
        parts.append(pages.lost(lost).html() if lost else "<p>None.</p>")
        for name, suite, cases in one.ordinary:
            parts.append(
                f"<h3>{html.escape(name)}</h3><p>{html.escape(_other_line(one, suite))}</p>"
            )
            for picture in (
                plots.speed_ups(cases, "what the dispatcher chooses, against PyTorch's best"),
                plots.contenders(suite["rows"], "all contenders") if name != "overhead" else "",
            ):
                parts.append(f"<figure>{picture}</figure>" if picture else "")
            parts.append(pages.summary(cases).html())
            rows = pages.details(suite["rows"]).html()
            parts.append(f"<details><summary>All contenders</summary>{rows}</details>")
        for name, suite in one.suites.items():
            if is_scaling(name):
                picture = plots.scaling(suite["rows"], name)
                parts.append(f"<h3>{html.escape(name)}</h3><figure>{picture}</figure>")
                rows = pages.details(suite["rows"]).html()
                parts.append(f"<details><summary>All figures</summary>{rows}</details>")
    return "\n".join(parts) + "\n</body></html>\n"


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
    (out / "report.html").write_text(page(found), encoding="utf-8")
    for one in found:
        console.print(f"{one.line}\n  {headline(one)}", highlight=False)
    console.print(f"written: {out / 'report.md'}, {out / 'report.html'}", highlight=False)
    return 0
