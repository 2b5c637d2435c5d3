"""``python -m benchmarks``: run, scaling, compare, report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from transformer_fast._version import __version__
from transformer_fast.cli.console import until_interrupted

from . import compare, report, run
from .suites import SCALING, SUITES
from .suites.scaling import PLAN


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command (``run``, if none is named); its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--version", action="version", version=f"transformer_fast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module, summary, *more in (
        ("run", run, "ops, layers, models, training (the default)", SUITES),
        (
            "scaling",
            run,
            "how time grows with each size; about 10 minutes",
            SCALING,
            "-scaling",
            PLAN,
        ),
        ("compare", compare, "this tree against a revision or a result file"),
        ("report", report, "Markdown and plots from the result files"),
    ):
        command = commands.add_parser(name, help=summary)
        module.add_arguments(command, *more)
        command.set_defaults(run=module.main, parser=command)
    if not given or (
        given[0] not in commands.choices and given[0] not in ("-h", "--help", "--version")
    ):
        given.insert(0, "run")
    options = parser.parse_args(given)
    return until_interrupted(options.run, options.parser, options)


if __name__ == "__main__":
    sys.exit(main())
