"""Modules of ours and of torch.nn with the same weights, and contests between them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .calls import Record, forced, record
from .contest import Arguments, Contender, Contest
from .judge import ModuleJudge

#: Runs a module on one call's arguments.
Forward = Callable[..., Tensor]


@contextmanager
def fast_path(enabled: bool) -> Iterator[None]:
    """torch.nn's fused inference path, on or off within the block."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        with warnings.catch_warnings():
            # Nested tensors, which the fast path makes of padded batches, announce themselves.
            warnings.filterwarnings("ignore", message=".*nested tensors.*")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _with_fast_path(run: Forward, enabled: bool) -> Forward:
    def forward(*arguments: Any) -> Tensor:
        with fast_path(enabled):
            return run(*arguments)

    return forward


def _compiled(module: nn.Module) -> Contender:
    """torch.compile in its default mode, on the eager path."""
    torch._dynamo.reset()
    compiled = torch.compile(module)
    return Contender("torch.compile", _with_fast_path(compiled, False), ours=False)


def _automatic(ours: nn.Module, arguments: Arguments) -> tuple[Contender, Record]:
    """What the dispatcher makes of it, named after the backends it chooses, as 'cpu+torch'."""
    with record() as found:
        ours(*arguments)
    return Contender("+".join(sorted({backend for _, backend in found.calls})), ours), found


def _of_backend(ours: nn.Module, backend: str, arguments: Arguments) -> Contender:
    run = forced(ours, backend)
    try:
        run(*arguments)
    except NotImplementedError as error:
        return Contender(backend, None, " ".join(str(error).split()))
    return Contender(backend, run)


def module_contest(
    op: str,
    case: str,
    ours: nn.Module,
    theirs: nn.Module,
    inputs: Sequence[Sequence[Arguments]],
    real: Callable[..., Tensor],
    work: Callable[..., tuple[float, float, float]],
    backends: Sequence[str | None] = (None,),
    compile: bool = False,
    peers: Sequence[Contender] = (),
) -> Contest:
    """A contest between two modules with the same state_dict, both in evaluation mode.

    Args:
        real: from a call's arguments, a bool tensor (B, T): the places whose results count.
        work: from a call's arguments, (flops, useful flops, bytes).
        backends: what ``ours`` is run on; None is the dispatcher's choice.
        compile: whether torch.compile takes part.

    The oracle is ``theirs`` in fp64 on torch's eager path, and the error that is allowed is that of
    ``ours`` on the reference backend, in the dtype under test.
    """
    first = inputs[0][0]
    parameters = next(theirs.parameters())
    reference = forced(ours, "reference")
    with torch.no_grad():
        automatic, found = _automatic(ours, first)
        contenders = [
            automatic if backend is None else _of_backend(ours, backend, first)
            for backend in backends
            if backend not in ("reference", "torch")
        ]
    if "reference" not in [contender.name for contender in contenders]:
        contenders.append(Contender("reference", reference))
    contenders.append(Contender("torch eager", _with_fast_path(theirs, False), ours=False))
    contenders.append(Contender("torch fast path", _with_fast_path(theirs, True), ours=False))
    if compile:
        contenders.append(_compiled(theirs))
    oracle = _with_fast_path(copy.deepcopy(theirs).double(), False)
    totals = [
        sum(part) for part in zip(*(work(*arguments) for arguments in inputs[0]), strict=True)
    ]
    return Contest(
        op=op,
        case=case,
        inputs=inputs,
        contenders=[*contenders, *peers],
        judge=ModuleJudge(oracle, reference, real),
        flops=totals[0],
        useful_flops=totals[1],
        bytes=totals[2],
        dtype=parameters.dtype,
        device=parameters.device,
        chosen=automatic.name,
        torch=("torch eager", "torch fast path", "torch.compile"),
        inside=found.reasons,
    )


# Arithmetic of the Transformer's parts, per the paper's section 3: 2 per multiply-add.


def attention_flops(rows: float, pairs: float, model: int) -> float:
    """Projections of ``rows`` queries (and as many keys), scores and mixing of ``pairs``."""
    return 8.0 * rows * model * model + 4.0 * pairs * model


def cross_attention_flops(rows: float, keys: float, pairs: float, model: int) -> float:
    return 4.0 * (rows + keys) * model * model + 4.0 * pairs * model


def encoder_layer_flops(rows: float, pairs: float, model: int, hidden: int) -> float:
    return attention_flops(rows, pairs, model) + 4.0 * rows * model * hidden


def decoder_layer_flops(
    rows: float, keys: float, pairs: float, cross_pairs: float, model: int, hidden: int
) -> float:
    return (
        attention_flops(rows, pairs, model)
        + cross_attention_flops(rows, keys, cross_pairs, model)
        + 4.0 * rows * model * hidden
    )
