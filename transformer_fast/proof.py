"""Validation records of kernels: which are correct and faster than PyTorch on this machine.

Kernels for GPUs, and for CPUs' instruction sets that were never timed on hardware, are selected by such
a record only. ``python -m transformer_fast prove`` writes it to the user's cache folder
(``$XDG_CACHE_HOME/transformer_fast``, else ``~/.cache/transformer_fast``), one file for each `Machine`.
The dispatcher looks a call up by its `shape_class`. Calls measure nothing.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import _native
from ._version import __version__

COMMAND = "python -m transformer_fast prove"
#: Duration of the command in messages: an estimate from the number of cases, not measured on a GPU.
DURATION = "a quarter of an hour to half an hour"
#: Version of the file format. Version 5 added CPUs, and has one time for each call.
_FORMAT = 5
#: Least speed-up over PyTorch for which a kernel is selected; smaller ones are noise.
MARGIN = 1.04


class Machine(NamedTuple):
    """The machine and versions that a record is valid for."""

    #: Name of the GPU or CPU.
    device: str
    #: GPU: compute capability and driver, "sm_90, driver 13000". CPU: instruction set and number of
    #: threads, "neon_dot, 4 threads".
    target: str
    torch: str
    triton: str
    transformer_fast: str


class Verdict(NamedTuple):
    """The result for one kernel, one dtype and one class of shapes."""

    op: str
    backend: str
    #: "bfloat16", ...
    dtype: str
    shape: str
    #: True if the backward was checked and timed, too.
    gradients: bool
    #: True if all errors against fp64 are within the error budget.
    right: bool
    #: Seconds of one call, forward and backward if there are gradients; and PyTorch's fastest time. On
    #: a GPU it is the device's time or the host's launch time, the longer one. None if not timed.
    time: float | None = None
    torch_time: float | None = None
    #: Why it is wrong or was not timed, as a sentence.
    problem: str | None = None

    @property
    def gain(self) -> float:
        """The speed-up over PyTorch; 0 if the kernel is wrong or was not timed."""
        timed = self.right and self.time is not None and self.torch_time is not None
        return self.torch_time / self.time if timed else 0.0  # type: ignore[operator]

    @property
    def chosen(self) -> bool:
        """True if the dispatcher selects this kernel, or a faster one of ours, for such calls."""
        return self.gain >= MARGIN

    def why_not(self) -> str:
        """Returns the reason why it is not `chosen`."""
        call = f"{self.dtype}, {self.shape}{', with gradients' if self.gradients else ''}"
        if not self.right:
            return f"its results were wrong on this machine ({call}: {self.problem})"
        if self.time is None or self.torch_time is None:
            return f"it could not be timed on this machine ({call}: {self.problem})"
        return (
            f"not faster than PyTorch on this machine: {1e6 * self.time:.3g} us, PyTorch "
            f"{1e6 * self.torch_time:.3g} us ({call})"
        )


class Proof(NamedTuple):
    """All results for a machine, the date (ISO 8601), and the command's duration in seconds."""

    machine: Machine
    taken: str
    seconds: float
    verdicts: tuple[Verdict, ...]

    def find(
        self, op: str, backend: str, dtype: str, shape: str, gradients: bool
    ) -> Verdict | None:
        return _by_key(self).get((op, backend, dtype, shape, gradients))


@functools.lru_cache(maxsize=8)
def _by_key(proof: Proof) -> dict[tuple[Any, ...], Verdict]:
    return {verdict[:5]: verdict for verdict in proof.verdicts}


def _up_to(value: int, limits: Iterable[int], what: str) -> str:
    for limit in limits:
        if value <= limit:
            return f"up to {limit} {what}"
    return f"more than {limit} {what}"


def columns_of(call: Any) -> int:
    """Returns the number of values in a row: of norms, those that are normalised together."""
    return math.prod(getattr(call.arguments, "normalized_shape", call.tensors[0].shape[-1:]))


def _rows_class(call: Any) -> list[str]:
    rows = call.tensors[0].numel() // max(1, columns_of(call))
    return [_up_to(rows, (64, 1024, 8192), "rows")]


