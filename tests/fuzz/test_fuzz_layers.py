"""Fused layers and decoding steps, by way of the public modules, against their definitions."""

from __future__ import annotations

import copy
import functools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from calls import DTYPES, Numbers
from definitions import Array, Gradients
from fuzz_checks import ISAS, Wrong, exact
from harness import in_use
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from module_checks import _jitter, copied, fast_path, relative_error, to_ours
from ops import attention, feed_forward, layer_norm, linear
from torch import Tensor

from transformer_fast import models
from transformer_fast.testing import GRADIENT_FACTOR, OUTPUT_FACTOR, nan_memory

MORE = int(os.environ.get("TRANSFORMER_FAST_FUZZ", "0"))
CALLS = MORE // 20 or 20
#: Of PyTorch's layer, where ours does not pass beside fewer.
CALLS_OF_TORCH = 64


# Definitions, made of those of the ops -----------------------------------------------------------

Parameters = dict[str, Array]


def _heads(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(0, 2, 1, 3)


def _merged(x: Array) -> Array:
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def multi_head(
    parameters: Parameters, prefix: str, heads: int, x: Array, memory: Array | None, mask: Any,
    causal: bool,
) -> tuple[Array, Callable[[Array], tuple[Array, Array, Gradients]]]:  # fmt: skip
    """Section 3.2.2 on (B, T, M); ``memory`` None: self-attention. Gradients of x and memory."""
    names = [f"{prefix}.{n}" for n in ("in_proj_weight", "in_proj_bias", "out_proj.weight",
                                       "out_proj.bias")]  # fmt: skip
    weight, bias, out_weight, out_bias = (parameters.get(n) for n in names)
    assert weight is not None
    assert out_weight is not None
    width = x.shape[2]
    other = x if memory is None else memory
    results, backs = [], []
    for part, source in enumerate((x, other, other)):
        rows = slice(part * width, (part + 1) * width)
        y, back_of_part = linear.defined(source, weight[rows], None if bias is None else bias[rows])
        results.append(_heads(y, heads))
        backs.append(back_of_part)
    (o, _), back_of_attention = attention.defined(
        *results, mask, None, causal, None, 0.0, None, False, False
    )
    y, back_of_out = linear.defined(_merged(o), out_weight, out_bias)

    def back(dy: Array) -> tuple[Array, Array, Gradients]:
        last = back_of_out(dy)
        inner = back_of_attention(_heads(last["input"], heads), None)  # type: ignore[arg-type]
        parts = [
            f(_merged(inner[name]))  # type: ignore[arg-type]
            for f, name in zip(backs, ("query", "key", "value"), strict=True)
        ]
        found: Gradients = {
            names[0]: np.concatenate([p["weight"] for p in parts]),  # type: ignore[misc]
            names[2]: last["weight"],
        }
        if bias is not None:
            found[names[1]] = np.concatenate([p["bias"] for p in parts])  # type: ignore[misc]
            found[names[3]] = last["bias"]
        dq, dk, dv = (p["input"] for p in parts)
        both = dk + dv  # type: ignore[operator]
        return (dq + both, np.zeros(0), found) if memory is None else (dq, both, found)

    return y, back


def layer(
    parameters: Parameters, heads: int, act: str, norm_first: bool, eps: float, x: Array,
    mask: Any, causal: bool, memory: Array | None = None, memory_mask: Any = None,
) -> tuple[Array, Callable[[Array], tuple[Array, Array | None, Gradients]]]:  # fmt: skip
    """An encoder layer, or with ``memory`` a decoder layer (section 3.1), on (B, T, M)."""

    def self_attention(x: Array) -> Any:
        return multi_head(parameters, "self_attn", heads, x, None, mask, causal)

    def cross_attention(x: Array) -> Any:
        return multi_head(parameters, "multihead_attn", heads, x, memory, memory_mask, False)

    def network(x: Array) -> Any:
        weights = [parameters.get(f"linear{i}.{n}") for i in (1, 2) for n in ("weight", "bias")]
        y, back_of_network = feed_forward.defined(x, *weights, act, 0.0, None)  # type: ignore[arg-type]

        def back(dy: Array) -> Any:
            found = back_of_network(dy)
            named = {f"linear{i}.{n}": found[f"{n}{i}"] for i in (1, 2) for n in ("weight", "bias")}
            return found["input"], np.zeros(0), named

        return y, back

    steps = [self_attention, network] if memory is None else [
        self_attention, cross_attention, network
    ]  # fmt: skip
    backs = []
    for number, step in enumerate(steps, 1):
        w, b = parameters[f"norm{number}.weight"], parameters.get(f"norm{number}.bias")
        if norm_first:
            entered, back_of_norm = layer_norm.defined(x, (x.shape[2],), w, b, eps)
            y, back_of_step = step(entered)
            x = x + y
        else:
            y, back_of_step = step(x)
            x, back_of_norm = layer_norm.defined(x + y, (x.shape[2],), w, b, eps)
        backs.append((number, back_of_step, back_of_norm))

    def back(dy: Array) -> tuple[Array, Array | None, Gradients]:
        found: Gradients = {}
        dmemory: Array | None = None
        for number, back_of_step, back_of_norm in reversed(backs):
            if norm_first:
                dx, dother, named = back_of_step(dy)
                norm = back_of_norm(dx)
                dy = dy + norm["input"]  # type: ignore[operator]
            else:
                norm = back_of_norm(dy)
                dx, dother, named = back_of_step(norm["input"])
                dy = norm["input"] + dx  # type: ignore[operator]
            if dother.size:
                dmemory = dother
            found |= named
            found |= {f"norm{number}.{n}": norm[n] for n in ("weight", "bias")}
        return dy, dmemory, found

    return x, back


# Calls -------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """Torch's layer or stack of layers, and what it is called with (batch first)."""

    module: torch.nn.Module
    x: Tensor
    memory: Tensor | None
    causal: bool
    #: bool, True where hidden, or added; (T, T).
    mask: Tensor | None
    #: bool, True where there is padding, of x and of the memory.
    padding: Tensor | None
    memory_padding: Tensor | None
    heads: int
    activation: str
    norm_first: bool


def lengths_as_padding(numbers: Numbers, batch: int, length: int) -> Tensor:
    """At least one place of each row is real."""
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
            # Scores of which some are large.
            if name.endswith("in_proj_weight") and draw(st.integers(0, 3)) == 3:
                parameter *= 3.0
    x = numbers.normal(batch, length, width, scale=draw(st.sampled_from((1.0, 0.1, 5.0))))
    memory = numbers.normal(batch, source, width) if crossed else None
    causal = decoding or draw(st.booleans())
    mask = padding = None
    if not decoding and not causal and draw(st.booleans()):
        mask = numbers.bools(length, length, true=0.4)
        mask.fill_diagonal_(False)  # what a row gives that sees nothing is where torch differs
        if draw(st.booleans()):
            mask = torch.where(mask, -math.inf, numbers.normal(length, length))
    if not decoding and draw(st.integers(0, 2)) == 2:
        padding = lengths_as_padding(numbers, batch, length)
        if mask is not None:
            mask = None
    memory_padding = None
    if crossed and draw(st.booleans()):
        memory_padding = lengths_as_padding(numbers, batch, source)
    return Drawn(
        module, x, memory, causal, mask, padding, memory_padding, heads, activation, norm_first
    )


def visible(drawn: Drawn, length: int) -> Any:
    """The mask of self-attention as `ops.attention` has it."""
    if drawn.padding is not None:
        return exact(~drawn.padding)[:, None, None, :length]
    if drawn.mask is None:
        return None
    mask = drawn.mask if drawn.mask.is_floating_point() else ~drawn.mask
    return exact(mask)[None, None]


def defined(drawn: Drawn, x: Any, module: torch.nn.Module | None = None) -> tuple[Any, Any]:
    """The layer's result for x in fp64, and what gives its gradients."""
    module = drawn.module if module is None else module
    parameters = {name: exact(p) for name, p in module.named_parameters()}
    memory, seen = None, None
    if drawn.memory is not None:
        memory = exact(drawn.memory)
        if drawn.memory_padding is not None:
            seen = exact(~drawn.memory_padding)[:, None, None, :]
    return layer(
        parameters, drawn.heads, drawn.activation, drawn.norm_first, 1e-5, x,
        visible(drawn, x.shape[1]), drawn.causal, memory, seen,
    )  # fmt: skip


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
    """The result without padding, or, with `start`, the gradients by name."""
    real = slice(None) if drawn.padding is None else ~drawn.padding
    if start is None:
        with torch.no_grad():
            return [called(module, drawn, drawn.x, drawn.memory)[real]]
    x = drawn.x.clone().requires_grad_()
    memory = None if drawn.memory is None else drawn.memory.clone().requires_grad_()
    wanted = [x, *([] if memory is None else [memory]), *module.parameters()]
    return list(torch.autograd.grad(called(module, drawn, x, memory), wanted, start))


def error_of_torch(drawn: Drawn, start: Tensor | None, true: list[Tensor], calls: int) -> float:
    """The worst of several calls: on such small tensors one is a matter of luck."""
    generator = torch.Generator().manual_seed(0)
    module, worst = copied(drawn.module), 0.0
    # In inference PyTorch's fast path takes what is not 0 in a mask for hidden.
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
    y, back = defined(drawn, exact(drawn.x))
    real = slice(None) if drawn.padding is None else exact(~drawn.padding)
    true = [torch.from_numpy(y[real])]
    if grad:
        generator = torch.Generator().manual_seed(5)
        start = torch.randn(drawn.x.shape, generator=generator).to(drawn.x.dtype)
        if drawn.padding is not None:
            start = start.masked_fill(drawn.padding[..., None], 0.0)
        dx, dmemory, found = back(exact(start))
        true = [dx, *([] if dmemory is None else [dmemory])]
        true += [found[name] for name, _ in theirs.named_parameters()]
        true = [torch.from_numpy(x) for x in true]  # type: ignore[arg-type]
    factor = GRADIENT_FACTOR if grad else OUTPUT_FACTOR

    @functools.cache
    def limit(calls: int) -> float:
        allowed = error_of_torch(drawn, start, true, calls)
        return factor * allowed + torch.finfo(drawn.x.dtype).eps

    kept = [p.detach().clone() for p in (drawn.x, *ours.parameters())]
    for isa in ISAS:
        with in_use(isa), nan_memory():
            error = relative_error(run(ours, drawn, start), true)
        if error > limit(4) and error > limit(CALLS_OF_TORCH):
            told = f"error {error:.3g}, limit {limit(CALLS_OF_TORCH):.3g}"
            raise Wrong(f"{type(ours).__name__} on {isa}: {told}")
    for before, after in zip(kept, (drawn.x, *ours.parameters()), strict=True):
        assert torch.equal(before, after.detach())


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "gradients"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_layers(dtype: torch.dtype, grad: bool) -> None:
    @settings(max_examples=CALLS, derandomize=not MORE, phases=[Phase.generate])
    @given(layers(dtype))
    def check_drawn(drawn: Drawn) -> None:
        if grad and drawn.activation == "relu":
            drawn.module.activation = torch.nn.functional.gelu  # ReLU's slope jumps
            drawn = drawn._replace(activation="gelu")
        check(drawn, grad)

    check_drawn()


class Recorder:
    """Embeds tokens for a decoder, and keeps what goes in and what comes out at each step."""

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
    """Each step of greedy decoding, against the whole prefix run anew."""
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
    for isa in ISAS:
        record = Recorder(table, weight)
        with in_use(isa), nan_memory():
            models.generate(
                ours, drawn.memory, embed=record.embed, project=record.project,
                prefix=numbers.integers(batch, min(prefix, 9), end=11), max_new_tokens=steps,
                end_token=-1, memory_key_padding_mask=drawn.memory_padding, use_cache=True,
            )  # fmt: skip
        x = torch.cat(record.entered, dim=1)
        first = record.entered[0].shape[1]
        y = exact(x)
        for part in parts:
            y, _ = defined(drawn, y, part)
        whole = drawn._replace(x=x, module=theirs)
        true = [torch.from_numpy(y)]
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
            raise Wrong(f"decoding on {isa}: error {error:.3g}, limit {limit:.3g}: {x.shape}")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
def test_decoding(dtype: torch.dtype) -> None:
    @settings(max_examples=max(1, CALLS // 2), derandomize=not MORE, phases=[Phase.generate])
    @given(layers(dtype, decoding=True), st.integers(1, 3), st.sampled_from((1, 2, 5, 18)))
    def check_drawn(drawn: Drawn, layers: int, steps: int) -> None:
        check_decoding(drawn, layers, steps)

    check_drawn()
