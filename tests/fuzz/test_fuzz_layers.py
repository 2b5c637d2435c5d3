"""Random calls of fused layers and decoding steps of the public modules, against PyTorch's in fp64."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any, NamedTuple

import pytest
import torch
from harness import DTYPES, ISAS, in_use
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from module_checks import _jitter, cast, copied, fast_path, relative_error, to_ours
from ops import Numbers
from test_fuzz_ops import MORE
from torch import Tensor

from transformer_fast import models
from transformer_fast.testing import GRADIENT_FACTOR, OUTPUT_FACTOR, nan_memory

pytestmark = pytest.mark.thorough

CALLS = MORE // 20 or 20
#: Runs of PyTorch's layer whose worst error counts, if ours exceeds the budget of fewer runs.
CALLS_OF_TORCH = 64


class Drawn(NamedTuple):
    """A layer or stack of PyTorch, and the arguments of a call (batch first)."""

    module: torch.nn.Module
    x: Tensor
    memory: Tensor | None
    causal: bool
    #: (T, T): bool, True = masked, or float and added.
    mask: Tensor | None
    #: Padding of x and of the memory: bool, True = padding.
    padding: Tensor | None
    memory_padding: Tensor | None


def lengths_as_padding(numbers: Numbers, batch: int, length: int) -> Tensor:
    """Returns a padding mask in which each row has at least one token."""
    lengths = 1 + numbers.integers(batch, end=length)
    return torch.arange(length) >= lengths[:, None]


@st.composite
def layers(draw: Any, dtype: torch.dtype, decoding: bool = False) -> Drawn:
    numbers = Numbers(dtype, draw(st.integers(0, 2**32)))
    heads, size = draw(
        st.sampled_from([(1, 8), (2, 5), (2, 16), (3, 8), (4, 16), (1, 64), (2, 32)])
    )
    width = heads * size
    hidden = draw(st.sampled_from((1, 7, 16, 33, 64, 100)))
    batch = draw(st.sampled_from((1, 2, 3, 5)))
    length, source = (draw(st.sampled_from((1, 2, 3, 7, 16, 17, 33, 65))) for _ in "xy")
    activation = draw(st.sampled_from(("gelu", "relu")))
    norm_first, bias = draw(st.booleans()), draw(st.integers(0, 3)) > 0
    crossed = draw(st.booleans())
    kind = torch.nn.TransformerDecoderLayer if crossed else torch.nn.TransformerEncoderLayer
    module: torch.nn.Module = kind(
        width, heads, hidden, 0.0, activation, batch_first=True, norm_first=norm_first, bias=bias,
        dtype=dtype,
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spread = 1.0 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.3
            shift = 1.0 if name.endswith("weight") and parameter.dim() == 1 else 0.0
            parameter.copy_(numbers.normal(*parameter.shape, scale=spread, shift=shift))
            # Make some scores large.
            if name.endswith("in_proj_weight") and draw(st.integers(0, 3)) == 3:
                parameter *= 3.0
    x = numbers.normal(batch, length, width, scale=draw(st.sampled_from((1.0, 0.1, 5.0))))
    memory = numbers.normal(batch, source, width) if crossed else None
    causal = decoding or draw(st.booleans())
    mask = padding = None
    if not decoding and not causal and draw(st.booleans()):
        mask = numbers.bools(length, length, true=0.4)
        mask.fill_diagonal_(False)  # PyTorch differs from ours in fully masked rows
        if draw(st.booleans()):
            mask = torch.where(mask, -math.inf, numbers.normal(length, length))
    if not decoding and draw(st.integers(0, 2)) == 2:
        padding = lengths_as_padding(numbers, batch, length)
        if mask is not None:
            mask = None
    memory_padding = None
    if crossed and draw(st.booleans()):
        memory_padding = lengths_as_padding(numbers, batch, source)
    return Drawn(module, x, memory, causal, mask, padding, memory_padding)


def called(module: torch.nn.Module, drawn: Drawn, x: Tensor, memory: Tensor | None) -> Tensor:
    mask = drawn.mask
    if drawn.causal:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    if drawn.memory is None:
        result = module(x, mask, src_key_padding_mask=drawn.padding, is_causal=drawn.causal)
    else:
        result = module(
            x, memory, tgt_mask=mask, tgt_key_padding_mask=drawn.padding,
            memory_key_padding_mask=drawn.memory_padding, tgt_is_causal=drawn.causal,
        )  # fmt: skip
    return result  # type: ignore[no-any-return]


def run(module: torch.nn.Module, drawn: Drawn, start: Tensor | None) -> list[Tensor]:
    """Returns the unpadded results or, with ``start`` as their gradient, the gradients by name."""
    real = slice(None) if drawn.padding is None else ~drawn.padding
    if start is None:
        with torch.no_grad():
            return [called(module, drawn, drawn.x, drawn.memory)[real]]
    x = drawn.x.clone().requires_grad_()
    memory = None if drawn.memory is None else drawn.memory.clone().requires_grad_()
    wanted = [x, *([] if memory is None else [memory]), *module.parameters()]
    return list(torch.autograd.grad(called(module, drawn, x, memory), wanted, start))


def truth(drawn: Drawn, start: Tensor | None) -> list[Tensor]:
    """Returns the results of PyTorch's module in fp64."""
    exact = cast(drawn._replace(module=None), torch.float64)
    with fast_path(False):
        return run(copied(drawn.module).double(), exact, None if start is None else start.double())