def _attention_class(call: Any) -> list[str]:
    given = call.arguments
    query, key = given.query, given.key
    queries, keys = given.longest or (query.shape[-2], key.shape[-2])
    batch = query.shape[0] if given.longest is None else given.key_lengths.shape[0] - 1
    if given.attn_mask is not None:
        visible = "bool mask" if given.attn_mask.dtype == torch.bool else "float mask"
    elif given.key_lengths is not None or given.query_lengths is not None:
        visible = "key lengths"
    else:
        visible = "causal" if given.is_causal else "no mask"
    words = [
        _up_to(query.shape[-1], (64, 96, 128), "values a head"),
        "1 query" if queries == 1 else _up_to(queries, (4, 512), "queries"),
        _up_to(keys, (512, 2048, 4096, 8192), "keys"),
        _up_to(batch * query.shape[-3], (64,), "heads in the batch"),
        visible,
    ]
    return [*words, "weights"] if given.need_weights else words


def shape_class(call: Any) -> str:
    """Returns the class of a `dispatch.Call`; one verdict covers all calls of a class."""
    op, given = call.op, call.arguments
    words = _attention_class(call) if op == "attention" else _rows_class(call)
    if op.endswith("_norm"):
        words.append(_up_to(columns_of(call), (1024, 8192), "columns"))
    elif op == "cross_entropy":
        words.append(_up_to(call.tensors[0].shape[-1], (1024, 16384), "classes"))
    elif op == "linear" and (given.activation is not None or given.residual is not None):
        words.append("activation or residual")
    return ", ".join([*words, "dropout"] if getattr(given, "dropout_p", 0.0) else words)


def machine_of(device: torch.device) -> Machine:
    """Describes a device and the versions in use; of a CPU also the number of threads."""
    triton = "none"
    if device.type == "cpu":
        isa = "none" if _native.module is None else _native.module.isa()
        threads = torch.get_num_threads()
        name, target = _native.cpu_model(), f"{isa}, {threads} thread{'s' * (threads > 1)}"
    else:
        major, minor = torch.cuda.get_device_capability(device)
        name = torch.cuda.get_device_name(device)
        target = f"sm_{10 * major + minor}, driver {_native.driver_version()}"
        if importlib.util.find_spec("triton") is not None:
            triton = importlib.metadata.version("triton")
    return Machine(name, target, torch.__version__, triton, __version__)


def folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "transformer_fast"


def path_of(machine: Machine) -> Path:
    digest = hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:16]
    return folder() / f"proof-{digest}.json"


def write_whole(path: Path, content: Any) -> None:
    """Writes a JSON file atomically: other processes see the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def merged(before: Proof | None, found: Proof, crashed: Collection[str] = ()) -> Proof:
    """Returns the results ``found`` of a run, plus earlier verdicts that the run did not renew.

    Earlier verdicts on ops in ``crashed`` are dropped, because one of their kernels ended its process.
    """
    new = {verdict[:5] for verdict in found.verdicts}
    old = before.verdicts if before else ()
    kept = (v for v in old if v[:5] not in new and v.op not in crashed)
    return found._replace(verdicts=(*kept, *found.verdicts))


def write(proof: Proof) -> Path:
    """Replaces the machine's file; returns its path."""
    path = path_of(proof.machine)
    content = {
        "format": _FORMAT,
        "machine": proof.machine._asdict(),
        "taken": proof.taken,
        "seconds": proof.seconds,
        "verdicts": [verdict._asdict() for verdict in proof.verdicts],
    }
    write_whole(path, content)
    _clear_cache()
    return path


def _checked(kind: Any, content: Any) -> Any:
    """Returns ``content`` as a NamedTuple; raises ValueError if its fields or their types differ."""
    if not isinstance(content, dict) or content.keys() != set(kind._fields):
        raise ValueError(f"unexpected fields in a {kind.__name__} entry")
    values = kind(**content)
    for name, value in values._asdict().items():
        wanted = kind.__annotations__[name].__forward_arg__.split(" | ")
        given = "None" if value is None else type(value).__name__
        if given not in wanted and not (given == "int" and "float" in wanted):
            raise ValueError(f"{name} has the wrong type: {value!r}")
    return values


