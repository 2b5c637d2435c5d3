"""Test data of attention; see `Row`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from transformer_fast.specs import spec
from transformer_fast.specs.attention import _attention, arrange

from . import LARGE, MIDDLE, SMALL, Drawing, Drawn, Row, some, wrong


def _below(diagonal: Callable[[int, int], int]) -> Any:
    """Returns a causality bug: the mask is triangular below this diagonal of (T, S)."""

    def mask(call: Any) -> Tensor:
        t, s = call.query.shape[-2], call.key.shape[-2]
        return torch.ones(1, 1, t, s, dtype=torch.bool).tril(diagonal(t, s))

    return wrong("attention", attn_mask=mask, is_causal=False)


def _blind(output: Tensor) -> Tensor:
    return (output == 0).all(dim=-1, keepdim=True)


def _interleaved(x: Tensor, like: Tensor) -> Tensor:
    return x.repeat(1, like.shape[1] // x.shape[1], 1, 1)


def _one_element_off(call: Any, output: Tensor, weights: Tensor | None) -> Any:
    output = output.clone()
    output[-1, -1, -1, -1] += 1e-5
    return output, weights


_wrong = functools.partial(wrong, "attention")
_BUGS = {
    "scale 1 / D": ("plain", _wrong(scale=lambda call: 1 / call.query.shape[-1])),
    "no scale": ("plain", _wrong(scale=1.0)),
    "soft cap forgotten": ("soft cap", _wrong(softcap=None)),
    "soft cap off by 1e-4": ("soft cap", _wrong(softcap=lambda call: 1.0001 * call.softcap)),
    "scale off by 1e-4": (
        "plain", _wrong(scale=lambda call: (1 + 1e-4) / math.sqrt(call.query.shape[-1])),
    ),
    "last key dropped": (
        "plain", _wrong(key=lambda call: call.key[:, :, :-1], value=lambda call: call.value[:, :, :-1]),
    ),
    "flipped mask": ("bool mask (B,H,T,S)", _wrong(attn_mask=lambda call: ~call.attn_mask)),
    "mask forgotten": ("float mask, distance", _wrong(attn_mask=None)),
    "mask of the first head for all": (
        "float mask, distance", _wrong(attn_mask=lambda call: call.attn_mask[:, :1]),
    ),
    "mask of the first batch element for all": (
        "bool mask (B,H,T,S)", _wrong(attn_mask=lambda call: call.attn_mask[:1]),
    ),
    "mask transposed": ("bool mask (T,S)", _wrong(attn_mask=lambda call: call.attn_mask.flip(-1))),
    "causal off by one, strict": ("causal", _below(lambda t, s: -1)),
    "causal off by one, lax": ("causal", _below(lambda t, s: 1)),
    "causal at the lower right": ("causal, more keys", _below(lambda t, s: s - t)),
    "causal forgotten": ("causal", _wrong(is_causal=False)),
    "key lengths off by one": ("key lengths", _wrong(key_lengths=lambda call: call.key_lengths - 1)),
    "key lengths forgotten": ("key lengths", _wrong(key_lengths=None)),
    "heads interleaved": (
        "fewer key heads",
        _wrong(
            key=lambda call: _interleaved(call.key, call.query),
            value=lambda call: _interleaved(call.value, call.query),
        ),
    ),
    "row that sees nothing gets the mean": (
        "bool mask, empty rows",
        _wrong(lambda call, y, w: (torch.where(_blind(y), call.value.mean(-2, keepdim=True), y), w)),
    ),
    "row that sees nothing gets NaN": (
        "bool mask, empty rows", _wrong(lambda call, y, w: (y.masked_fill(_blind(y), math.nan), w)),
    ),
    "one element of one head": ("plain", _wrong(_one_element_off)),
    "weights not normalised": ("weights", _wrong(lambda call, y, w: (y, w * w.shape[-1]))),
    "weights left out": ("weights", _wrong(lambda call, y, w: (y, None))),
}  # fmt: skip


#: Mask shapes: the dimensions of (B, H, T, S) that are not 1.
MASK_SHAPES = ("BHTS", "TS", "BS", "BT", "HS", "HTS", "S", "B", "T", "BHS", "BTS")
BOOL_MASKS = ("random", "dense", "sparse", "all", "nothing", "empty rows", "blocks")
FLOAT_MASKS = ("normal", "hiding", "lowest", "zeros", "float of a bool", "large", "alibi", "rising")
FLOAT_MASKS += ("steep",)


def mask_of(numbers: Drawing, kind: str, shape: str, b: int, h: int, t: int, s: int) -> Tensor:
    full = dict(zip("BHTS", (b, h, t, s), strict=True))
    size = tuple(full[d] if d in shape else 1 for d in "BHTS")
    if kind in BOOL_MASKS:
        chances = {"random": 0.5, "dense": 0.9, "sparse": 0.05, "all": 1.1, "nothing": -1.0}
        mask = numbers.bools(*size, true=chances.get(kind, 0.6))
        if kind == "empty rows":
            mask = mask & numbers.bools(size[0], size[1], size[2], 1, true=0.7)
        if kind == "blocks":
            left = numbers.bools(size[0], size[1], -(-size[2] // 16), -(-size[3] // 64), true=0.4)
            left = left.repeat_interleave(16, 2).repeat_interleave(64, 3)
            mask = left[:, :, : size[2], : size[3]].contiguous()
        return mask
    if kind in ("alibi", "rising", "steep"):
        slopes = 2.0 ** -torch.arange(1, size[1] + 1, dtype=torch.float64)
        far = torch.arange(size[3])[None, :] - torch.arange(size[2])[:, None]
        sign = {"alibi": -1.0, "rising": 1.0, "steep": 4.0}[kind]
        bias = sign * slopes[None, :, None, None] * far.abs().double()[None, None]
        return bias.expand(size).to(numbers.dtype).clone()
    if kind == "zeros":
        return torch.zeros(size, dtype=numbers.dtype)
    mask = numbers.normal(*size, scale=100.0 if kind == "large" else 1.0)
    if kind == "hiding":
        return torch.where(numbers.bools(*size, true=0.4), -math.inf, mask)
    if kind == "lowest":
        return torch.where(numbers.bools(*size, true=0.4), torch.finfo(numbers.dtype).min, mask)
    if kind == "float of a bool":
        return torch.where(numbers.bools(*size, true=0.4), -math.inf, torch.zeros_like(mask))
    return mask


SCORES = {
    "normal": 5, "equal keys": 1, "zero queries": 1, "small": 1, "std 30": 1, "std 100": 1,
    "std 300": 1, "rising keys": 1, "denormal": 1, "one far key": 1,
}  # fmt: skip
#: Kinds of scores whose weights are not nearly all 0 or 1, and of masks that make them so.
PLAIN_SCORES, STEEP = ("normal", "zero queries", "small", "denormal"), ("large", "steep")


@st.composite
def _drawn(draw: Any, dtype: torch.dtype) -> Drawn:
    numbers = Drawing(draw, dtype)
    t = numbers.size(SMALL, MIDDLE, (0, 1, 4, 5, 127, 129, 257))
    s = numbers.size(SMALL, MIDDLE, LARGE, (0, 1))
    d = numbers.size(
        (1, 2, 3, 7, 8, 16, 17), (24, 31, 32, 33, 48, 64, 64, 64), (0, 65, 80, 128, 131)
    )
    dv = d if draw(st.integers(0, 3)) else numbers.size((1, 3, 8, 16, 31), (33, 64, 0))
    b, kv_heads, group = draw(
        st.sampled_from(
            [(1, 1, 1), (1, 2, 1), (2, 2, 1), (3, 1, 1), (2, 1, 3), (1, 2, 2), (2, 3, 1), (0, 2, 1),
             (2, 0, 1), (1, 1, 8)]
        )
    )  # fmt: skip
    h = kv_heads * group
    work = max(1, b * h * t * s * (d + dv))
    if work > 1_000_000:
        t = max(1, min(t, 1_000_000 // max(1, b * h * s * (d + dv))))
    kind = numbers.kind(SCORES)
    values = numbers.kind({"normal": 5, "small": 1, "large": 1, "far": 1, "equal rows": 1})
    scale = draw(st.sampled_from((None, None, None, 0.3, 0.0, -0.5)))
    q, k = numbers.normal(b, h, t, d), numbers.normal(b, kv_heads, s, d)
    v = numbers.of_kind(values, b, kv_heads, s, dv)
    if kind.startswith("std"):
        q = q * float(kind[4:])
    elif kind == "rising keys":
        # Scores grow with the key index, so that the first key block has the smallest.
        direction = numbers.normal(d)
        slope = numbers.one_of(0.1, 0.5, 1.0)
        steps = (torch.arange(s, dtype=torch.float64) * slope / max(1, d) ** 0.5)[:, None]
        k = (k.double() * 0.1 + steps * direction.double().sign()).to(dtype)
        q = (q.double() * 0.1 + direction.double().sign()).to(dtype)
    elif kind == "equal keys":
        k = k[:, :, :1].expand(k.shape).clone()
    elif kind == "zero queries":
        q = torch.zeros_like(q)
    elif kind == "small":
        q, k = q * 1e-3, k * 1e-3
    elif kind == "denormal":
        k = numbers.of_kind("denormal", *k.shape)
    elif kind == "one far key" and s:
        k[:, :, int(numbers.integers(end=s))] *= 50.0
    mask, forms = None, ""
    if draw(st.integers(0, 2)):
        form = draw(st.sampled_from(MASK_SHAPES))
        forms = draw(st.sampled_from(BOOL_MASKS + FLOAT_MASKS))
        mask = mask_of(numbers, forms, form, b, h, t, s)
        if draw(st.integers(0, 3)) == 0:
            mask = mask.expand(b, h, t, s)
        elif draw(st.booleans()):
            mask = numbers.laid_out(
                mask, draw(st.sampled_from(("transposed", "flipped", "contiguous")))
            )
        if mask.dtype != torch.bool and draw(st.integers(0, 5)) == 0:
            mask = mask.float()
    causal = draw(st.integers(0, 2)) == 2
    lengths = None
    if draw(st.integers(0, 3)) == 3:
        lengths = numbers.integers(b, end=s + 1)
        lengths = lengths.to(draw(st.sampled_from((torch.int64, torch.int32))))
    p = draw(st.sampled_from((0.0, 0.0, 0.0, 0.1, 0.5, 1.0)))
    seed = numbers.integers(end=2**62) if 0.0 < p < 1.0 else None
    weights = draw(st.integers(0, 2)) == 2
    if lengths is not None and draw(st.booleans()) and k.numel() and v.numel():
        # Fill the padding with garbage.
        beyond = (torch.arange(s) >= lengths[:, None])[:, None, :, None]
        k = torch.where(beyond, numbers.one_of(math.nan, math.inf), k)
        v = torch.where(beyond, numbers.one_of(math.nan, -math.inf), v)
    q, k, v = (numbers.laid_out(x) for x in (q, k, v))
    if b > 1 and draw(st.integers(0, 7)) == 7:
        k, v = (x[:1].expand(x.shape) for x in (k, v))
        lengths = None
        if not bool(torch.isfinite(k).all() and torch.isfinite(v).all()):
            k, v = numbers.normal(*k.shape), numbers.normal(*v.shape)
    names: tuple[str, ...] = ()
    # If one key has almost all the weight, or values are equal, dP - delta is a difference of equal
    # terms, and rounding is all that remains of it: test_attention.py has limits for these calls.
    plain = kind in PLAIN_SCORES and values in ("normal", "small") and forms not in STEEP and s > 1
    if draw(st.booleans()) and plain and min(q.numel(), k.numel(), v.numel()) > 0:
        names = ("query", "key", "value")
        # An fp32 mask beside low-precision inputs has a gradient that is no more exact than the
        # scores. A mask that is constant along the keys has a gradient of 0. What is computed
        # instead is the rounding of terms as large as the values, a magnitude that no other
        # gradient shows.
        if mask is not None and mask.dtype == dtype and draw(st.booleans()) and mask.shape[-1] > 1:
            names = (*names, "attn_mask")
    gqa = group > 1
    query_lengths = numbers.integers(b, end=t + 1) if draw(st.integers(0, 5)) == 5 else None
    given = (q, k, v, mask, lengths, causal, scale, p, seed, gqa, weights, query_lengths)
    if draw(st.integers(0, 4)) == 4:
        softcap = draw(st.sampled_from((0.5, 5.0, 50.0)))
        return Drawn((*given, None, softcap), (), draw(st.integers(0, 3)))
    return Drawn(given, names, draw(st.integers(0, 3)))


def _small(draw: Any) -> list[tuple[Any, ...]]:
    qkv = draw.normal(2, 2, 3, 2), draw.normal(2, 2, 4, 2), draw.normal(2, 2, 4, 3)
    mask = draw.bools(2, 1, 3, 4, true=0.6)
    mask[0, 0, 1] = False  # a fully masked row
    hiding = draw.normal(1, 2, 3, 4)
    hiding[0, 0, 1, 2] = -math.inf
    options: Any = {"scale": -0.7, "dropout_p": 0.3, "seed": draw.seed()}
    grouped = (x[:, :1] for x in qkv[1:])
    return [
        arrange(*qkv, weights=True),
        arrange(*qkv, mask=mask, weights=True),
        arrange(*qkv, mask=mask, softcap=0.7),
        arrange(*qkv, mask=draw.normal(1, 2, 3, 4), causal=True),
        arrange(*qkv, lengths=torch.tensor([3, 0]), **options),
        _attention(1, 4, 3, 3, 2, key_heads=2)(draw),
        arrange(
            qkv[0], *grouped, mask=hiding, lengths=torch.tensor([4, 3]), gqa=True, weights=True,
            dropout_p=0.2, seed=draw.seed(),
        ),
    ]  # fmt: skip


def _large(draw: Any, heads: int = 5, queries: int = 900) -> list[tuple[Any, ...]]:
    return [
        _attention(1, 1, queries, 530, 24)(draw),
        _attention(1, 1, queries, 530, 24, causal=True)(draw),
        _attention(1, heads, 130, 300, 24)(draw),
        _attention(1, 7, 1, 700, 24)(draw),
    ]


def _swept(
    draw: Any, heads: int, queries: int, keys: int, size: int, value_size: int, **rest: Any
) -> tuple[Any, ...]:
    return _attention(1, heads, queries, keys, size, value_size=value_size, **rest)(draw)


# Calls for several tests --------------------------------------------------------------------------


def draw(dtype: torch.dtype = torch.float32) -> spec.Draw:
    return spec.Draw(dtype, "cpu", torch.Generator().manual_seed(0))


def tensors(
    queries: int,
    keys: int,
    size: int = 40,
    value_size: int | None = None,
    heads: int = 2,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    key_heads: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    d, h = draw(dtype), heads if key_heads is None else key_heads
    query, key = d.normal(batch, heads, queries, size), d.normal(batch, h, keys, size)
    return query, key, d.normal(batch, h, keys, size if value_size is None else value_size)


def options(
    queries: int, keys: int, dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, Any]]:
    """Returns keywords of `arrange` by name."""
    d = draw(dtype)
    seen = d.bools(2, 1, queries, keys, true=0.7)
    added = d.normal(1, 2, queries, keys).masked_fill(seen[:1] < 1, -math.inf)
    lengths = torch.tensor([keys - keys // 3, keys])
    return {
        "plain": {},
        "causal": {"causal": True},
        "lengths": {"lengths": lengths, "weights": True},
        "no keys": {"lengths": torch.tensor([0, keys])},
        "bool mask": {"mask": seen},
        "float mask": {"mask": added, "causal": True},
        "mask of keys": {"mask": seen[:, :, :1], "lengths": lengths},
        "added to keys": {"mask": added[:, :1, :1]},
        "mask of zeros": {"mask": torch.zeros(1, 1, 1, keys, dtype=dtype)},
        "weights": {"weights": True, "mask": seen, "causal": True},
        "dropout": {"dropout_p": 0.2, "seed": d.seed()},
        "weights behind dropout": {"dropout_p": 0.5, "seed": d.seed(), "weights": True},
    }


ROWS = {
    "attention": Row(
        bugs=_BUGS,
        sweeps={
            "queries": lambda draw, n: _swept(draw, 2, n, 21, 9, some(n)),
            "keys": lambda draw, n: _swept(draw, 2, 15, n, 9, 11),
            "keys, causal": lambda draw, n: _swept(draw, 2, 15, n, 9, 11, causal=True),
            "head size": lambda draw, n: _swept(draw, 2, 15, 21, n, 11),
            "value size": lambda draw, n: _swept(draw, 2, some(n), 21, 9, n),
            "queries and keys, causal": lambda draw, n: _swept(
                draw, 1, n, n, 9, some(n), causal=True
            ),
            "keys, weights": lambda draw, n: _swept(draw, 2, 15, n, 9, 11, weights=True),
            "keys, dropout": lambda draw, n: _swept(
                draw, 2, 15, n, 9, 11, weights=True, dropout_p=0.3
            ),
            "key lengths": lambda draw, n: _swept(
                draw, 2, 15, 521, 9, 11, lengths=lambda *_: torch.tensor([n])
            ),
            "key mask": lambda draw, n: _swept(
                draw, 2, 15, n, 9, 11, mask=lambda *_: draw.bools(1, 1, 1, n, true=0.7)
            ),
        },
        small=_small,
        large=_large,
        drawn=_drawn,
        sample="float mask and causal",
        # With NaN the kernel falls back to one query at a time. One query block fills all of its
        # scratch.
        filling=lambda draw: _large(draw, 2, 150),
    )
}
