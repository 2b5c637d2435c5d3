"""MkDocs hooks: pages that are made from the package, the command line and the result files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from benchmarks import findings, report
from transformer_fast.cli.info import kernel_row
from transformer_fast.dispatch import BACKENDS, Kernel, kernels
from transformer_fast.measure import machine
from transformer_fast.specs import OPS

ROOT = Path(__file__).resolve().parents[1]

MACHINES = findings.machines()
#: Where plots are written before MkDocs copies them.
PLOTS = ROOT / "build" / "plots"


def _title(one: findings.Machine) -> str:
    """Returns a title such as 'AMD EPYC (Zen 5), avx512_bf16, 2 threads'; with the date if shared."""
    shared = sum(other.title == one.title for other in MACHINES) > 1
    return f"{one.title}, {one.about['date'][:10]}" if shared else one.title


def _page(one: findings.Machine) -> str:
    """Returns the machine's part of the report as a page, with headings one level higher."""
    # Without a table of contents at its right, a table of twelve columns fits.
    head = f"---\nhide: [toc]\n---\n\n# {_title(one)}\n\n{machine.line(one.about)}"
    body = "\n\n".join(filter(None, report.page(one, MACHINES, PLOTS)))
    # Cells wrap between a value and its interval, but neither in the interval nor before a unit.
    body = re.sub(r"(?m)^\|.*", lambda line: _joined(line[0]), body)
    return f"{head}\n\n{body}\n".replace("\n### ", "\n## ")


def _joined(line: str) -> str:
    """Joins '1.2 ms', '57 %' and '1.1-1.3' with a non-breaking space or hyphen."""
    line = re.sub(r"(?<=\d) (?=([mnµ]?s|%)[ )])", "\u00a0", line)
    return re.sub(r"(?<=\d)-(?=\d)", "\u2011", line)


def _ways() -> str:
    """Returns README's table of ways in, with links from the site's first page."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, _, rest = text.partition("## Choose a way in\n\n")
    return rest.partition("\n\n")[0].replace("](docs/", "](")


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for each machine, with its plots."""
    section = next(entry["Figures"] for entry in config.nav if "Figures" in entry)
    PLOTS.mkdir(parents=True, exist_ok=True)
    for one in MACHINES:
        uri = f"figures/{one.slug}.md"
        files.append(File.generated(config, uri, content=_page(one)))
        section.append({_title(one): uri})
        for plot in PLOTS.glob(f"{one.slug}-*.svg"):
            uri = f"figures/{PLOTS.name}/{plot.name}"
            files.append(File.generated(config, uri, abs_src_path=str(plot)))
    return files


def _machines() -> str:
    return "\n".join(
        f"- [{_title(one)}]({one.slug}.md): {report.headline(one)}" for one in MACHINES
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
    return report.markdown(headings, rows, words=len(headings))


def _help(command: str) -> str:
    arguments = [sys.executable, "-m", "transformer_fast", command, "--help"]
    environment = os.environ | {"COLUMNS": "88"}
    result = subprocess.run(
        arguments, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )
    return f"```text\n{result.stdout}```"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts generated text in place of ``<!-- generated: NAME -->``."""
    makers = {
        "legend": lambda: report.LEGEND,
        "machines": _machines,
        "ops": ops_table,
        "ways": _ways,
        "info --help": lambda: _help("info"),
        "compare --help": lambda: _help("compare"),
        "prove --help": lambda: _help("prove"),
    }
    return re.sub(r"<!-- generated: (.+) -->", lambda found: makers[found[1]](), markdown)