def read(machine: Machine) -> tuple[Proof | None, str | None]:
    """Returns (the machine's record, None), or (None, the reason why there is none)."""
    path = path_of(machine)
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return None, (
            f"nothing was measured on this machine yet: `{COMMAND}` does it, in {DURATION}"
        )
    except OSError as error:
        return None, f"{path} cannot be read: {error.strerror}"
    try:
        content = json.loads(text)
        if content["format"] != _FORMAT:
            return None, (
                f"{path} is ignored, since it is of format {content['format']} and this version's "
                f"is {_FORMAT}; `{COMMAND}` replaces it"
            )
        verdicts = tuple(_checked(Verdict, one) for one in content["verdicts"])
        machine_then = _checked(Machine, content["machine"])
        taken, seconds = str(content["taken"]), float(content["seconds"])
        proof = Proof(machine_then, taken, seconds, verdicts)
    except (ValueError, KeyError, TypeError) as error:
        return None, f"{path} is ignored, since it is damaged ({error}); `{COMMAND}` replaces it"
    if proof.machine != machine:
        return None, (
            f"{path} is ignored: it was recorded on another machine or version; `{COMMAND}` replaces it"
        )
    return proof, None


#: Number of changes of the records in this process; part of the keys of cached calls.
epoch = 0


def _clear_cache() -> None:
    global epoch
    epoch += 1
    _record.cache_clear()


def record_of(device: torch.device) -> tuple[Proof | None, str | None]:
    """Returns `read` for a device, cached for the process."""
    return _record(device.type, device.index or 0, torch.get_num_threads())


@functools.cache
def _record(kind: str, index: int, threads: int) -> tuple[Proof | None, str | None]:
    return read(machine_of(torch.device(kind, index)))


def forget() -> list[Path]:
    """Removes the records of all machines; returns their paths."""
    found = sorted(folder().glob("proof-*.json"))
    for path in found:
        path.unlink()
    _clear_cache()
    return found


def why_not(op: str, backend: str, call: Any, device: torch.device) -> str | None:
    """Returns why the device's record does not select the kernel for a call, or None if it does.

    ``call=None``: why it selects the kernel for no call at all.
    """
    if call is None:
        return _never(op, backend, device)
    return _decide(op, backend, *_about(call), device)[0]


def gain(op: str, backend: str, call: Any, device: torch.device) -> float:
    """Returns `Verdict.gain` of a kernel for the call's class; 0 without a verdict."""
    return _decide(op, backend, *_about(call), device)[1]


def _about(call: Any) -> tuple[str, str, bool]:
    return str(call.tensors[0].dtype)[6:], shape_class(call), call.needs_grad


def _unmeasured(problem: str | None) -> str:
    return f"not validated on this machine yet ({problem}), so it is used only if selected by name"


def _decide(
    op: str, backend: str, dtype: str, shape: str, gradients: bool, device: torch.device
) -> tuple[str | None, float]:
    """Returns why the kernel is not selected, or None, and its gain."""
    proof, problem = record_of(device)
    if proof is None:
        return _unmeasured(problem), 0.0
    verdict = proof.find(op, backend, dtype, shape, gradients)
    if verdict is None:
        why = (
            f"no call like this one was measured on this machine ({dtype}, {shape}), so PyTorch's "
            f"op is preferred; `{COMMAND}` measures most, in {DURATION}"
        )
        return why, 0.0
    return None if verdict.chosen else verdict.why_not(), verdict.gain


# Equals `torch.compiler.assume_constant_result`, which would import all of torch._dynamo.
_decide._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _never(op: str, backend: str, device: torch.device) -> str | None:
    proof, problem = record_of(device)
    if proof is None:
        return _unmeasured(problem)
    mine = [v for v in proof.verdicts if (v.op, v.backend) == (op, backend)]
    if any(verdict.chosen for verdict in mine):
        return None
    return f"not both correct and faster than PyTorch on this machine in any of {len(mine)} cases"
