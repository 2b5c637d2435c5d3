"""What is measured: each suite gives makers of benchmark_cases, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..scope import Maker, Scope
from . import decode, hand_written, models, ops, overhead, scaling, third_party, training

Suite = Callable[[Scope], Iterator[tuple[str, Maker]]]

#: The ordinary run, in the order of its report.
SUITES: dict[str, Suite] = {
    "ops": ops.suite,
    "backward": ops.backward,
    "layers": models.layers,
    "models": models.suite,
    "training": training.suite,
    "hand-written": hand_written.suite,
    "third-party": third_party.suite,
    "decode": decode.suite,
    "overhead": overhead.suite,
}
#: Apart, because they take long.
SCALING: dict[str, Suite] = {f"scaling: {name}": suite for name, suite in scaling.SUITES.items()}
