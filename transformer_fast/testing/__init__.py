"""Correctness checks for tests, benchmarks and `compare`: fp64 oracle, error budget, NaN memory."""

from .memory import *
from .oracle import *
from .parity import *
