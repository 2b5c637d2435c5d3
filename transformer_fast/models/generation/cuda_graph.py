"""Decoding steps recorded once as CUDA graphs, and replayed: launching a hundred small kernels from
Python takes several times as long as running them.

A graph repeats its kernels on the memory they had. So a step that is to be recorded reads its input
and its position from tensors that stay where they are, writes keys and values at a place that only
the device knows, and attends to a fixed number of places, of which key lengths hide what is not yet
written. That number doubles as the sequences grow: for each there is a graph, and for each of the two
buffers between which beams move. The first step of a kind runs as it is, which compiles and chooses
kernels; the second is recorded.

Embedding is left outside: it may be any function, and its position is a number. What cannot be
recorded (a projection that looks at values, say) runs as it is ever after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ... import _switches

_LEAST_PLACES = 64
_switched_on = _switches.flag("TRANSFORMER_FAST_CUDA_GRAPHS")


class Place(NamedTuple):
    """Where a step's token stands, as the device knows it."""

    #: int64 (1,)
    position: Tensor
    #: int64 (R,), the tokens with this one.
    lengths: Tensor
    #: How many places of the cache are read.
    places: int


def wanted(x: Tensor) -> bool:
    """Whether steps on such tensors are to be recorded."""
    return (
        _switched_on
        and x.is_cuda
        and not torch.compiler.is_compiling()
        and not torch.cuda.is_current_stream_capturing()
    )


def record(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """What repeats ``run`` on the tensors that it reads, and gives the tensor that it gave."""
    graph = torch.cuda.CUDAGraph()
    current, other = torch.cuda.current_stream(), torch.cuda.Stream()
    other.wait_stream(current)
    # Not torch.cuda.graph, which collects garbage and gives memory back first: longer than steps take.
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
    """The steps of R sequences, each with one token.

    Args:
        sample: a step's input (R, M).
        capacity: most tokens of a sequence.
        run: (input (R, M), cache, 0, place) -> logits (R, V).
    """

    def __init__(
        self, sample: Tensor, capacity: int, run: Callable[[Tensor, Tensor, int, Place], Tensor]
    ) -> None:
        self.input = torch.empty_like(sample, memory_format=torch.contiguous_format)
        self.position = torch.zeros(1, dtype=torch.int64, device=sample.device)
        self.capacity, self.run = capacity, run
        #: By buffer and number of places; None: seen once.
        self.kinds: dict[tuple[int, int], Callable[[], Tensor] | None] = {}
        self.recordable = True

    def step(self, x: Tensor, cache: Tensor, start: int) -> Tensor:
        """Logits; those of the step before are overwritten."""
        self.input.copy_(x)
        self.position.fill_(start)
        places = _LEAST_PLACES
        while places < start + 1:
            places *= 2
        places = min(places, self.capacity)

        def run() -> Tensor:
            lengths = (self.position + 1).expand(self.input.shape[0])
            return self.run(self.input, cache, 0, Place(self.position, lengths, places))

        kind = cache.data_ptr(), places
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
