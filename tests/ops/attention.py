"""Test data of attention; see `Row`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from transformer_fast.specs import OPS, spec
from transformer_fast.specs.attention import _attention, arrange
from transformer_fast.testing import upstream

from . import LARGE, MIDDLE, SMALL, Array, Drawing, Drawn, Grads, Row, kept, size_of, some, wrong


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


def defined(
    q: Array, k: Array, v: Array, mask: Any, lengths: Any, causal: bool, scale: float | None,
    p: float, seed: int | None, gqa: bool, need_weights: bool,
    query_lengths: Any = None, longest: Any = None, softcap: float | None = None,
) -> tuple[tuple[Array, Array | None], Callable[[Array, Array | None], Grads]]:  # fmt: skip
    """Returns (output, weights after dropout), and the function that takes the gradients of both."""
    batch, heads, queries, size = q.shape
    keys, value_size = k.shape[2], v.shape[3]
    group = heads // k.shape[1] if gqa and k.shape[1] else 1
    if scale is None:
        scale = 1.0 / math.sqrt(size) if size else 1.0
    added = None
    sees = np.ones((batch, heads, queries, keys), bool)
    if mask is not None:
        full = np.broadcast_to(mask, sees.shape)
        if mask.dtype == bool:
            sees &= full
        else:
            added = full
            sees &= full != -np.inf
    if causal:
        sees &= np.arange(keys)[None, :] <= np.arange(queries)[:, None]
    if lengths is not None:
        sees &= np.arange(keys)[None, None, None, :] < lengths[:, None, None, None]
    if query_lengths is not None:
        sees &= np.arange(queries)[None, None, :, None] < query_lengths[:, None, None, None]
    weights, slope = np.zeros(sees.shape), np.ones(sees.shape)
    output = np.zeros((batch, heads, queries, value_size))
    factor = kept(sees.shape, p, seed)
    for b in range(batch):
        for h in range(heads):
            here = sees[b, h]
            any_visible = here.any(axis=1, keepdims=True)
            with np.errstate(invalid="ignore", over="ignore"):
                s = (q[b, h] * scale) @ k[b, h // group].T
                if softcap is not None:
                    s = np.tanh(s / softcap)
                    slope[b, h] = 1.0 - s * s
                    s = s * softcap
                if added is not None:
                    s = s + added[b, h]
            s = np.where(here, s, -np.inf)
            top = np.max(s, axis=1, keepdims=True, initial=-np.inf)
            with np.errstate(invalid="ignore"):
                e = np.where(here, np.exp(s - np.where(any_visible, top, 0.0)), 0.0)
            total = e.sum(axis=1, keepdims=True)
            weights[b, h] = e / np.where(any_visible, total, 1.0)
            output[b, h] = _weighted(weights[b, h] * factor[b, h], v[b, h // group], here)

    def back(
        doutput: Array, dweights: Array | None,
        rounded: tuple[Array, Array | None, Any, Callable[[Array], Array]] | None = None,
    ) -> Grads:  # fmt: skip
        """Gradients of the arguments.

        ``rounded``: (output, weights, order, rounding). dP and the weighted mean of its rows are
        then computed in fp32, from these results and in this order of the value's channels, as in
        Dao et al. 2022. ``rounding`` is applied to P and dS where they are factors of matrix
        products.
        """
        dq, dk, dv = np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape)
        ds = np.zeros(sees.shape)
        for b in range(batch):
            for h in range(heads):
                g, here = h // group, sees[b, h]
                clean_k = np.where(here.any(axis=0)[:, None], k[b, g], 0.0)
                clean_v = np.where(here.any(axis=0)[:, None], v[b, g], 0.0)
                dp = doutput[b, h] @ clean_v.T
                if dweights is not None:
                    dp = dp + dweights[b, h]
                dp = dp * factor[b, h]
                w = weights[b, h]
                mean = (w * dp).sum(axis=1, keepdims=True)
                if rounded is not None:
                    dp, mean = _slopes(doutput[b, h], clean_v, rounded[0][b, h], rounded[2])
                    if dweights is not None and rounded[1] is not None:
                        dp = dp + dweights[b, h]
                        mean = mean + (dweights[b, h] * rounded[1][b, h]).sum(axis=1, keepdims=True)
                    dp = dp * factor[b, h]
                ds[b, h] = w * (dp - mean)
                inner = np.where(here, ds[b, h] * slope[b, h], 0.0)
                dropped = w * factor[b, h]
                if rounded is not None:
                    ds[b, h], dropped = rounded[3](ds[b, h]), rounded[3](dropped)
                    inner = ds[b, h]
                clean_q = np.where(here.any(axis=1)[:, None], q[b, h], 0.0)
                dq[b, h] = scale * inner @ clean_k
                dk[b, g] += scale * inner.T @ clean_q
                dv[b, g] += dropped.T @ doutput[b, h]
        dmask = None
        if added is not None:
            axes = tuple(i for i, n in enumerate(mask.shape) if n == 1)
            dmask = ds.sum(axis=axes, keepdims=True)
        return {"query": dq, "key": dk, "value": dv, "attn_mask": dmask}

    return (output, weights * factor if need_weights else None), back


def _slopes(doutput: Array, values: Array, output: Array, order: Any) -> tuple[Array, Array]:
    """Returns dO V^T and, per row, dO O, summed in fp32 in the given order of channels."""
    do, v, o = (x[:, order].astype(np.float32) for x in (doutput, values, output))
    return (do @ v.T).astype(np.float64), (do * o).sum(axis=1, keepdims=True).astype(np.float64)


def _weighted(weights: Array, values: Array, sees: Any) -> Array:
    """Returns weights @ values, where each row sums only the values that it may see."""
    wild = np.flatnonzero(~np.isfinite(values).all(axis=1))
    result: Array = weights @ np.where(np.isfinite(values), values, 0.0)
    for key in wild:
        seen = sees[:, key]
        bad = np.where(np.isfinite(values[key]), 0.0, values[key])
        with np.errstate(invalid="ignore"):
            result[seen] += weights[seen, key, None] * bad[None, :]
    return result


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
    mask = None
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
    if draw(st.booleans()) and min(q.numel(), k.numel(), v.numel()) > 0:
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


def _in_order(
    orders: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, lengths: Any, causal: bool,
    scale: Any, p: float, seed: Any, *rest: Any,
) -> Any:  # fmt: skip
    of_scores, of_values = orders.order(q.shape[-1]), orders.order(v.shape[-1])
    if orders.seed % 2 and q.dtype == torch.float32 and q.shape[-1]:
        # Some kernels scale the queries, some the scores; neither way is exact.
        q, scale = q * (q.shape[-1] ** -0.5 if scale is None else scale), 1.0
    places = lengths is not None or causal or seed is not None
    of_keys = orders.order(k.shape[-2], fixed=places)
    if mask is not None and mask.dim() and mask.shape[-1] > 1:
        mask = mask[..., of_keys]
    output, weights = orders.reference(
        q[..., of_scores], k[..., of_keys, :][..., of_scores], v[..., of_keys, :][..., of_values],
        mask, lengths, causal, scale, p, seed, *rest,
    )  # fmt: skip
    if weights is not None:
        weights = weights[..., of_keys.argsort()]
    return output[..., of_values.argsort()], weights


def _slope_terms(arguments: tuple[Any, ...]) -> float:
    """Returns the largest |scale| |K| sum(|dO| |V|), or the same with Q or 1 in place of scale K.

    dQ is a sum of P (dO V - dO O) K, of differences of such terms, which vanish if keys are equal. A
    mask's gradient is a sum of P (dO V - dO O).
    """
    named = OPS["attention"].named(arguments)
    query, key, value = (size_of(named[name].double()) for name in ("query", "key", "value"))
    shape = (*named["query"].shape[:-1], named["value"].shape[-1])
    start = upstream(torch.empty(shape, dtype=named["query"].dtype), 0).double()
    channels = named["query"].shape[-1]
    scale = named["scale"]
    scale = 1.0 / math.sqrt(max(1, channels)) if scale is None else abs(scale)
    slopes = value * size_of(start.abs().sum(dim=-1))
    return float(max(scale * max(query, key), named["attn_mask"] is not None) * slopes)


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
        defined=defined,
        in_order=_in_order,
        sample="float mask and causal",
        # With NaN the kernel falls back to one query at a time. One query block fills all of its
        # scratch.
        filling=lambda draw: _large(draw, 2, 150),
        gradient_terms=_slope_terms,
    )
}
