"""Draws calls of ops that ordinary tests do not think of; each is a function of what is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from definitions import near_a_kink
from fuzz_checks import ISAS, exact
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALL = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17)
MIDDLE = (31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 97)
LARGE = (127, 128, 129, 191, 255, 257, 300, 383, 511, 513)
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Drawn(NamedTuple):
    """A call of an op, and of which arguments gradients are checked (none: not at all)."""

    arguments: tuple[Any, ...]
    names: tuple[str, ...]
    offset: int

    def __repr__(self) -> str:
        """Shapes in place of elements: hypothesis warns of a long text, and that hides what failed."""
        told = [
            f"{str(one.dtype)[6:]}{list(one.shape)}" if isinstance(one, Tensor) else repr(one)
            for one in self.arguments
        ]
        return f"Drawn({', '.join(told)}; gradients of {self.names}, offset {self.offset})"


def sizes(*groups: tuple[int, ...]) -> st.SearchStrategy[int]:
    """One of the sizes: small ones more often than middle ones, and so on."""
    return st.one_of(*(st.sampled_from(group) for group in groups))


def kinds(table: dict[str, int]) -> st.SearchStrategy[str]:
    """A key, as often as its weight says."""
    return st.sampled_from([name for name, weight in table.items() for _ in range(weight)])


class Numbers:
    """Tensors of a dtype from a seed, in values and in strides that are drawn."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return (drawn * scale + shift).to(self.dtype)

    def integers(self, *shape: int, end: int) -> Tensor:
        return torch.randint(0, max(1, end), shape, generator=self.generator)

    def bools(self, *shape: int, true: float = 0.5) -> Tensor:
        return torch.rand(shape, generator=self.generator) < true

    def one_of(self, *choices: Any) -> Any:
        return choices[int(torch.randint(0, len(choices), (), generator=self.generator))]


