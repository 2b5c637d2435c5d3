"""Benchmark cases of ops, modules and Transformers, and the text that they run on.

Modules are compared with those of torch.nn with the same weights.

The text is English that every Python installation has: the paragraphs of Python's language reference
(`pydoc_data.topics`), as bytes, in their original order. Paragraph lengths vary, so batches have the
padding of real batches. Paragraphs shorter than a sentence (headings, lines of grammar) are omitted.
"""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from .. import dispatch
from .. import nn as our_nn
from .._explain import explain_public
from ..dispatch import BACKENDS
from ..models import SinusoidalPositions
from ..specs import OPS
from ..testing import call_of, require_grad
from .accuracy import (
    BothWays,
    ModuleChecker,
    OpChecker,
    checker_of,
    leaves,
    scores_of,
    unchecked,
)
from .benchmark_case import Arguments, BenchmarkCase, Candidate
from .calls import forced, record

#: Tokens are bytes (0 to 255), and these two.
PADDING = 256
BEGIN = 257
VOCABULARY = 258

#: Minimum length of a paragraph in bytes.
_SHORTEST = 80


@functools.cache
def paragraphs() -> tuple[bytes, ...]:
    """Returns about 1,700 paragraphs, 400 kB."""
    from pydoc_data.topics import topics

    found = []
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            text = " ".join(paragraph.split()).encode()
            if len(text) >= _SHORTEST:
                found.append(text)
    return tuple(found)


@dataclass(frozen=True)
class Batch:
    """A padded batch of paragraphs."""

    #: (B, T) int64, PADDING beyond each length.
    tokens: Tensor
    #: (B,) int64.
    lengths: Tensor

    @property
    def real(self) -> Tensor:
        """(B, T) bool: True where there is text."""
        return self.tokens != PADDING

    @property
    def full(self) -> bool:
        """True if there is no padding."""
        return bool((self.lengths == self.tokens.shape[1]).all())

    def to(self, device: torch.device | str) -> Batch:
        return Batch(self.tokens.to(device), self.lengths.to(device))


def batch(texts: list[bytes], longest: int, begin: bool = False) -> Batch:
    """Returns a batch of ``texts``, each cut to ``longest`` tokens; ``begin``: prepends BEGIN."""
    rows = [torch.tensor([BEGIN] * begin + list(text))[:longest] for text in texts]
    lengths = torch.tensor([len(row) for row in rows])
    return Batch(pad_sequence(rows, batch_first=True, padding_value=PADDING), lengths)


def _take(count: int, size: int, after: int = 0) -> list[list[bytes]]:
    texts = paragraphs()
    if count < 1 or size < 1 or after + count * size > len(texts):
        raise ValueError(
            f"there are {len(texts)} paragraphs, which is not enough for {count} batches of {size}"
        )
    starts = range(after, after + count * size, size)
    return [list(texts[start : start + size]) for start in starts]


def batches(count: int, size: int, longest: int = 512) -> list[Batch]:
    """Returns ``count`` batches of ``size`` consecutive paragraphs."""
    return [batch(texts, longest) for texts in _take(count, size)]


def pairs(count: int, size: int, longest: int = 256) -> list[tuple[Batch, Batch]]:
    """Returns (source, target) batches for teacher forcing; the target is the next paragraph."""
    targets = [batch(texts, longest, begin=True) for texts in _take(count, size, 1)]
    return list(zip(batches(count, size, longest), targets, strict=True))


#: The reference is not run if attention's scores take more bytes than this; it holds several copies.
_MOST_SCORE_BYTES = 3 << 30


def _op_on(op: str, backend: str, arguments: Arguments) -> Candidate:
    kernel = next((one for one in dispatch.kernels(op) if one.backend == backend), None)
    if kernel is None:
        return Candidate(backend, None, "it has no kernel for this op")
    reason = "; ".join(dispatch.why_not(kernel, call_of(op, arguments)))
    if op == "attention" and backend == "reference":
        size = scores_of(arguments) * max(4, arguments[0].element_size())
        if size > _MOST_SCORE_BYTES:
            reason = f"its scores alone would take {size / 2**30:.0f} GiB"
    if not reason and backend == "triton" and arguments[0].device.type == "cpu":
        reason = "it would run in Triton's interpreter, whose speed is meaningless"
    return Candidate(backend, None if reason else kernel.run, reason or None)


