"""The benchmark suite: ``python -m benchmarks``. How its figures are taken: CONTRIBUTING.md."""

from .isa import hold_others

hold_others()

# Last: a wrong TRANSFORMER_FAST_* variable is told without a traceback while a command's package is
# being imported (`transformer_fast._switches`).
import transformer_fast as transformer_fast  # noqa: E402
