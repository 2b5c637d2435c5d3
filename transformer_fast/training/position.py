"""Where in the data a run stands, and how to get back there."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from . import processes
from .checkpoint import CheckpointError


def random_state() -> dict[str, Any]:
    """The states of torch's generators, Python's, and NumPy's if it is in use.

    As what ``torch.load(weights_only=True)`` takes.
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put the generators into the states that `random_state` found."""
    torch.set_rng_state(state["torch"].cpu())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    numpy = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


class Position:
    """The epoch, and how many of its batches this process has had."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0
        #: What decides the order of the batches, as far as the sampler can tell.
        self.order: dict[str, Any] | None = None
        # An epoch may be shuffled by the global generators, as DataLoader(shuffle=True) does.
        self._random_at_start: dict[str, Any] | None = None
        self._random_after: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """What is the same for all processes."""
        return {"epoch": self.epoch, "batch": self.batch, "order": self.order}

    def random_states(self) -> dict[str, Any]:
        """This process's generators: at the start of the epoch, None between two, and now."""
        return {"epoch": self._random_at_start, "now": self._random_after or random_state()}

    def load_state_dict(self, state: dict[str, Any], random_states: dict[str, Any]) -> None:
        self.epoch, self.batch, self.order = state["epoch"], state["batch"], state["order"]
        self._random_at_start = random_states["epoch"]
        self._random_after = random_states["now"]

    def groups(self, batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
        """The rest of the epoch, ``size`` batches at a time; then the next epoch begins.

        Raises:
            ValueError: the epoch has no batches, or not as many for each process.
            CheckpointError: the run stands inside of an epoch in another order than that of ``batches``.
        """
        iterator = self._at_position(batches)
        while group := list(itertools.islice(iterator, size)):
            self.batch += len(group)
            yield group
        if self.batch == 0:
            raise ValueError("batches is empty: there must be at least one batch in an epoch")
        self.epoch, self.batch, self._random_at_start = self.epoch + 1, 0, None

    def _at_position(self, batches: Iterable[Any]) -> Iterator[Any]:
        sampler = getattr(batches, "batch_sampler", None)
        self._check_order(getattr(sampler, "config", None))
        after = self._random_after
        if self._random_at_start is not None:  # inside of an epoch
            after = random_state() if after is None else after
            set_random_state(self._random_at_start)
        else:
            if after is not None:
                set_random_state(after)
                after = None
            self._random_at_start = random_state()
        skip = self.batch
        if hasattr(sampler, "config"):  # one of ours, which need not make what is skipped
            sampler.set_epoch(self.epoch, self.batch)  # type: ignore[union-attr]
            skip = 0
        else:
            for part in (getattr(batches, "sampler", None), sampler, batches):
                if hasattr(part, "set_epoch"):
                    part.set_epoch(self.epoch)  # type: ignore[union-attr]
        if processes.is_distributed() and hasattr(batches, "__len__"):
            counts = processes.gathered(len(batches))  # type: ignore[arg-type]
            if len(set(counts)) > 1:
                raise ValueError(f"batches must be as many in each process, not {counts}")
        iterator = iter(batches)
        for _ in itertools.islice(iterator, skip):
            pass
        if after is not None:
            set_random_state(after)
        self._random_after = None
        return iterator

    def _check_order(self, order: dict[str, Any] | None) -> None:
        if self.batch and order != self.order:
            raise CheckpointError(
                f"the run stands inside of an epoch whose batches are made by {self.order}; "
                f"these are made by {order}"
            )
        self.order = order