#: Cost of forward and backward, in units of forward. Backward computes two products for each of
#: forward's, reads the inputs and the upstream gradient, and writes the gradients.
TIMES_FORWARD = 3.0


@torch.enable_grad()
def op_case(
    op: str, case: str, inputs: Sequence[Sequence[Arguments]], backends: Collection[str] = BACKENDS,
    peers: Sequence[Candidate] = (), gradients: bool = False,
) -> BenchmarkCase:  # fmt: skip
    """Returns the benchmark case of an op; it always includes the reference and PyTorch.

    Args:
        inputs: see `BenchmarkCase.inputs`.
        backends: those that get a row; one that cannot run the call is listed with the reason.
        peers: further candidates.
        gradients: time forward and backward; all inputs must then have the same shapes.
    """
    if gradients:
        inputs = [[require_grad(op, arguments) for arguments in calls] for calls in inputs]
    first = inputs[0][0]
    spec = OPS[op]
    wanted = {*backends, "reference"} - {"torch"}
    candidates = [_op_on(op, name, first) for name in BACKENDS if name in wanted]
    explanation = explain_public(call_of(op, first))
    choice = explanation.backend
    # PyTorch's op is always listed; as the dispatcher's choice it must meet our error budget.
    why = unchecked(spec.named(first).get("dropout_p", 0.0))
    theirs = Candidate("torch", None if why else spec.pytorch, why, ours=False)
    candidates.append(_op_on(op, "torch", first) if choice == "torch" else theirs)
    if gradients:
        candidates = [replace(c, run=c.run and BothWays(op, c.run)) for c in candidates]
    leading = next(x for x in first if isinstance(x, torch.Tensor))
    times = TIMES_FORWARD if gradients else 1.0
    return BenchmarkCase(
        op=op, case=case, inputs=inputs, candidates=[*candidates, *peers],
        checker=OpChecker(op, list(leaves(op, first))) if gradients else checker_of(op, first),
        flops=times * sum(spec.flops(arguments) for arguments in inputs[0]),
        useful_flops=times * sum(spec.useful_flops(arguments) for arguments in inputs[0]),
        bytes=times * sum(spec.bytes(arguments) for arguments in inputs[0]), dtype=leading.dtype,
        device=leading.device, chosen=choice, torch=("torch", "torch.compile"),
        inside={} if choice is None else {(op, choice): explanation.reasons},
        product=spec.product,
    )  # fmt: skip


#: Calls a module with one call's arguments.
Forward = Callable[..., Tensor]
#: A call's arguments -> (FLOPs, useful FLOPs, bytes).
Work = Callable[..., tuple[float, float, float]]

#: PyTorch's candidates; speed-ups are relative to the fastest of them.
OF_TORCH = ("torch eager", "torch fast path", "torch.compile")


@contextmanager
def fast_path(enabled: bool) -> Iterator[None]:
    """Context manager that enables or disables the fused inference path of torch.nn."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        with warnings.catch_warnings():
            # The fast path converts padded batches to nested tensors, which emit a warning.
            warnings.filterwarnings("ignore", message=".*nested tensors.*")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def with_fast_path(run: Forward, enabled: bool) -> Forward:
    """Wraps ``run`` so that the fast path of torch.nn is enabled or disabled."""
    return fast_path(enabled)(lambda *arguments: run(*arguments))


def compiled(module: nn.Module) -> Forward:
    """Compiles a module by torch.compile, without the fast path, whose ops cause graph breaks."""
    torch._dynamo.reset()
    return with_fast_path(torch.compile(module, dynamic=False), False)


def twins(
    make: Callable[[Any], nn.Module], dtype: torch.dtype, device: torch.device | str
) -> tuple[nn.Module, nn.Module]:
    """Returns ``make(nn)`` for our namespace and for torch's, with equal weights, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = make(torch.nn)
        # Norm weights and biases are initialized to exactly 1 and 0, which would hide errors.
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    ours = make(our_nn)
    ours.load_state_dict(theirs.state_dict())
    return ours.eval().to(device, dtype), theirs.eval().to(device, dtype)


