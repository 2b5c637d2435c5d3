"""``python -m transformer_fast info``, ``compare`` and ``prove``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ._version import __version__
from .cli import compare, info, prove
from .cli.console import until_interrupted


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m transformer_fast",
        description="What this machine can run, and how kernels compare with the reference on it.",
    )
    parser.add_argument("--version", action="version", version=f"transformer_fast {__version__}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="info | compare | prove"
    )
    for command, summary in (
        (info, "what can run here, and why the rest cannot"),
        (compare, "parity and speed of every kernel against the reference, here, on real text"),
        (prove, "which GPU kernels are right and faster than PyTorch on this GPU; minutes"),
    ):
        name = command.__name__.rpartition(".")[2]
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:])
        command.add_arguments(sub)
        sub.set_defaults(run=command.main, parser=sub)
    options = parser.parse_args(arguments)
    return until_interrupted(options.run, options.parser, options)


if __name__ == "__main__":
    sys.exit(main())
