"""The ruler: fp64 oracle, error budget and hostile memory, for tests, benchmarks and `compare`."""

from .memory import *
from .oracle import *
from .parity import *