def parameter_bytes(module: nn.Module) -> float:
    return float(sum(p.numel() * p.element_size() for p in module.parameters()))


def _module_on(ours: nn.Module, backend: str, arguments: Arguments) -> Candidate:
    run = forced(ours, backend)
    try:
        run(*arguments)
    except NotImplementedError as error:
        return Candidate(backend, None, " ".join(str(error).split()))
    return Candidate(backend, run)


@torch.no_grad()
def module_case(
    op: str, case: str, ours: nn.Module, theirs: nn.Module, inputs: Sequence[Sequence[Arguments]],
    real: Callable[..., Tensor], work: Work, backends: Sequence[str | None] = (None,),
    peers: Sequence[Candidate] = (),
) -> BenchmarkCase:  # fmt: skip
    """Returns a benchmark case of two modules with the same state_dict, both in eval mode.

    The oracle is ``theirs`` in fp64 on PyTorch's eager path. The unit of the error budget is the
    error of ``ours`` on the reference backend, in the dtype under test.

    Args:
        real: returns a bool tensor (B, T) from a call's arguments, True where results count.
        work: returns the cost of a call; useful FLOPs exclude padding.
        backends: backends to run ``ours`` on; None is the dispatcher's choice.
    """
    first = inputs[0][0]
    parameters = next(theirs.parameters())
    with record() as found:
        ours(*first)
    automatic = Candidate(found.backends, ours)  # named as 'cpu+torch'
    candidates = [
        automatic if backend is None else _module_on(ours, backend, first)
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
        op=op, case=case, inputs=inputs, candidates=[*candidates, *peers],
        checker=ModuleChecker(oracle, reference, real), flops=flops, useful_flops=useful,
        bytes=moved, dtype=parameters.dtype, device=parameters.device, chosen=automatic.name,
        torch=OF_TORCH, inside=found.reasons,
    )  # fmt: skip


#: (module of torch.nn, arguments of a call) -> peers, which must compute the module's result.
Peers = Callable[[nn.Module, Arguments], Sequence[Candidate]]


class Size(NamedTuple):
    """Dimensions of a model; the defaults are those of the paper's base model (table 3)."""

    model: int = 512
    heads: int = 8
    hidden: int = 2048
    layers: int = 6
    vocabulary: int = 32000

    @property
    def label(self) -> str:
        return f"{self.model}/{self.heads}/{self.hidden}"


# FLOPs, 2 for each multiply-add. ``pairs``: number of (query, key) pairs.


def encoder_layer_flops(size: Size, rows: float, pairs: float) -> float:
    return rows * (8.0 * size.model**2 + 4.0 * size.model * size.hidden) + 4.0 * pairs * size.model


def real_positions(x: Tensor, mask: None, padding: Tensor | None) -> Tensor:
    """Returns a bool tensor (B, T), True where an encoder's results count."""
    if padding is None:
        return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    return ~padding


def encoder_work(size: Size, weights: float, layers: int = 1) -> Callable[..., Any]:
    """Returns the cost function of ``layers`` encoder layers with ``weights`` bytes of parameters."""

    def work(x: Tensor, mask: None, padding: Tensor | None) -> tuple[float, float, float]:
        batch, length, _ = x.shape
        lengths = real_positions(x, mask, padding).sum(1).double()
        dense = encoder_layer_flops(size, batch * length, batch * length**2)
        useful = encoder_layer_flops(size, lengths.sum().item(), lengths.square().sum().item())
        moved = 2.0 * x.numel() * x.element_size() + weights
        return layers * dense, layers * useful, moved

    return work


