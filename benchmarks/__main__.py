"""``python -m benchmarks``: run, scaling, compare, report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from transformer_fast._version import __version__
from transformer_fast.cli.console import until_interrupted

from . import compare, report, run
from .suites import SCALING, SUITES
from .suites.scaling import PLAN as SCALING_PLAN


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command (``run``, if none is named); its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--version", action="version", version=f"transformer_fast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    timed = commands.add_parser("run", help="ops, layers, models, training (the default)")
    run.add_arguments(timed, SUITES)
    timed.set_defaults(run=run.main, parser=timed)
    scaling = commands.add_parser("scaling", help="how time grows with each size; about 10 minutes")
    run.add_arguments(scaling, SCALING, "-scaling", SCALING_PLAN)
    scaling.set_defaults(run=run.main, parser=scaling)
    against = commands.add_parser("compare", help="this tree against a revision or a result file")
    compare.add_arguments(against)
    against.set_defaults(run=compare.main, parser=against)
    pages = commands.add_parser("report", help="Markdown and plots from the result files")
    report.add_arguments(pages)
    pages.set_defaults(run=report.main, parser=pages)
    if not given or (
        given[0] not in commands.choices and given[0] not in ("-h", "--help", "--version")
    ):
        given.insert(0, "run")
    options = parser.parse_args(given)
    return until_interrupted(options.run, options.parser, options)


if __name__ == "__main__":
    sys.exit(main())
