"""Checkpoints: written whole or not at all, and safe to load."""

from __future__ import annotations

import errno
import glob
import os
import pickle
import secrets
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed
    fcntl = None

#: What a checkpoint holds; another number means another layout.
FORMAT = 1


class CheckpointError(RuntimeError):
    """A file that is no checkpoint, is damaged, or does not fit this run."""


def write_checkpoint(path: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Save ``state`` so that ``path`` always holds either the old checkpoint or the new one.

    It goes to another file of the same folder first, which takes the old one's place when it is
    complete and on the disk. What a process that was killed left of such a file is removed.
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
            if fcntl is not None:  # while it is locked, or another process might remove it
                os.replace(temporary, path)
        if fcntl is None:
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the folder's entry has to be on the disk too
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


#: No system but POSIX has these; elsewhere nothing is followed and nothing is converted.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_BINARY = getattr(os, "O_BINARY", 0)


def _lock(descriptor: int) -> bool:
    """Whether no other process writes this file. Raises OSError where files cannot be locked."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _new_file(path: Path) -> tuple[Path, IO[bytes]]:
    """A new file beside ``path``, locked for as long as it is open.

    Its name cannot be guessed, and it must not exist: who may write to the folder could otherwise
    have laid a link there to a file of the user's.
    """
    while True:
        name = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | _NO_LINK | _BINARY
        file = os.fdopen(os.open(name, flags, 0o666), "w+b")
        with suppress(OSError):
            if not _lock(file.fileno()) or os.fstat(file.fileno()).st_nlink == 0:
                file.close()  # another process took it for one that was left behind
                continue
        return name, file


def _remove_unfinished(path: Path) -> None:
    """Remove files of `_new_file` whose writer is gone: nobody holds their lock."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with suppress(OSError):
            descriptor = os.open(left, os.O_RDWR | _NO_LINK | _BINARY)
            try:
                if _lock(descriptor):
                    left.unlink()
            finally:
                os.close(descriptor)


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `write_checkpoint` saved, on the CPU, by ``torch.load(weights_only=True)``.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: the file is damaged, no checkpoint, or of another format.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no checkpoint {os.fspath(path)!r}") from None
    except (RuntimeError, pickle.UnpicklingError, EOFError, KeyError, ValueError, OSError) as error:
        # Reading behind the end of a truncated file is an invalid argument to the system.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        told = (str(error).splitlines() or ["it ends too early"])[0]
        raise CheckpointError(f"{os.fspath(path)!r} is damaged or no checkpoint: {told}") from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise CheckpointError(
            f"{os.fspath(path)!r} is no checkpoint of format {FORMAT}, but of {found!r}"
        )
    return state


def whole_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state_dicts of model and optimiser, by parameter names, complete on the first process.

    The same for a plain model, under DistributedDataParallel, fully_shard and torch.compile, so
    that a run of one kind can go on as another. All processes must call it.
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
    """Load what `whole_state` gave; every process has to bring it.

    Raises:
        RuntimeError: names or shapes that do not fit (torch's).
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    options = StateDictOptions(full_state_dict=True, strict=True)
    set_state_dict(
        model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state, options=options
    )
