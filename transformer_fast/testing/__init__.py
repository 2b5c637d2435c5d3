"""The ruler: fp64 oracle, error budget and hostile memory, for tests, benchmarks and `compare`."""

from .memory import all_among_nan, among_nan, nan_memory
from .oracle import call_of, oracle, promote, require_grad
from .parity import (
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    Parity,
    Truth,
    check,
    check_gradients,
    gradients,
    measure,
    measure_gradients,
    truth_of,
    truth_of_gradients,
    upstream,
)

__all__ = [
    "GRADIENT_FACTOR",
    "OUTPUT_FACTOR",
    "Parity",
    "Truth",
    "all_among_nan",
    "among_nan",
    "call_of",
    "check",
    "check_gradients",
    "gradients",
    "measure",
    "measure_gradients",
    "nan_memory",
    "oracle",
    "promote",
    "require_grad",
    "truth_of",
    "truth_of_gradients",
    "upstream",
]
