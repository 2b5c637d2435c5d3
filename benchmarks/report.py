"""``python -m benchmarks report``: one Markdown file and one HTML page from the result files."""

from __future__ import annotations

import argparse
import html
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformer_fast.cli import form, notes
from transformer_fast.cli.console import output
from transformer_fast.measure import machine

from . import pages, plots, store
from .findings import Finding, findings, losses, mean_speed_up

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


def all_findings(one: Machine) -> list[Finding]:
    """All but those of small calls and of growth with size."""
    return [finding for name, _, found in one.ordinary if name != "overhead" for finding in found]


def headline(one: Machine) -> str:
    """How the machine's cases went, in a sentence."""
    found = all_findings(one)
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


def _wrong(one: Machine) -> list[str]:
    return [
        f"{name}: {line}"
        for name, suite in one.suites.items()
        for line in notes.failures(suite["rows"])
    ]


_HEAD = """\
<!doctype html><html lang='en'><head><meta charset='utf-8'>
<meta name='viewport' content='width=device-width'>
<title>transformer_fast benchmarks</title><style>
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
</style></head><body>"""


#: A part of the report in Markdown and in HTML; '' where it has none.
Part = tuple[str, str]


def _heading(level: int, text: str) -> Part:
    return f"{'#' * level} {text}", f"<h{level}>{html.escape(text)}</h{level}>"


def _paragraph(text: str) -> Part:
    return text, f"<p>{html.escape(text.replace('*', ''))}</p>" if text else ""


def _table(grid: pages.Grid) -> Part:
    return grid.markdown(), grid.html()


def _details(name: str, suite: dict[str, Any]) -> Part:
    table = pages.details(suite["rows"]).html()
    return "", f"<details><summary>{name}</summary>{table}</details>"


def _picture(text: str, svg: str, file: Path | None = None) -> Part:
    """Written to the file, to which Markdown has a link; None: only in HTML."""
    shown = f"<figure>{svg}</figure>" if svg else ""
    if not svg or file is None:
        return "", shown
    file.write_text(svg, encoding="utf-8")
    return f"![{text}]({file.parent.name}/{file.name})", shown


def _parts(found: list[Machine], pictures: Path) -> Iterator[Part]:
    """The whole report; details are in HTML only."""
    yield _heading(1, "Benchmarks")
    yield _paragraph(LEGEND)
    for one in found:
        yield _heading(2, one.line)
        yield _paragraph(f"{headline(one)} {_beside(one)}".strip())
        if wrong := _wrong(one):
            yield _heading(3, "Wrong results")
            items = "".join(f"<li>{html.escape(line)}" for line in wrong)
            yield "\n".join(f"- {line}" for line in wrong), f"<ul class='bad'>{items}</ul>"
        yield _heading(3, "Losses: cases in which another is faster")
        lost = losses(all_findings(one))
        yield _table(pages.lost(lost)) if lost else _paragraph("None.")

        def file(name: str, slug: str = one.slug) -> Path:
            return (
                pictures / f"{slug}-{''.join(c if c.isalnum() else '-' for c in name.lower())}.svg"
            )

        for name, suite, cases in one.ordinary:
            yield _heading(3, name)
            yield _paragraph(_other_line(one, suite))
            title = f"{name}: {one.slug}"
            yield _picture("speed-ups", plots.speed_ups(cases, title), file(name))
            if name != "overhead":
                yield _picture("", plots.candidates(suite["rows"], "all candidates"))
            yield _table(pages.summary(cases))
            yield _details("All candidates", suite)
        for name, suite in one.suites.items():
            if is_scaling(name) and (picture := plots.scaling(suite["rows"], name)):
                yield _heading(3, name)
                yield _picture(name, picture, file(name))
                yield _details("All figures", suite)


def _other_line(one: Machine, suite: dict[str, Any]) -> str:
    line = machine.line(suite["machine"])
    return "" if line == one.line else f"Taken at another time: {line}"


def markdown(found: list[Machine], pictures: Path) -> str:
    """The whole report; pictures are written beside it."""
    return _in_markdown(text for text, _ in _parts(found, pictures))


def _in_markdown(parts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, parts)) + "\n"


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
    text, body = zip(*_parts(found, pictures), strict=True)
    (out / "report.md").write_text(_in_markdown(text), encoding="utf-8")
    page = "\n".join([_HEAD, *filter(None, body), "</body></html>\n"])
    (out / "report.html").write_text(page, encoding="utf-8")
    for one in found:
        console.print(f"{one.line}\n  {headline(one)}", highlight=False)
    console.print(f"written: {out / 'report.md'}, {out / 'report.html'}", highlight=False)
    return 0
