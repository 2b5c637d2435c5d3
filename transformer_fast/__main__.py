"""``python -m transformer_fast``: how to start, and the commands ``info``, ``compare``, ``prove``."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence

from . import _native
from ._console import until_interrupted
from ._version import __version__
from .cli import compare, info, prove

_START = f"""\
transformer_fast {__version__}: fused Transformer modules and ops for PyTorch.

Four ways to start:

  change one import        from transformer_fast import nn
  speed up a model         transformer_fast.accelerate(model)
  leave the code alone     torch.compile(model, backend="transformer_fast")
  see what you would gain  python -m transformer_fast compare
                           python -m transformer_fast info

help(transformer_fast) has more details; --help lists the commands.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m transformer_fast",
        description="Shows what this machine can run, and checks and times the kernels on it.",
    )
    parser.add_argument("--version", action="version", version=f"transformer_fast {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="info | compare | prove")
    for command, summary in (
        (info, "show what can run on this machine, and why the rest cannot"),
        (compare, "check and time every kernel beside PyTorch on this machine, on real text"),
        (
            prove,
            "find out which GPU kernels are right and faster than PyTorch on this GPU (minutes)",
        ),
    ):
        name = command.__name__.rpartition(".")[2]
        sub = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:])
        command.add_arguments(sub)
        sub.set_defaults(run=command.main, parser=sub)
    options = parser.parse_args(arguments)
    if options.command is None:
        print(_START, end="")
        return 0
    if _native.unannounced:  # the commands themselves show the reason
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _native.warn_of_absence()
    return until_interrupted(options.run, options.parser, options)


if __name__ == "__main__":
    sys.exit(main())