def error_of_torch(drawn: Drawn, start: Tensor | None, true: list[Tensor], calls: int) -> float:
    """Returns the worst error of several runs: on such small tensors one run's error is a matter of
    luck.
    """
    generator = torch.Generator().manual_seed(0)
    module, worst = copied(drawn.module), 0.0
    # In inference PyTorch's fast path treats all nonzero elements of a mask as masked.
    added = drawn.mask is not None and drawn.mask.is_floating_point()
    for draw in range(calls):
        moved = drawn
        if draw:
            with torch.no_grad():
                for p, q in zip(module.parameters(), drawn.module.parameters(), strict=True):
                    p.copy_(_jitter(q, generator))
            moved = drawn._replace(x=_jitter(drawn.x, generator).detach())
        with fast_path(enabled=not added):
            worst = max(worst, relative_error(run(module, moved, start), true))
    return worst


def check(drawn: Drawn, grad: bool) -> None:
    theirs = drawn.module.train(grad)
    ours = to_ours(theirs)
    start: Tensor | None = None
    if grad:
        generator = torch.Generator().manual_seed(5)
        start = torch.randn(drawn.x.shape, generator=generator).to(drawn.x.dtype)
        if drawn.padding is not None:
            start = start.masked_fill(drawn.padding[..., None], 0.0)
    true = truth(drawn, start)
    factor = GRADIENT_FACTOR if grad else OUTPUT_FACTOR

    @functools.cache
    def limit(calls: int) -> float:
        allowed = error_of_torch(drawn, start, true, calls)
        return factor * allowed + torch.finfo(drawn.x.dtype).eps

    kept = [p.detach().clone() for p in (drawn.x, *ours.parameters())]
    for isa in ISAS or (None,):
        with in_use(isa), nan_memory():
            error = relative_error(run(ours, drawn, start), true)
        if error > limit(4) and error > limit(CALLS_OF_TORCH):
            message = f"error {error:.3g}, limit {limit(CALLS_OF_TORCH):.3g}"
            raise AssertionError(f"{type(ours).__name__} on {isa}: {message}")
    for before, after in zip(kept, (drawn.x, *ours.parameters()), strict=True):
        assert torch.equal(before, after.detach())


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_random_layers_are_within_the_budget(dtype: torch.dtype, grad: bool) -> None:
    @settings(max_examples=CALLS, derandomize=not MORE, phases=[Phase.generate])
    @given(layers(dtype))
    def check_drawn(drawn: Drawn) -> None:
        if grad:
            drawn.module.activation = torch.nn.functional.gelu  # the derivative of ReLU jumps
        check(drawn, grad)

    check_drawn()


class Recorder:
    """A decoder's embedding and projection; records their inputs and outputs at each step."""

    def __init__(self, table: Tensor, weight: Tensor) -> None:
        self.table, self.weight = table, weight
        self.entered: list[Tensor] = []
        self.left: list[Tensor] = []

    def embed(self, tokens: Tensor, start: int) -> Tensor:
        self.entered.append(self.table[tokens])
        return self.entered[-1]

    def project(self, hidden: Tensor) -> Tensor:
        self.left.append(hidden.clone())
        return hidden @ self.weight


def check_decoding(drawn: Drawn, layers: int, steps: int) -> None:
    """Compares each step of greedy decoding with a run over the whole prefix."""
    parts = [copy.deepcopy(drawn.module.eval()) for _ in range(layers)]
    numbers = Numbers(drawn.x.dtype, layers)
    with torch.no_grad():
        for part in parts:
            for parameter in part.parameters():
                parameter += numbers.normal(*parameter.shape, scale=0.02)
    kind = torch.nn.TransformerEncoder if drawn.memory is None else torch.nn.TransformerDecoder
    arguments: dict[str, Any] = {"enable_nested_tensor": False} if drawn.memory is None else {}
    theirs = kind(parts[0], layers, **arguments)
    theirs.layers = torch.nn.ModuleList(parts)
    theirs.eval()
    ours = to_ours(theirs)
    batch, prefix, width = drawn.x.shape
    table, weight = numbers.normal(11, width), numbers.normal(width, 11)
    for isa in ISAS or (None,):
        record = Recorder(table, weight)
        with in_use(isa), nan_memory():
            models.generate(
                ours, drawn.memory, embed=record.embed, project=record.project,
                prefix=numbers.integers(batch, min(prefix, 9), end=11), max_new_tokens=steps,
                end_token=-1, memory_key_padding_mask=drawn.memory_padding, use_cache=True,
            )  # fmt: skip
        x = torch.cat(record.entered, dim=1)
        first = record.entered[0].shape[1]
        whole = drawn._replace(x=x, module=theirs)
        true = truth(whole, None)
        got = torch.stack([h[:, -1] for h in record.left], dim=1)
        known = [true[0][:, first - 1 : first - 1 + got.shape[1]]]
        eps = torch.finfo(x.dtype).eps
        size = (true[0].abs().max() / known[0].abs().max()).item()
        error = relative_error([got], known)
        for calls in (1, CALLS_OF_TORCH):
            allowed = error_of_torch(whole, None, true, calls)
            limit = OUTPUT_FACTOR * max(allowed * size, eps / 2) + eps
            if error <= limit:
                break
        else:
            told = f"decoding on {isa}: error {error:.3g}, limit {limit:.3g}: {x.shape}"
            raise AssertionError(told)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_decoding_steps_match_the_whole_prefix(dtype: torch.dtype) -> None:
    @settings(max_examples=max(1, CALLS // 2), derandomize=not MORE, phases=[Phase.generate])
    @given(layers(dtype, decoding=True), st.integers(1, 3), st.sampled_from((1, 2, 5, 18)))
    def check_drawn(drawn: Drawn, layers: int, steps: int) -> None:
        check_decoding(drawn, layers, steps)

    check_drawn()
