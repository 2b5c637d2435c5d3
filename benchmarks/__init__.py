"""The benchmark suite: ``python -m benchmarks``. How its figures are taken: CONTRIBUTING.md."""

from .isa import hold_others

hold_others()
