"""The ops from their definitions, in NumPy and fp64: the oracle of the fuzz tests.

It shares no code with the package. Every function returns its results and a function that takes
the gradients of the results and returns those of the arguments, worked out by hand; that they are
the derivatives is tested by differences (test_fuzz_oracle.py). What stands at places that nothing
may see is not computed with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Gradients = dict[str, "Array | None"]

# Random numbers --------------------------------------------------------------------------------


def philox(key: tuple[int, int], counter: Array) -> Array:
    """Philox4x32-10 of counters (..., 4), as Salmon et al. 2011 define it."""
    words = [counter[..., i].astype(np.uint64) for i in range(4)]
    low32 = np.uint64(0xFFFFFFFF)
    for turn in range(10):
        k = [np.uint64((key[i] + turn * w) % 2**32) for i, w in enumerate((0x9E3779B9, 0xBB67AE85))]
        one = words[0] * np.uint64(0xD2511F53)
        two = words[2] * np.uint64(0xCD9E8D57)
        words = [
            (two >> np.uint64(32)) ^ words[1] ^ k[0],
            two & low32,
            (one >> np.uint64(32)) ^ words[3] ^ k[1],
            one & low32,
        ]
    return np.stack(words, axis=-1)


def kept(shape: tuple[int, ...], p: float, seed: int | None) -> Array:
    """What dropout multiplies by: 0 or 1 / (1 - p) for each element."""
    if p == 0.0:
        return np.ones(shape)
    if p == 1.0:
        return np.zeros(shape)
    assert seed is not None
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    counter = np.zeros((rows, -(-columns // 8), 4), np.uint64)
    counter[..., 0] = np.arange(counter.shape[1])[None, :]
    counter[..., 1] = (np.arange(rows) % 2**32)[:, None]
    counter[..., 2] = (np.arange(rows) // 2**32)[:, None]
    words = philox((seed % 2**32, (seed >> 32) % 2**32), counter)
    numbers = np.stack([words % 2**16, words // 2**16], axis=-1)
    numbers = numbers.reshape(rows, 8 * counter.shape[1])[:, :columns]
    stays = numbers >= min(max(math.floor(p * 65536 + 0.5), 1), 65535)
    return (stays / (1.0 - p)).reshape(shape)


# Normalisation ---------------------------------------------------------------------------------


def layer_norm(
    x: Array,
    shape: tuple[int, ...],
    weight: Array | None,
    bias: Array | None,
    eps: float,
    centre: bool = True,
) -> tuple[Array, Callable[[Array], Gradients]]:
    size = math.prod(shape)
    rows = math.prod(x.shape[: x.ndim - len(shape)])
    w = np.ones(size) if weight is None else weight.reshape(size)
    flat = x.reshape(rows, size)
    centred, normal, scale = np.zeros((rows, size)), np.zeros((rows, size)), np.zeros((rows, 1))
    if size:
        # Twice: the rounding of the mean of large values is as large as what is left of them.
        centred = flat
        for _ in range(2 * centre):
            centred = centred - centred.mean(axis=1, keepdims=True)
        scale = 1.0 / np.sqrt((centred**2).mean(axis=1, keepdims=True) + eps)
        normal = centred * scale
    y = normal * w + (0.0 if bias is None else bias.reshape(size))

    def back(dy: Array) -> Gradients:
        d = dy.reshape(rows, size)
        g = d * w
        dx = g
        if size:
            along = (g * normal).mean(axis=1, keepdims=True)
            dx = scale * (g - centre * g.mean(axis=1, keepdims=True) - normal * along)
        return {
            "input": dx.reshape(x.shape),
            "weight": None if weight is None else (d * normal).sum(axis=0).reshape(shape),
            "bias": None if bias is None else d.sum(axis=0).reshape(shape),
        }

    return y.reshape(x.shape), back


def rms_norm(
    x: Array, shape: tuple[int, ...], weight: Array | None, eps: float
) -> tuple[Array, Callable[[Array], Gradients]]:
    return layer_norm(x, shape, weight, None, eps, centre=False)


def add_rms_norm(
    x: Array, residual: Array, shape: tuple[int, ...], weight: Array | None, *rest: Any
) -> tuple[tuple[Array, Array], Callable[[Array, Array], Gradients]]:
    return add_layer_norm(x, residual, shape, weight, None, *rest, centre=False)


def add_layer_norm(
    x: Array, residual: Array, shape: tuple[int, ...], weight: Array | None, bias: Array | None,
    eps: float, p: float, seed: int | None, centre: bool = True,
) -> tuple[tuple[Array, Array], Callable[[Array, Array], Gradients]]:  # fmt: skip
    factor = kept(x.shape, p, seed)
    total = residual + x * factor
    y, back_of_norm = layer_norm(total, shape, weight, bias, eps, centre)

    def back(dy: Array, dtotal: Array) -> Gradients:
        found = back_of_norm(dy)
        d = found["input"] + dtotal
        return {**found, "input": d * factor, "residual": d}

    return (y, total), back


# Products --------------------------------------------------------------------------------------

_erf = np.frompyfunc(math.erf, 1, 1)
_erfc = np.frompyfunc(math.erfc, 1, 1)


def activation(name: str | None, z: Array) -> tuple[Array, Array]:
    """act(z) and its slope."""
    if name is None:
        return z, np.ones_like(z)
    if name == "relu":
        return np.where(z > 0, z, np.where(np.isnan(z), z, 0.0)), (z > 0) * 1.0
    if name == "silu":
        s = np.where(z < 0, np.exp(np.minimum(z, 0)), 1.0) / (1.0 + np.exp(-np.abs(z)))
        return z * s, s * (1.0 + z * (1.0 - s))
    if name == "gelu":
        cdf = 0.5 * np.asarray(_erfc(-z / math.sqrt(2.0)), np.float64).reshape(z.shape)
        return z * cdf, cdf + z * np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    assert name == "gelu_tanh"
    k = math.sqrt(2.0 / math.pi)
    # 1 + tanh(u) is 2 / (1 + e^-2u), which does not cancel.
    with np.errstate(over="ignore"):
        s = 1.0 / (1.0 + np.exp(-2.0 * k * (z + 0.044715 * z**3)))
    return z * s, s + 2.0 * z * s * (1.0 - s) * k * (1.0 + 3 * 0.044715 * z * z)


def linear(
    x: Array, weight: Array, bias: Array | None, act: str | None = None,
    residual: Array | None = None,
) -> tuple[Array, Callable[[Array], Gradients]]:  # fmt: skip
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    z = rows @ weight.T + (0.0 if bias is None else bias)
    y, slope = activation(act, z)
    result = y.reshape(*x.shape[:-1], weight.shape[0])

    def back(dy: Array) -> Gradients:
        dz = dy.reshape(z.shape) * slope
        return {
            "input": (dz @ weight).reshape(x.shape),
            "weight": dz.T @ rows,
            "bias": None if bias is None else dz.sum(axis=0),
            "residual": None if residual is None else dy,
        }

    return result if residual is None else result + residual, back


def feed_forward(
    x: Array, weight1: Array, bias1: Array | None, weight2: Array, bias2: Array | None,
    act: str, p: float, seed: int | None,
) -> tuple[Array, Callable[[Array], Gradients]]:  # fmt: skip
    hidden, back1 = linear(x, weight1, bias1, act)
    factor = kept(hidden.shape, p, seed)
    y, back2 = linear(hidden * factor, weight2, bias2)

    def back(dy: Array) -> Gradients:
        second = back2(dy)
        first = back1(second["input"] * factor)
        return {
            "input": first["input"],
            "weight1": first["weight"],
            "bias1": first["bias"],
            "weight2": second["weight"],
            "bias2": second["bias"],
        }

    return y, back


def near_a_kink(x: Array, weight: Array, bias: Array | None, by: float) -> bool:
    """Whether rounding may change the sign of a product, where the slope of ReLU jumps."""
    rows = x.reshape(-1, x.shape[-1])
    z = rows @ weight.T + (0.0 if bias is None else bias)
    size = np.abs(rows) @ np.abs(weight).T + (0.0 if bias is None else np.abs(bias))
    return bool(((np.abs(z) <= by * size) & (size > 0)).any())


# Attention -------------------------------------------------------------------------------------


def attention(
    q: Array, k: Array, v: Array, mask: Any, lengths: Any, causal: bool, scale: float | None,
    p: float, seed: int | None, gqa: bool, query_lengths: Any = None,
) -> tuple[tuple[Array, Array], Callable[[Array, Array | None], Gradients]]:  # fmt: skip
    """(output, weights after dropout); the function takes the gradients of both."""
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
    weights = np.zeros(sees.shape)
    output = np.zeros((batch, heads, queries, value_size))
    factor = kept(sees.shape, p, seed)
    for b in range(batch):
        for h in range(heads):
            here = sees[b, h]
            any_visible = here.any(axis=1, keepdims=True)
            with np.errstate(invalid="ignore", over="ignore"):
                s = (q[b, h] * scale) @ k[b, h // group].T
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
    ) -> Gradients:  # fmt: skip
        """``rounded``: results, and an order of the value's channels: the slopes and their weighted
        mean are to be taken from these in fp32, as Dao et al. 2022 do. And what becomes of P and dS
        as factors of matrix units.
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
                dropped = w * factor[b, h]
                if rounded is not None:
                    ds[b, h], dropped = rounded[3](ds[b, h]), rounded[3](dropped)
                clean_q = np.where(here.any(axis=1)[:, None], q[b, h], 0.0)
                dq[b, h] = scale * ds[b, h] @ clean_k
                dk[b, g] += scale * ds[b, h].T @ clean_q
                dv[b, g] += dropped.T @ doutput[b, h]
        dmask = None
        if added is not None:
            axes = tuple(i for i, n in enumerate(mask.shape) if n == 1)
            dmask = ds.sum(axis=axes, keepdims=True)
        return {"query": dq, "key": dk, "value": dv, "attn_mask": dmask}

    return (output, weights * factor), back


