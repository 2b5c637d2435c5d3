"""Fused layers from their definitions, made of those of the ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from definitions import Array, Gradients
from ops import attention, feed_forward, layer_norm, linear

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
