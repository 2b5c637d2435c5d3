"""Checkpoints of a run: weights, optimiser, random states and position in the data."""

from __future__ import annotations

import errno
import glob
import itertools
import os
import pickle
import random
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch

from . import processes

__all__ = [
    "CheckpointError", "random_state", "read_checkpoint", "set_random_state", "write_checkpoint",
]  # fmt: skip

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows, which cannot remove open files
    fcntl = None

#: Version of a checkpoint's layout.
FORMAT = 1


class CheckpointError(RuntimeError):
    """The file is no checkpoint, is damaged, or belongs to another kind of run."""


def write_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Save ``state`` atomically: ``path`` always holds either the old checkpoint or the new one.

    The state is written to another file of the same folder, which replaces the old one when it is
    complete and on the disk. Such files that killed processes left behind are removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(path)
    temporary, file = _new_file(path)
    try:
        with file:
            torch.save({"format": FORMAT, **state}, file)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:  # still locked: another process might remove it otherwise
                os.replace(temporary, path)
        if fcntl is None:
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the folder's entry must be on the disk as well
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


#: POSIX only; other systems neither follow links nor convert line ends here.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)


def _lock(descriptor: int) -> bool:
    """Locks the file; False if another process has locked it. Raises OSError if locking fails."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _new_file(path: Path) -> tuple[Path, IO[bytes]]:
    """Creates a file beside ``path``, locked as long as it is open.

    Its name is random and must not exist. Otherwise another user of the folder could place a link there
    to one of the user's files.
    """
    while True:
        name = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | _NO_LINK | _BINARY
        file = os.fdopen(os.open(name, flags, 0o666), "w+b")
        with suppress(OSError):
            if not _lock(file.fileno()) or os.fstat(file.fileno()).st_nlink == 0:
                file.close()  # another process took it for a leftover file
                continue
        return name, file


def _remove_unfinished(path: Path) -> None:
    """Removes unlocked files of `_new_file`: their process has ended."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with suppress(OSError):
            descriptor = os.open(left, os.O_RDWR | _NO_LINK | _BINARY)
            try:
                if _lock(descriptor):
                    left.unlink()
            finally:
                os.close(descriptor)


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the state that `write_checkpoint` saved, on the CPU.

    Uses ``torch.load(weights_only=True)``.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is damaged, is no checkpoint, or has another format.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no checkpoint {os.fspath(path)!r}") from None
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, ValueError, OSError) as error:
        # Reading beyond the end of a truncated file raises EINVAL.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        why = (str(error).splitlines() or ["it ends too early"])[0]
        raise CheckpointError(f"{os.fspath(path)!r} is damaged or no checkpoint: {why}") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"{os.fspath(path)!r} is no checkpoint of format {FORMAT}, but of {found!r}"
        )
    return state


def whole_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the state_dicts of model and optimiser, by parameter names, complete on the first process.

    They are the same for a plain model, DistributedDataParallel, fully_shard and torch.compile, so that
    a run of one kind can continue as another. All processes must call it.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_state_dict(model, optimizer, options=options)


def load_whole_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    optimizer_state: dict[str, Any],
) -> None:
    """Load the result of `whole_state`, which every process must pass.

    Raises:
        RuntimeError: names or shapes do not match (PyTorch's error).
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    options = StateDictOptions(full_state_dict=True, strict=True)
    set_state_dict(
        model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state, options=options
    )


def random_state() -> dict[str, Any]:
    """Returns the states of the generators of PyTorch, Python, and NumPy if it is imported.

    Uses only types that ``torch.load(weights_only=True)`` can load.
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
    """Set the generators to the states that `random_state` returned."""
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
    """The epoch, and the number of its batches that this process has used."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0
        #: The sampler's ``config``, which determines the order of the batches; None: it has none.
        self.order: dict[str, Any] | None = None
        # An epoch may be shuffled by the global generators, as DataLoader(shuffle=True) does.
        self._random_at_start: dict[str, Any] | None = None
        self._random_after: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns the state that all processes share."""
        return {"epoch": self.epoch, "batch": self.batch, "order": self.order}

    def random_states(self) -> dict[str, Any]:
        """Returns this process's generator states at the epoch's start (or None) and now.

        None: the process is between two epochs.
        """
        return {"epoch": self._random_at_start, "now": self._random_after or random_state()}

    def load_state_dict(self, state: dict[str, Any], random_states: dict[str, Any]) -> None:
        self.epoch, self.batch, self.order = state["epoch"], state["batch"], state["order"]
        self._random_at_start = random_states["epoch"]
        self._random_after = random_states["now"]

    def groups(self, batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
        """Yields the rest of the epoch, ``size`` batches at a time; then the next epoch begins.

        Raises:
            ValueError: the epoch has no batches, or processes have different numbers of them.
            CheckpointError: the resumed epoch had another order than that of ``batches``.
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
        order = getattr(sampler, "config", None)
        if self.batch and order != self.order:
            raise CheckpointError(
                "cannot resume in the middle of an epoch: the checkpoint used batches of "
                f"{self.order}, this run uses {order}"
            )
        self.order = order
        after = self._random_after
        if self._random_at_start is not None:  # within an epoch
            after = random_state() if after is None else after
            set_random_state(self._random_at_start)
        else:
            if after is not None:
                set_random_state(after)
                after = None
            self._random_at_start = random_state()
        skip = self.batch
        if hasattr(sampler, "config"):  # `TokenBatches` skips batches without making them
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