LAYOUTS = {"contiguous": 6, "transposed": 1, "steps": 1, "wide rows": 1, "flipped": 1, "negated": 1}


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in other strides."""
    if x.dim() == 0 or layout == "contiguous":
        return x
    if layout == "transposed" and x.dim() >= 2:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "steps":
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), math.nan, dtype=x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if layout == "wide rows":
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 3), math.nan, dtype=x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    if layout == "flipped" and x.dim() >= 2:
        # Dimensions in the opposite order in memory.
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)
    if layout == "negated":
        return torch._neg_view(-x)
    return x


VALUES = {"normal": 6, "small": 1, "large": 1, "equal rows": 1, "zeros": 1, "far": 1, "sparse": 1}
# Not for bfloat16: the processor's own conversion to it (vcvtneps2bf16) makes them 0.
DENORMAL = {**VALUES, "denormal": 1}


def valued(numbers: Numbers, kind: str, *shape: int) -> Tensor:
    """Values of a kind; what a sum of a few hundred of them squared still holds in the dtype."""
    half = numbers.dtype == torch.float16
    if kind == "small":
        return numbers.normal(*shape, scale=1e-4 if half else 1e-12)
    if kind == "large":
        return numbers.normal(*shape, scale=30.0 if half else 1e4)
    if kind == "denormal":
        return numbers.normal(*shape, scale=1e-6 if half else 1e-40)
    if kind == "zeros":
        return torch.zeros(shape, dtype=numbers.dtype)
    if kind == "far":
        return numbers.normal(*shape, shift=100.0)
    x = numbers.normal(*shape)
    if kind == "equal rows" and x.dim() >= 2:
        return x[..., :1, :].expand(shape).clone()
    if kind == "sparse":
        return torch.where(numbers.bools(*shape, true=0.1), x, 0.0)
    return x


def leading(draw: Draw, most: int) -> tuple[int, ...]:
    """Leading dimensions of at most so many elements."""
    shape = draw(
        st.sampled_from(
            [
                (1,),
                (3,),
                (2, 3),
                (),
                (7,),
                (16,),
                (17,),
                (0,),
                (64,),
                (73,),
                (2, 0, 3),
                (1, 1, 5),
                (129,),
                (150,),
                (8, 20),
            ]
        )
    )
    return shape if math.prod(shape) <= most else (3,)


# Ops -------------------------------------------------------------------------------------------


@st.composite
def norms(draw: Draw, dtype: torch.dtype, add: bool, is_rms: bool) -> Drawn:
    numbers = Numbers(dtype, draw(st.integers(0, 2**32)))
    columns = draw(sizes(SMALL, MIDDLE, LARGE, (0, 768, 1000, 1025)))
    lead = leading(draw, 60_000 // max(1, columns))
    shape: tuple[int, ...] = (columns,)
    if draw(st.integers(0, 5)) == 5 and columns:
        shape = (2, columns)
    x = valued(numbers, draw(kinds(VALUES if dtype == torch.bfloat16 else DENORMAL)), *lead, *shape)
    eps = draw(st.sampled_from((1e-5, 1e-6, 1e-12, 0.1)))
    weight = bias = None
    if draw(st.booleans()):
        weight = laid_out(numbers.normal(*shape), draw(kinds(LAYOUTS)))
    if not is_rms and draw(st.booleans()):
        bias = numbers.normal(*shape)
    biased = () if is_rms else (bias,)
    x = laid_out(x, draw(kinds(LAYOUTS)))
    offset, grads = draw(st.integers(0, 3)), draw(st.booleans())
    if not add:
        given: tuple[Any, ...] = (x, shape, weight, *biased, eps)
        names: tuple[str, ...] = ("input", "weight", "bias")
    else:
        p = draw(st.sampled_from((0.0, 0.0, 0.1, 0.5, 0.9, 1.0)))
        seed = numbers.integers(end=2**62) if 0.0 < p < 1.0 else None
        residual = laid_out(valued(numbers, draw(kinds(VALUES)), *x.shape), draw(kinds(LAYOUTS)))
        given = (x, residual, shape, weight, *biased, eps, p, seed)
        names = ("input", "residual", "weight", "bias")
    names = tuple(name for name in names if not (is_rms and name == "bias"))
    return Drawn(given, names if grads and x.numel() else (), offset)


#: How far fp32 sums may be off, in units of the sum of the sizes of what is summed.
KINK = 1e-5
ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")


@st.composite
def linears(draw: Draw, dtype: torch.dtype) -> Drawn:
    numbers = Numbers(dtype, draw(st.integers(0, 2**32)))
    k = draw(sizes(SMALL, MIDDLE, (0, 127, 129, 257, 300, 513)))
    n = draw(sizes(SMALL, MIDDLE, (0, 127, 129, 257, 300)))
    lead = leading(draw, 4_000_000 // max(1, k * n))
    # Pieces of denormal numbers are 0 in AMX's products (docs/guides/backends.md).
    flushed = dtype == torch.bfloat16 or (dtype == torch.float32 and "amx" in ISAS)
    x = valued(numbers, draw(kinds(VALUES if flushed else DENORMAL)), *lead, k)
    weight = valued(numbers, draw(kinds(VALUES)), n, k)
    weight = weight / math.sqrt(max(1, k)) if dtype == torch.float16 else weight
    bias = numbers.normal(n) if draw(st.booleans()) else None
    act = draw(st.sampled_from(ACTIVATIONS))
    residual = numbers.normal(*lead, n) if draw(st.booleans()) else None
    grads = draw(st.booleans()) and x.numel() > 0 and n > 0
    if grads and act == "relu":
        grads = not near_a_kink(exact(x), exact(weight), exact(bias), KINK)
    x, weight = laid_out(x, draw(kinds(LAYOUTS))), laid_out(weight, draw(kinds(LAYOUTS)))
    if residual is not None:
        residual = laid_out(residual, draw(kinds(LAYOUTS)))
    names = ("input", "weight", "bias", "residual") if grads else ()
    return Drawn((x, weight, bias, act, residual), names, draw(st.integers(0, 3)))


@st.composite
def feed_forwards(draw: Draw, dtype: torch.dtype) -> Drawn:
    numbers = Numbers(dtype, draw(st.integers(0, 2**32)))
    m = draw(sizes(SMALL, MIDDLE, (0, 127, 129)))
    f = draw(sizes(SMALL, MIDDLE, (0, 127, 129, 257)))
    out = m if draw(st.booleans()) else draw(sizes(SMALL, MIDDLE))
    lead = leading(draw, 2_000_000 // max(1, f * (m + out)))
    x = valued(numbers, draw(kinds(VALUES)), *lead, m)
    weight1 = numbers.normal(f, m, scale=1.0 / math.sqrt(max(1, m)))
    weight2 = numbers.normal(out, f, scale=1.0 / math.sqrt(max(1, f)))
    bias1 = numbers.normal(f) if draw(st.booleans()) else None
    bias2 = numbers.normal(out) if draw(st.booleans()) else None
    act = draw(st.sampled_from(ACTIVATIONS[1:]))
    p = draw(st.sampled_from((0.0, 0.0, 0.1, 0.5, 1.0)))
    seed = numbers.integers(end=2**62) if 0.0 < p < 1.0 else None
    grads = draw(st.booleans()) and x.numel() > 0 and f > 0
    if grads and act == "relu":
        grads = not near_a_kink(exact(x), exact(weight1), exact(bias1), KINK)
    x = laid_out(x, draw(kinds(LAYOUTS)))
    weight1, weight2 = (
        laid_out(weight1, draw(kinds(LAYOUTS))),
        laid_out(weight2, draw(kinds(LAYOUTS))),
    )
    names = ("input", "weight1", "bias1", "weight2", "bias2") if grads else ()
    return Drawn((x, weight1, bias1, weight2, bias2, act, p, seed), names, draw(st.integers(0, 3)))


@st.composite
def cross_entropies(draw: Draw, dtype: torch.dtype, with_linear: bool) -> Drawn:
    numbers = Numbers(dtype, draw(st.integers(0, 2**32)))
    rows = draw(sizes((0, *SMALL), (31, 33, 64, 100)))
    classes = draw(sizes(SMALL, MIDDLE, LARGE, (1000, 1025)))
    ignored = draw(st.sampled_from((-100, 0, 1)))
    smoothing = draw(st.sampled_from((0.0, 0.0, 0.1, 1.0)))
    target = numbers.integers(rows, end=classes)
    if draw(st.booleans()):
        target = torch.where(numbers.bools(rows, true=0.3), ignored, target)
    grads = draw(st.booleans()) and rows > 0
    kind = draw(kinds({**VALUES, "scores": 3, "hidden": 1}))
    if with_linear:
        k = draw(sizes(SMALL, MIDDLE))
        x = valued(numbers, kind if kind in VALUES and kind != "large" else "normal", rows, k)
        weight = numbers.normal(classes, k, scale=draw(st.sampled_from((0.2, 1.0, 3.0))))
        bias = numbers.normal(classes) if draw(st.booleans()) else None
        x, weight = laid_out(x, draw(kinds(LAYOUTS))), laid_out(weight, draw(kinds(LAYOUTS)))
        given: tuple[Any, ...] = (x, weight, bias, target, ignored, smoothing)
        return Drawn(given, ("input", "weight", "bias") if grads else (), draw(st.integers(0, 3)))
    if kind == "scores":
        x = numbers.normal(rows, classes, scale=draw(st.sampled_from((30.0, 100.0, 300.0, 5e3))))
    elif kind == "hidden":
        # Some classes are impossible; the target never is.
        x = numbers.normal(rows, classes)
        x = torch.where(numbers.bools(rows, classes, true=0.3), -math.inf, x)
        real = target.clamp(0, classes - 1)
        x.scatter_(1, real[:, None], 0.5)
        smoothing = 0.0
    else:
        x = valued(numbers, kind, rows, classes)
    if draw(st.booleans()) and rows:
        x = torch.where((target == ignored)[:, None], numbers.one_of(math.nan, math.inf), x)
    x = laid_out(x, draw(kinds(LAYOUTS)))
    if x.stride()[-1:] == (0,):
        x = x.contiguous()
    given = (x, target, ignored, smoothing)
    return Drawn(given, ("input",) if grads else (), draw(st.integers(0, 3)))


# Attention -------------------------------------------------------------------------------------

#: Shapes of masks over (B, H, T, S): which dimensions are not 1.
MASK_SHAPES = ("BHTS", "TS", "BS", "BT", "HS", "HTS", "S", "B", "T", "BHS", "BTS")
BOOL_MASKS = ("random", "dense", "sparse", "all", "nothing", "empty rows", "blocks")
FLOAT_MASKS = ("normal", "hiding", "lowest", "zeros", "float of a bool", "large", "alibi", "rising")
FLOAT_MASKS += ("steep",)


def mask_of(numbers: Numbers, kind: str, shape: str, b: int, h: int, t: int, s: int) -> Tensor:
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
def attentions(draw: Draw, dtype: torch.dtype) -> Drawn:
    numbers = Numbers(dtype, draw(st.integers(0, 2**32)))
    t = draw(sizes(SMALL, MIDDLE, (0, 1, 4, 5, 127, 129, 257)))
    s = draw(sizes(SMALL, MIDDLE, LARGE, (0, 1)))
    d = draw(
        sizes((1, 2, 3, 7, 8, 16, 17), (24, 31, 32, 33, 48, 64, 64, 64), (0, 65, 80, 128, 131))
    )
    dv = d if draw(st.integers(0, 3)) else draw(sizes((1, 3, 8, 16, 31), (33, 64, 0)))
    b, kv_heads, group = draw(
        st.sampled_from(
            [
                (1, 1, 1),
                (1, 2, 1),
                (2, 2, 1),
                (3, 1, 1),
                (2, 1, 3),
                (1, 2, 2),
                (2, 3, 1),
                (0, 2, 1),
                (2, 0, 1),
                (1, 1, 8),
            ]
        )
    )
    h = kv_heads * group
    work = max(1, b * h * t * s * (d + dv))
    if work > 1_000_000:
        t = max(1, min(t, 1_000_000 // max(1, b * h * s * (d + dv))))
    kind = draw(kinds(SCORES))
    values = draw(kinds({"normal": 5, "small": 1, "large": 1, "far": 1, "equal rows": 1}))
    scale = draw(st.sampled_from((None, None, None, 0.3, 0.0, -0.5)))
    q, k = numbers.normal(b, h, t, d), numbers.normal(b, kv_heads, s, d)
    v = valued(numbers, values, b, kv_heads, s, dv)
    if kind.startswith("std"):
        q = q * float(kind[4:])
    elif kind == "rising keys":
        # Scores grow along the keys, so that the first block of them has the smallest.
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
        k = valued(numbers, "denormal", *k.shape)
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
            mask = laid_out(mask, draw(st.sampled_from(("transposed", "flipped", "contiguous"))))
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
        # Garbage behind the real keys.
        beyond = (torch.arange(s) >= lengths[:, None])[:, None, :, None]
        k = torch.where(beyond, numbers.one_of(math.nan, math.inf), k)
        v = torch.where(beyond, numbers.one_of(math.nan, -math.inf), v)
    q, k, v = (laid_out(x, draw(kinds(LAYOUTS))) for x in (q, k, v))
    if b > 1 and draw(st.integers(0, 7)) == 7:
        k, v = (x[:1].expand(x.shape) for x in (k, v))
        lengths = None
        if not bool(torch.isfinite(k).all() and torch.isfinite(v).all()):
            k, v = numbers.normal(*k.shape), numbers.normal(*v.shape)
    names: tuple[str, ...] = ()
    if draw(st.booleans()) and min(q.numel(), k.numel(), v.numel()) > 0:
        names = ("query", "key", "value")
        # A mask in fp32 over half types has the gradient of scores that are no more exact than they.
        # What is added to all of a row's scores changes nothing: its gradient is 0, and what comes
        # out is the rounding of terms as large as the values, of which no other gradient tells.
        if mask is not None and mask.dtype == dtype and draw(st.booleans()) and mask.shape[-1] > 1:
            names = (*names, "attn_mask")
    gqa = group > 1
    query_lengths = numbers.integers(b, end=t + 1) if draw(st.integers(0, 5)) == 5 else None
    given = (q, k, v, mask, lengths, causal, scale, p, seed, gqa, weights, query_lengths)
    return Drawn(given, names, draw(st.integers(0, 3)))


STRATEGIES: dict[str, Callable[[torch.dtype], st.SearchStrategy[Drawn]]] = {
    "layer_norm": lambda dtype: norms(dtype, False, False),
    "add_layer_norm": lambda dtype: norms(dtype, True, False),
    "rms_norm": lambda dtype: norms(dtype, False, True),
    "add_rms_norm": lambda dtype: norms(dtype, True, True),
    "attention": attentions,
    "linear": linears,
    "feed_forward": feed_forwards,
    "cross_entropy": lambda dtype: cross_entropies(dtype, False),
    "linear_cross_entropy": lambda dtype: cross_entropies(dtype, True),
}