def _slopes(doutput: Array, values: Array, output: Array, order: Any) -> tuple[Array, Array]:
    """dO V^T and, for each row, dO O, summed up in fp32 in an order of their terms."""
    do, v, o = (x[:, order].astype(np.float32) for x in (doutput, values, output))
    return (do @ v.T).astype(np.float64), (do * o).sum(axis=1, keepdims=True).astype(np.float64)


def _weighted(weights: Array, values: Array, sees: Any) -> Array:
    """weights @ values, of each row over the values that it sees only."""
    wild = np.flatnonzero(~np.isfinite(values).all(axis=1))
    result: Array = weights @ np.where(np.isfinite(values), values, 0.0)
    for key in wild:
        seen = sees[:, key]
        bad = np.where(np.isfinite(values[key]), 0.0, values[key])
        with np.errstate(invalid="ignore"):
            result[seen] += weights[seen, key, None] * bad[None, :]
    return result


# Losses ----------------------------------------------------------------------------------------


def cross_entropy(
    x: Array, target: Any, ignored: int, smoothing: float
) -> tuple[Array, Callable[..., Gradients]]:
    """The function takes the losses' gradient, and a unit by which log p, and p, may be off."""
    rows, classes = x.shape
    losses, probable = np.zeros(rows), np.full((rows, classes), -np.inf)
    wanted = np.zeros((rows, classes))
    for row in range(rows):
        if target[row] == ignored:
            continue
        line, place = x[row], int(target[row])
        with np.errstate(invalid="ignore"):
            top = line.max()
            log_p = line - top - np.log(np.exp(line - top).sum())
            losses[row] = -log_p[place]
            if smoothing:
                losses[row] = (1 - smoothing) * -log_p[place] - smoothing * log_p.mean()
            probable[row], wanted[row] = log_p, smoothing / classes
        wanted[row, place] += 1 - smoothing

    def back(dl: Array, unit: float = 0.0) -> Gradients:
        p = np.exp(probable)
        with np.errstate(invalid="ignore"):
            off = np.where(p > 0.0, p * unit * np.maximum(1.0, -probable), 0.0)
        return {"input": (p + off - wanted) * dl[:, None]}

    return losses, back