def encoder_case(
    case: str, inputs: Sequence[Sequence[Arguments]], size: Size,
    backends: Sequence[str | None] = (None,), peers: Peers = lambda module, arguments: (),
    layers: int | None = None,
) -> BenchmarkCase:  # fmt: skip
    """Returns the case of one encoder layer, or of a `TransformerEncoder` of ``layers``.

    Calls are (x, None, padding): x (B, T, M); padding (B, T) bool, True = masked out, or None.
    """
    x, _, _ = inputs[0][0]

    def make(nn: Any) -> nn.Module:
        layer = nn.TransformerEncoderLayer(size.model, size.heads, size.hidden, batch_first=True)
        return layer if layers is None else nn.TransformerEncoder(layer, layers)

    ours, theirs = twins(make, x.dtype, x.device)
    work = encoder_work(size, parameter_bytes(theirs), layers or 1)
    offered = peers(theirs, inputs[0][0])
    op = "encoder_layer" if layers is None else "encoder"
    return module_case(op, case, ours, theirs, inputs, real_positions, work, backends, offered)


class Seq2Seq(nn.Module):
    """The paper's model on tokens, built from the classes of ``nn``: torch's namespace or ours."""

    positions: Tensor

    def __init__(self, nn: Any, size: Size, dropout: float = 0.1, longest: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.model)
        table = SinusoidalPositions(longest, size.model).table
        self.register_buffer("positions", table, persistent=False)
        self.transformer = nn.Transformer(
            size.model, size.heads, size.layers, size.layers, size.hidden, dropout, batch_first=True
        )
        self.output = nn.Linear(size.model, size.vocabulary)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) + self.positions[: tokens.shape[1]]

    def forward(self, source: Batch, target: Batch) -> Tensor:
        """Returns logits (B, T, vocabulary) of the token after each target token (teacher forcing)."""
        return self.output(self.decoded(source, target))

    def decoded(self, source: Batch, target: Batch) -> Tensor:
        """Returns the decoder's output (B, T, M), the input of the layer `output`."""
        length = target.tokens.shape[1]
        future = torch.ones(length, length, dtype=torch.bool, device=target.tokens.device).triu(1)
        hidden = None if source.full else ~source.real
        return self.transformer(
            self._embed(source.tokens), self._embed(target.tokens), tgt_mask=future,
            src_key_padding_mask=hidden, tgt_key_padding_mask=None if target.full else ~target.real,
            memory_key_padding_mask=hidden, tgt_is_causal=True,
        )  # fmt: skip


def transformer_work(size: Size, weights: float, item: int) -> Callable[..., Any]:
    """Returns the cost function of `Seq2Seq`; ``item``: bytes of an element."""

    def flops(rows: float, keys: float, own: float, past: float, cross: float) -> float:
        both = encoder_layer_flops(size, keys, own) + encoder_layer_flops(size, rows, past)
        crossing = 4.0 * (rows + keys) * size.model**2 + 4.0 * cross * size.model
        return size.layers * (both + crossing) + 2.0 * rows * size.model * size.vocabulary

    def work(source: Batch, target: Batch) -> tuple[float, float, float]:
        batch, keys = source.tokens.shape
        length = target.tokens.shape[1]
        s, t = source.lengths.double(), target.lengths.double()
        sums = (t.sum(), s.sum(), (s * s).sum(), (t * (t + 1) / 2).sum(), (s * t).sum())
        dense = flops(
            batch * length, batch * keys, batch * keys**2, batch * length**2, batch * length * keys
        )
        return (
            dense,
            flops(*(x.item() for x in sums)),
            float(batch * length * size.vocabulary * item) + weights,
        )

    return work


def transformer_case(
    case: str, inputs: Sequence[Sequence[Arguments]], size: Size, dtype: torch.dtype,
    device: torch.device | str, backends: Sequence[str | None] = (None,),
    peers: Peers = lambda module, arguments: (),
) -> BenchmarkCase:  # fmt: skip
    """Returns the case of `Seq2Seq`; calls are (source, target), both `Batch`."""
    ours, theirs = twins(lambda nn: Seq2Seq(nn, size), dtype, device)
    work = transformer_work(size, parameter_bytes(theirs), dtype.itemsize)
    offered = peers(theirs, inputs[0][0])
    return module_case(
        "transformer", case, ours, theirs, inputs, lambda source, target: target.real, work,
        backends, offered,
    )  # fmt: skip
