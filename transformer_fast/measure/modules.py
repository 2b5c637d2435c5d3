"""Benchmark cases of modules: ours against torch.nn's, with the same weights."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .. import nn as our_nn
from .accuracy import ModuleChecker
from .benchmark_case import Arguments, BenchmarkCase, Candidate
from .calls import forced, record

#: Runs a module on one call's arguments.
Forward = Callable[..., Tensor]
#: From a call's arguments: (flops, useful flops, bytes).
Work = Callable[..., tuple[float, float, float]]

#: Candidates of which the fastest stands for PyTorch.
OF_TORCH = ("torch eager", "torch fast path", "torch.compile")


@contextmanager
def fast_path(enabled: bool) -> Iterator[None]:
    """torch.nn's fused inference path, on or off within the block."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        with warnings.catch_warnings():
            # The fast path converts padded batches to nested tensors, which warn.
            warnings.filterwarnings("ignore", message=".*nested tensors.*")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def with_fast_path(run: Forward, enabled: bool) -> Forward:
    """``run`` with torch.nn's fast path on or off."""

    def forward(*arguments: Any) -> Tensor:
        with fast_path(enabled):
            return run(*arguments)

    return forward


def compiled(module: nn.Module) -> Forward:
    """The module under torch.compile, without the fast path, whose ops cause graph breaks."""
    torch._dynamo.reset()
    return with_fast_path(torch.compile(module, dynamic=False), False)


def twins(
    make: Callable[[Any], nn.Module], dtype: torch.dtype, device: torch.device | str
) -> tuple[nn.Module, nn.Module]:
    """``make(nn)`` for our namespace and for torch's, with the same state_dict, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = make(torch.nn)
        # Freshly initialized norms and biases are exactly 1 and 0, which would hide errors.
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    ours = make(our_nn)
    ours.load_state_dict(theirs.state_dict())
    return ours.eval().to(device, dtype), theirs.eval().to(device, dtype)


def parameter_bytes(module: nn.Module) -> float:
    return float(sum(p.numel() * p.element_size() for p in module.parameters()))


def _of_backend(ours: nn.Module, backend: str, arguments: Arguments) -> Candidate:
    run = forced(ours, backend)
    try:
        run(*arguments)
    except NotImplementedError as error:
        return Candidate(backend, None, " ".join(str(error).split()))
    return Candidate(backend, run)


@torch.no_grad()
def module_case(
    op: str,
    case: str,
    ours: nn.Module,
    theirs: nn.Module,
    inputs: Sequence[Sequence[Arguments]],
    real: Callable[..., Tensor],
    work: Work,
    backends: Sequence[str | None] = (None,),
    peers: Sequence[Candidate] = (),
) -> BenchmarkCase:
    """A benchmark case between two modules with the same state_dict, both in evaluation mode.

    Args:
        real: from a call's arguments, a bool tensor (B, T): the places whose results count.
        work: what it costs; only real places are useful.
        backends: what ``ours`` is run on; None is the dispatcher's choice.

    The oracle is ``theirs`` in fp64 on torch's eager path, and the error that is allowed is that of
    ``ours`` on the reference backend, in the dtype under test.
    """
    first = inputs[0][0]
    parameters = next(theirs.parameters())
    with record() as found:
        ours(*first)
    automatic = Candidate(found.backends, ours)  # named as 'cpu+torch'
    candidates = [
        automatic if backend is None else _of_backend(ours, backend, first)
        for backend in backends
        if backend not in ("reference", "torch")
    ]
    reference = forced(ours, "reference")
    if "reference" not in [candidate.name for candidate in candidates]:
        candidates.append(Candidate("reference", reference))
    candidates += [
        Candidate("torch eager", with_fast_path(theirs, False), ours=False),
        Candidate("torch fast path", with_fast_path(theirs, True), ours=False),
    ]
    oracle = with_fast_path(copy.deepcopy(theirs).double(), False)
    works = [work(*arguments) for arguments in inputs[0]]
    flops, useful, moved = (sum(part) for part in zip(*works, strict=True))
    return BenchmarkCase(
        op=op,
        case=case,
        inputs=inputs,
        candidates=[*candidates, *peers],
        checker=ModuleChecker(oracle, reference, real),
        flops=flops,
        useful_flops=useful,
        bytes=moved,
        dtype=parameters.dtype,
        device=parameters.device,
        chosen=automatic.name,
        torch=OF_TORCH,
        inside=found.reasons,
    )
