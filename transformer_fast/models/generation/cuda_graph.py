"""Decoding steps recorded as CUDA graphs and replayed: launching a hundred small kernels from Python
takes several times as long as running them.

A graph replays its kernels on the same memory. So a recorded step reads its input and its position from
static tensors, writes keys and values at a position that is stored on the device, and attends to a fixed
number of positions; key lengths hide those not yet written. That number doubles as the sequences grow.
There is one graph for each number, and for each of the two buffers between which beams move. The first
step of a kind runs eagerly, which compiles and chooses kernels; the second is recorded.

The embedding is not recorded: it may be any function, and its position is a Python number. Steps that
cannot be recorded (for example if the projection reads values on the host) always run eagerly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ... import _switches

_LEAST_POSITIONS = 64
_switched_on = _switches.flag("TRANSFORMER_FAST_CUDA_GRAPHS")


class Position(NamedTuple):
    """The position of a step's token, in device memory."""

    #: int64 (1,)
    position: Tensor
    #: int64 (R,), number of tokens including this one.
    lengths: Tensor
    #: Number of cache positions that are read.
    positions: int


def wanted(x: Tensor) -> bool:
    """True if steps on such tensors should be recorded."""
    return (
        _switched_on
        and x.is_cuda
        and not torch.compiler.is_compiling()
        and not torch.cuda.is_current_stream_capturing()
    )


def record(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Returns a function that replays ``run`` on the same tensors and returns the same output tensor."""
    graph = torch.cuda.CUDAGraph()
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    other.wait_stream(current)
    # torch.cuda.graph would collect garbage and free memory first, which takes longer than steps.
    with torch.cuda.stream(other):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = run()
        finally:
            graph.capture_end()
    current.wait_stream(other)

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


class Steps:
    """The one-token steps of R sequences.

    Args:
        sample: a step's input (R, M).
        capacity: maximum number of tokens of a sequence.
        run: (input (R, M), cache, 0, position) -> logits (R, V).
    """

    def __init__(
        self, sample: Tensor, capacity: int, run: Callable[[Tensor, Tensor, int, Position], Tensor]
    ) -> None:
        self.input = torch.empty_like(sample, memory_format=torch.contiguous_format)
        self.position = torch.zeros(1, dtype=torch.int64, device=sample.device)
        self.capacity, self.run = capacity, run
        #: (buffer, number of positions) -> captured graph; None after the first, uncaptured run.
        self.kinds: dict[tuple[int, int], Callable[[], Tensor] | None] = {}
        self.recordable = True

    def step(self, x: Tensor, cache: Tensor, start: int) -> Tensor:
        """Returns the logits; overwrites those of the previous step."""
        self.input.copy_(x)
        self.position.fill_(start)
        positions = _LEAST_POSITIONS
        while positions < start + 1:
            positions *= 2
        positions = min(positions, self.capacity)

        def run() -> Tensor:
            lengths = (self.position + 1).expand(self.input.shape[0])
            return self.run(self.input, cache, 0, Position(self.position, lengths, positions))

        kind = cache.data_ptr(), positions
        if kind not in self.kinds or not self.recordable:
            self.kinds[kind] = None
            return run()
        replay = self.kinds[kind]
        if replay is None:
            try:
                replay = self.kinds[kind] = record(run)
            except RuntimeError:
                self.recordable = False
                self.kinds.clear()
                return run()
        return replay()
