"""The calls whose kernels are compiled ahead: each kernel, dtype and class of sizes once.

They are made with meta tensors, through the same launchers as real calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...functional.layer_norm import NORMS
from ...functional.linear import CODES
from . import config
from . import feed_forward as networks
from . import layer_norm as norms
from . import linear as maps
from .attention import attention_forward
from .attention_bwd import attention_backward
from .cross_entropy import cross_entropy_backward, cross_entropy_forward
from .runtime import Launch, instead_of_launching

HEADS = (64, 128, 256)
COLUMNS = (512, 1024, 4096, 8192)
#: Short rows, long ones, and such that do not start at multiples of 16 bytes.
CLASSES = (1000, 32000, 50257)
DTYPES = (torch.bfloat16, torch.float32)


class Case(NamedTuple):
    """A call, by name, and what makes it."""

    name: str
    run: Callable[[], Any]


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention(
    head: int,
    dtype: torch.dtype,
    *,
    causal: bool = False,
    mask: torch.dtype | None = None,
    lengths: bool = False,
    query_lengths: bool = False,
    dropout_p: float = 0.0,
    queries: int = 2048,
    weights: bool = False,
    group: int = 1,
    packed: bool = False,
) -> None:
    batch = 1 if packed else 4
    q = _meta(batch, 8, queries, head, dtype=dtype)
    k = _meta(batch, 8 // group, 2048, head, dtype=dtype)
    attn_mask = None if mask is None else _meta(1, 8, queries, 2048, dtype=mask)
    seed = _meta(dtype=torch.int64) if dropout_p else None
    places = 5 if packed else 4
    key_lengths = _meta(places, dtype=torch.int64) if lengths or packed else None
    ends = _meta(places, dtype=torch.int64) if query_lengths or packed else None
    longest = (512, 512) if packed else (-1, -1)
    arguments = (q, k, k, attn_mask, key_lengths, causal, 0.125, dropout_p, seed)
    output, _, shift, norm = attention_forward(*arguments, weights, ends, *longest)
    if queries > 1:
        learned = attn_mask is not None and attn_mask.is_floating_point()
        kept = (output, None, shift, norm, True, True, True, learned)
        attention_backward(output, None, *arguments, *kept, ends, *longest)


def _attention_calls(dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    mixed = {"mask": dtype, "lengths": True, "causal": True, "dropout_p": 0.1}
    return {
        "": {},
        " causal, weights": {"causal": True, "weights": True},
        " bool mask": {"mask": torch.bool},
        " float mask, lengths, causal, dropout": mixed,
        " lengths of both": {"lengths": True, "query_lengths": True},
        " packed": {"packed": True},
        " packed, causal": {"packed": True, "causal": True},
        " groups, causal": {"causal": True, "group": 2},
        " one query": {"queries": 1, "lengths": True, "group": 2},
    }


def _norm(columns: int, dtype: torch.dtype, dropout_p: float, kind: int = 0) -> None:
    x, weight = _meta(8192, columns, dtype=dtype), _meta(columns, dtype=dtype)
    seed = _meta(dtype=torch.int64) if dropout_p else None
    y, total, mean, rstd = norms.forward(x, x, weight, weight, 1, 1e-5, kind, dropout_p, seed)
    assert total is not None
    drops = dropout_p > 0.0
    norms.backward(
        y, total, total, weight, mean, rstd, 1, kind, dropout_p, seed, True, drops, True, True
    )


def _feed_forward(dtype: torch.dtype, activation: str, dropout_p: float, rows: int = 4096) -> None:
    x = _meta(rows, 1024, dtype=dtype)
    weight1, bias1 = _meta(4096, 1024, dtype=dtype), _meta(4096, dtype=dtype)
    weight2, bias2 = _meta(1024, 4096, dtype=dtype), _meta(1024, dtype=dtype)
    seed = _meta(dtype=torch.int64) if dropout_p else None
    rest = (CODES[activation], dropout_p, seed)
    y, kept = networks.forward(x, weight1, bias1, weight2, bias2, *rest, True)
    assert kept is not None
    networks.backward(y, x, weight1, weight2, kept, *rest, True, True, True, True, True)


def _linear(dtype: torch.dtype) -> None:
    x, weight = _meta(4096, 1000, dtype=dtype), _meta(1024, 1000, dtype=dtype)
    residual = _meta(4096, 1024, dtype=dtype)
    y, z = maps.forward(x, weight, residual[0], residual, CODES["gelu"], True)
    maps.backward(y, x, weight, z, CODES["gelu"], True, True, True)


def _cross_entropy(classes: int, dtype: torch.dtype, label_smoothing: float) -> None:
    logits, target = _meta(4096, classes, dtype=dtype), _meta(4096, dtype=torch.int64)
    losses, known = cross_entropy_forward(logits, target, -100, label_smoothing)
    cross_entropy_backward(losses, logits, target, known, -100, label_smoothing)


def _named(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Case:
    return Case(name, lambda: function(*args, **kwargs))


def cases(
    dtypes: Iterable[torch.dtype] = DTYPES,
    heads: Iterable[int] = HEADS,
    columns: Iterable[int] = COLUMNS,
    classes: Iterable[int] = CLASSES,
) -> Iterator[Case]:
    """Every call, for these sizes of heads, rows of a norm and classes of a loss; its kernels depend on
    the architecture."""
    for dtype in dtypes:
        kind = str(dtype).removeprefix("torch.")
        for head in heads:
            at = f"attention {kind} head {head}"
            for name, options in _attention_calls(dtype).items():
                yield _named(f"{at}{name}", _attention, head, dtype, **options)
        for width in columns:
            at = f"{kind} columns {width}"
            for op, norm in NORMS.items():
                yield _named(f"{op} {at}", _norm, width, dtype, 0.0, norm.kind)
            yield _named(f"layer_norm {at} dropout", _norm, width, dtype, 0.1)
        at = f"feed_forward {kind}"
        yield _named(f"{at} relu, dropout", _feed_forward, dtype, "relu", 0.1)
        yield _named(f"{at} gelu, dropout", _feed_forward, dtype, "gelu", 0.1)
        yield _named(f"{at} few rows", _feed_forward, dtype, "silu", 0.1, rows=16)
        yield _named(f"linear {kind} odd sizes", _linear, dtype)
        for count in classes:
            at = f"cross_entropy {kind} classes {count}"
            yield _named(at, _cross_entropy, count, dtype, 0.0)
            yield _named(f"{at} smoothing", _cross_entropy, count, dtype, 0.1)


def launches(case: Case, architecture: int) -> list[Launch]:
    """The launches of a call on an architecture."""
    found: list[Launch] = []
    with config.use_architecture(architecture), instead_of_launching(found.append):
        case.run()
    return found


def warm(case: Case, architecture: int) -> int:
    """Compile what a call launches into Triton's cache, for the current GPU; how many kernels."""
    return len(
        {
            launch.kernel.warmup(
                *launch.args, grid=launch.grid, num_warps=launch.warps, num_stages=launch.stages,
                **launch.constants,
            )
            for launch in launches(case, architecture)
        }
    )  # fmt: skip