def linear_cross_entropy(
    x: Array, weight: Array, bias: Array | None, target: Any, ignored: int, smoothing: float
) -> tuple[Array, Callable[[Array], Gradients]]:
    logits, back_of_linear = linear(x, weight, bias)
    losses, back_of_loss = cross_entropy(logits, target, ignored, smoothing)

    def back(dl: Array, unit: float = 0.0) -> Gradients:
        return back_of_linear(back_of_loss(dl, unit)["input"])  # type: ignore[arg-type]

    return losses, back


# Layers ----------------------------------------------------------------------------------------

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
        y, back_of_part = linear(source, weight[rows], None if bias is None else bias[rows])
        results.append(_heads(y, heads))
        backs.append(back_of_part)
    (o, _), back_of_attention = attention(*results, mask, None, causal, None, 0.0, None, False)
    y, back_of_out = linear(_merged(o), out_weight, out_bias)

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
        y, back_of_network = feed_forward(x, *weights, act, 0.0, None)  # type: ignore[arg-type]

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
            entered, back_of_norm = layer_norm(x, (x.shape[2],), w, b, eps)
            y, back_of_step = step(entered)
            x = x + y
        else:
            y, back_of_step = step(x)
            x, back_of_norm = layer_norm(x + y, (x.shape[2],), w, b, eps)
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
