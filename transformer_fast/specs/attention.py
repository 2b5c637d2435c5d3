"""Op table entry of attention. Cases have sizes (B, H, T, S, D), all kinds of masks, all layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..reference.attention import supports_query_lengths, visible_places
from .spec import Case, Draw, OpSpec, Text, bytes_of, case

#: Builds an argument of a case: ``make(draw, B, H, T, S)``.
Make = Callable[[Draw, int, int, int, int], "Tensor | None"]


def arrange(
    query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None,
    lengths: Tensor | None = None, causal: bool = False, scale: float | None = None,
    dropout_p: float = 0.0, seed: Tensor | None = None, gqa: bool = False, weights: bool = False,
    query_lengths: Tensor | None = None, longest: tuple[int, int] | None = None,
    softcap: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Returns the positional arguments of ``reference.attention``."""
    arguments = (
        query, key, value, mask, lengths, causal, scale, dropout_p, seed, gqa, weights,
        query_lengths,
    )  # fmt: skip
    if softcap is not None:
        return (*arguments, longest, softcap)
    return arguments if longest is None else (*arguments, longest)


def _attention(
    batch: int, heads: int, length: int, keys: int, size: int, *, value_size: int | None = None,
    key_heads: int | None = None, mask: Make | None = None, lengths: Make | None = None,
    query_lengths: Make | None = None, dropout_p: float = 0.0, spread: float = 1.0, **rest: Any,
) -> Callable[[Draw], tuple[Any, ...]]:  # fmt: skip
    def build(draw: Draw) -> tuple[Any, ...]:
        h = heads if key_heads is None else key_heads
        query = draw.normal(batch, heads, length, size, scale=spread)
        key = draw.normal(batch, h, keys, size)
        value = draw.normal(batch, h, keys, size if value_size is None else value_size)
        sizes = batch, heads, length, keys
        return arrange(
            query, key, value, mask=None if mask is None else mask(draw, *sizes),
            lengths=None if lengths is None else lengths(draw, *sizes),
            query_lengths=None if query_lengths is None else query_lengths(draw, *sizes),
            dropout_p=dropout_p, seed=draw.seed() if 0.0 < dropout_p < 1.0 else None,
            gqa=h != heads, **rest,
        )  # fmt: skip

    return build


def _in_sequence(
    heads: int, lengths: Sequence[int], size: int, *, causal: bool = False
) -> Callable[[Draw], tuple[Any, ...]]:
    """Builds packed self-attention on views of one fused projection (N, 3, H, D)."""

    def build(draw: Draw) -> tuple[Any, ...]:
        rows = draw.normal(sum(lengths), 3, heads, size)
        query, key, value = (x.transpose(0, 1)[None] for x in rows.unbind(1))
        starts = torch.tensor([0, *lengths], device=draw.device).cumsum(0)
        longest = max(lengths), max(lengths)
        return arrange(
            query, key, value, lengths=starts, query_lengths=starts, causal=causal, longest=longest
        )

    return build


# Masks. ``letters`` of "bhts" name the dimensions that are not broadcast (size 1).


def _bools(letters: str, true: float = 0.7) -> Make:
    return lambda draw, *sizes: draw.bools(*_shape(letters, sizes), true=true)


def _floats(letters: str) -> Make:
    return lambda draw, *sizes: draw.normal(*_shape(letters, sizes))


def _shape(letters: str, sizes: Sequence[int]) -> list[int]:
    return [n if each in letters else 1 for each, n in zip("bhts", sizes, strict=True)]


def _bool_some_rows_empty(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    return draw.bools(b, h, t, s) & draw.bools(b, h, t, 1, true=0.7)


def _bool_strided(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    return draw.bools(h, b, s, 2 * t, true=0.7).permute(1, 0, 3, 2)[:, :, ::2]


def _bool_ends(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    # Padding at both ends, longer than one panel of keys.
    key = torch.arange(s, device=draw.device)
    return ((key >= 70) & (key < s - 50))[None, None, None]


def _bool_tiles(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    # Blocks of 128 keys, alternately masked out for all queries and visible to all.
    block = torch.arange(s, device=draw.device) // 128
    return (block % 2 == 1)[None, None, None, :] & draw.bools(b, 1, 1, s, true=2.0)


def _float_hiding(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    return draw.normal(1, h, t, s).masked_fill(draw.bools(1, 1, t, s), -math.inf)


def _float_lowest(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    # finfo.min is finite: a row that is finfo.min everywhere attends to all keys.
    lowest = torch.zeros((b, 1, t, s), dtype=draw.dtype, device=draw.device)
    hidden = draw.bools(b, 1, t, s) | draw.bools(b, 1, t, 1, true=0.2)
    return lowest.masked_fill(hidden, torch.finfo(draw.dtype).min)


def _distance_bias(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    distance = torch.arange(s, device=draw.device) - torch.arange(t, device=draw.device)[:, None]
    slope = torch.arange(1, h + 1, device=draw.device)[:, None, None]
    return (-distance.abs() / 2.0**slope)[None].to(draw.dtype)


def _rising(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    # ALiBi (Press et al., 2022) with the opposite sign: later keys have larger scores. So the distance
    # between a row's largest score and the scores of the first keys grows with the row's length.
    distance = torch.arange(s, device=draw.device) - torch.arange(t, device=draw.device)[:, None]
    slope = torch.arange(h, device=draw.device)[:, None, None]
    return (distance / 2.0**slope)[None].to(draw.dtype)


def _first_keys_smallest(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    # The first keys are smaller by 60 to 120, from the first query to the last. exp(-87.3) is the
    # smallest normal fp32 number, and beyond 88.7 exp overflows.
    below = torch.linspace(60.0, 120.0, t, device=draw.device)[:, None]
    first = torch.arange(s, device=draw.device) < 48
    return torch.where(first, -below, 0.0)[None, None].to(draw.dtype)


def _lengths(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    return torch.tensor([s - i * s // (b + 1) for i in range(b)], device=draw.device)


def _lengths_at_the_ends(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    # Empty, full, longer than the keys, negative.
    ends = [0, s, s + 5, -3]
    return torch.tensor([ends[i % 4] for i in range(b)], dtype=torch.int32, device=draw.device)


def _query_lengths(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    # A strided tensor (stride 2); the last sequence has no queries.
    lengths = torch.tensor([t - i * t // max(1, b - 1) for i in range(b)], device=draw.device)
    return lengths.repeat_interleave(2)[::2]


# NaN and inf at masked-out positions.


def _padded(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    # On the left, on the right, everywhere and nowhere.
    key = torch.arange(s, device=draw.device)
    return torch.stack((key >= 9, key < s - 7, key < 0, key >= 0))[:, None, None]


def _columns_hidden(draw: Draw, b: int, h: int, t: int, s: int, added: bool = False) -> Tensor:
    mask = draw.bools(1, 1, t, s, true=0.7) & (torch.arange(s, device=draw.device) % 7 != 5)
    return torch.where(mask, 0.25, -math.inf).to(draw.dtype) if added else mask


def _garbage(
    hidden: Callable[[Tensor, Any], Tensor], *sizes: int, **options: Any
) -> Callable[[Draw], tuple[Any, ...]]:
    """Builds calls with NaN in keys and infinity in values that ``hidden`` marks, (S) or (B, S), and
    NaN in queries beyond their lengths.
    """

    def build(draw: Draw) -> tuple[Any, ...]:
        query, key, value, *rest = arguments = _attention(*sizes, **options)(draw)
        position = torch.arange(sizes[3], device=draw.device)
        for x, garbage in ((key, math.nan), (value, math.inf)):
            x.masked_fill_(hidden(position, arguments)[..., None, :, None], garbage)
        if rest[-1] is not None:
            query.masked_fill_((position >= rest[-1][:, None])[:, None, :, None], math.nan)
        return arguments

    return build


CASES = (
    case("plain", _attention(2, 3, 17, 23, 16)),
    case("head size 64", _attention(1, 2, 33, 65, 64)),
    case("head size prime", _attention(1, 3, 37, 41, 7)),
    case("head size 1", _attention(2, 3, 61, 29, 1)),
    case("head size 131", _attention(1, 2, 13, 17, 131)),
    case("values wider", _attention(2, 2, 11, 19, 8, value_size=37)),
    case("values narrower", _attention(2, 2, 41, 19, 32, value_size=3)),
    case("one key", _attention(2, 2, 33, 1, 16)),
    case("one query", _attention(2, 4, 1, 67, 32)),
    case("many tiles", _attention(1, 1, 300, 530, 24)),
    case("scale 0.3", _attention(2, 2, 17, 23, 16, scale=0.3)),
    case("scale 0", _attention(2, 2, 17, 23, 16, scale=0.0)),
    case("scale below 0", _attention(2, 2, 17, 23, 16, scale=-0.5)),
    case("soft cap", _attention(2, 3, 37, 141, 16, softcap=2.0, spread=3.0)),
    case("soft cap, causal", _attention(2, 2, 70, 300, 24, softcap=50.0, spread=30.0, causal=True)),
    case("soft cap, float mask", _attention(2, 2, 17, 67, 16, softcap=5.0, scale=-0.5,
                                            mask=_floats("ts"), weights=True)),
    case("soft cap, few queries", _attention(8, 2, 1, 90, 16, softcap=1.0, lengths=_lengths)),
    case("soft cap, query lengths", _attention(3, 2, 21, 37, 16, softcap=3.0, lengths=_lengths,
                                               query_lengths=_query_lengths)),
    case("large scores", _attention(2, 2, 17, 23, 16, spread=20.0)),
    case("scores of deviation 30", _attention(1, 2, 60, 130, 16, spread=30.0)),
    case("scores of deviation 100", _attention(1, 2, 60, 130, 16, spread=100.0, causal=True)),
    case("scores of deviation 300", _attention(1, 2, 60, 130, 16, spread=300.0)),
    case("scores of deviation 300, few queries", _attention(8, 1, 2, 90, 16, spread=300.0)),
    case("first keys smallest", _attention(1, 1, 70, 110, 16, mask=_first_keys_smallest)),
    case("first keys smallest, few queries",
         _attention(8, 1, 2, 110, 16, mask=_first_keys_smallest)),
    case("equal keys",
         lambda draw: arrange(draw.normal(1, 2, 20, 16),
                              draw.normal(1, 2, 1, 16, scale=10.0).expand(1, 2, 90, 16),
                              draw.normal(1, 2, 90, 16))),
    case("causal", _attention(2, 2, 31, 31, 16, causal=True)),
    case("causal, more keys", _attention(2, 2, 19, 43, 16, causal=True)),
    case("causal, more queries", _attention(2, 2, 43, 19, 16, causal=True)),
    case("causal, many tiles", _attention(1, 1, 520, 530, 16, causal=True)),
    case("bool mask (B,H,T,S)", _attention(2, 3, 17, 23, 16, mask=_bools("bhts", 0.5))),
    case("bool mask (T,S)", _attention(2, 3, 17, 23, 16, mask=_bools("ts"))),
    case("bool mask (B,S)", _attention(3, 2, 17, 23, 16, mask=_bools("bs"))),
    case("bool mask (B,T)", _attention(3, 2, 17, 23, 16, mask=_bools("bt"))),
    case("bool mask (H,S)", _attention(2, 3, 17, 23, 16, mask=_bools("hs"))),
    case("bool mask, empty rows", _attention(2, 3, 17, 23, 16, mask=_bool_some_rows_empty)),
    case("bool mask, nothing visible",
         _attention(2, 3, 17, 23, 16, mask=lambda draw, *_: draw.bools(1, 1, 1, 1, true=-1.0))),
    case("bool mask, strided", _attention(2, 3, 17, 23, 16, mask=_bool_strided)),
    case("bool mask, expanded",
         _attention(2, 3, 17, 23, 16, mask=lambda draw, b, h, t, s:
                    draw.bools(1, 1, t, s).expand(b, h, t, s))),
    case("bool mask, hidden ends", _attention(1, 2, 40, 330, 16, mask=_bool_ends)),
    case("bool mask, hidden tiles", _attention(2, 1, 70, 700, 16, mask=_bool_tiles)),
    case("float mask (B,H,T,S)", _attention(2, 3, 17, 23, 16, mask=_floats("bhts"))),
    case("float mask, -inf", _attention(2, 3, 17, 23, 16, mask=_float_hiding)),
    case("float mask, finfo.min", _attention(2, 3, 17, 23, 16, mask=_float_lowest)),
    case("float mask, distance", _attention(2, 3, 17, 23, 16, mask=_distance_bias)),
    case("float mask, distance, causal",
         _attention(1, 2, 130, 130, 16, mask=_distance_bias, causal=True)),
    case("float mask, rising, causal", _attention(1, 2, 130, 130, 16, mask=_rising, causal=True)),
    case("bool mask and causal", _attention(2, 3, 23, 23, 16, mask=_bools("bs"), causal=True)),
    case("float mask and causal", _attention(2, 3, 23, 23, 16, mask=_floats("bhts"), causal=True)),
    case("key lengths", _attention(3, 2, 17, 40, 16, lengths=_lengths)),
    case("key lengths at the ends", _attention(4, 2, 17, 23, 16, lengths=_lengths_at_the_ends)),
    case("key lengths and causal", _attention(3, 2, 30, 30, 16, lengths=_lengths, causal=True)),
    case(
        "key lengths, mask, causal",
        _attention(3, 2, 30, 30, 16, lengths=_lengths, mask=_bools("ts"), causal=True),
    ),
    case("key lengths, many tiles", _attention(3, 1, 70, 600, 16, lengths=_lengths)),
    case("garbage beyond key lengths",
         _garbage(lambda key, call: key >= call[4][:, None], 3, 2, 21, 37, 16, lengths=_lengths)),
    case("query lengths", _attention(3, 2, 37, 21, 16, query_lengths=_query_lengths)),
    case("query lengths at the ends",
         _attention(4, 2, 17, 23, 16, query_lengths=lambda draw, b, h, t, s:
                    _lengths_at_the_ends(draw, b, h, s, t))),
    case("query lengths, one query", _attention(3, 8, 1, 40, 16, query_lengths=_query_lengths)),
    case("query lengths, many tiles",
         _attention(3, 1, 290, 200, 16, query_lengths=_query_lengths, lengths=_lengths)),
    case("query lengths and causal, many tiles",
         _attention(3, 1, 290, 290, 16, query_lengths=_query_lengths, causal=True)),
    case("query lengths, mask, fewer key heads",
         _attention(3, 4, 70, 300, 16, key_heads=2, query_lengths=_query_lengths,
                    mask=_bools("ts"))),
    case("query lengths, float mask",
         _attention(3, 2, 17, 23, 16, query_lengths=_query_lengths, mask=_floats("hts"))),
    case("query lengths, weights, dropout",
         _attention(3, 2, 37, 23, 16, weights=True, dropout_p=0.2, query_lengths=lambda draw,
                    b, h, t, s: torch.tensor([t // 2], device=draw.device).expand(b))),
    # Keys of sequences without queries, and keys that only queries beyond the lengths see.
    case("garbage beyond query lengths",
         _garbage(lambda key, call: (call[11] == 0)[:, None] & (key >= 0), 3, 2, 37, 37, 16,
                  query_lengths=_query_lengths)),
    case("garbage beyond query lengths, causal",
         _garbage(lambda key, call: key >= call[11][:, None], 3, 2, 37, 37, 16, causal=True,
                  query_lengths=_query_lengths, weights=True)),
    # Queries stop at 24.
    case("garbage in the future", _garbage(lambda key, _: key >= 25, 1, 2, 25, 40, 16, causal=True)),
    *(case(f"garbage in padding{', causal' * causal}",
           _garbage(lambda key, call: ~call[3][:, 0, 0], 4, 2, 37, 37, 16, mask=_padded, causal=causal))
      for causal in (False, True)),
    *(case(f"garbage under a {kind} mask",
           _garbage(lambda key, _: key % 7 == 5, 2, 2, 40, 60, 16, mask=mask))
      for kind, mask in (("bool", _columns_hidden), ("float", partial(_columns_hidden, added=True)))),
    case("fewer key heads", _attention(2, 6, 17, 23, 16, key_heads=2)),
    case("one key head", _attention(2, 4, 17, 23, 16, key_heads=1, causal=True)),
    case("fewer key heads, mask",
         _attention(2, 6, 17, 23, 16, key_heads=3, mask=_bools("bhts", 0.5))),
    case("weights", _attention(2, 3, 17, 23, 16, weights=True)),
    case("weights, causal", _attention(1, 2, 40, 300, 16, causal=True, weights=True)),
    case(
        "weights, mask, empty rows",
        _attention(2, 3, 17, 23, 16, mask=_bool_some_rows_empty, weights=True),
    ),
    case("weights, first keys smallest",
         _attention(1, 1, 70, 110, 16, mask=_first_keys_smallest, weights=True)),
    case("weights, key lengths", _attention(3, 2, 17, 40, 16, lengths=_lengths, weights=True)),
    case("heads inside",
         lambda draw: arrange(*(draw.normal(2, n, 3, 24).transpose(1, 2) for n in (19, 27, 27)))),
    case("packed q, k, v",
         lambda draw: arrange(*(x.transpose(1, 2) for x in draw.normal(2, 29, 3, 4, 16).unbind(2)),
                              causal=True)),
    case("key and value transposed",
         lambda draw: arrange(draw.normal(2, 3, 19, 20), draw.normal(2, 3, 20, 33).mT,
                              draw.normal(2, 3, 22, 33).mT)),
    case("expanded batch",
         lambda draw: arrange(draw.normal(3, 1, 15, 16).expand(3, 2, 15, 16),
                              *(draw.normal(1, 2, 21, 16).expand(3, 2, 21, 16) for _ in "kv"))),
    case("one key, expanded",
         lambda draw: arrange(draw.normal(2, 2, 15, 16),
                              *(draw.normal(2, 2, 1, 16).expand(2, 2, 37, 16) for _ in "kv"))),
    case("one tensor", lambda draw: arrange(*[draw.normal(2, 3, 21, 16)] * 3)),
    case("every third of the head size",
         lambda draw: arrange(*(draw.normal(2, 2, n, 48)[..., 1::3] for n in (17, 40, 40)))),
    case("dropout", _attention(2, 3, 17, 23, 16, dropout_p=0.1)),
    case("dropout, weights, causal", _attention(2, 3, 17, 23, 16, causal=True, dropout_p=0.4,
                                                weights=True)),
    case("dropout, mask, empty rows", _attention(2, 3, 17, 23, 16, dropout_p=0.2,
                                                 mask=_bool_some_rows_empty)),
    case("everything dropped", _attention(2, 3, 17, 23, 16, dropout_p=1.0)),
)  # fmt: skip


def _padded_lengths(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    # Lengths from 30 % to 100 % of S, evenly spaced over the batch.
    share = torch.linspace(0.3, 1.0, b, device=draw.device)
    return (share * s).round().to(torch.int64)


def _padding_mask(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    position = torch.arange(s, device=draw.device)
    return (position < _padded_lengths(draw, b, h, t, s)[:, None])[:, None, None, :]


def _bench(name: str, *sizes: int, **rest: Any) -> Case:
    batch, heads, length, size = sizes
    label = f"({batch},{heads},{length},{size})" + (f", {name}" if name else "")
    return case(label, _attention(batch, heads, length, length, size, **rest))


BENCH_CASES = (
    _bench("", 4, 8, 1024, 64),
    _bench("causal", 4, 8, 1024, 64, causal=True),
    _bench("key padding mask", 4, 8, 1024, 64, mask=_padding_mask),
    _bench("key lengths", 4, 8, 1024, 64, lengths=_padded_lengths),
    _bench("bool mask (T,S)", 4, 8, 1024, 64, mask=_bools("ts")),
    _bench("float mask (H,T,S)", 4, 8, 1024, 64, mask=_floats("hts")),
    _bench("weights", 4, 8, 1024, 64, weights=True),
    _bench("", 32, 8, 128, 64),
    _bench("causal", 32, 8, 128, 64, causal=True),
    _bench("", 2, 8, 4096, 64),
    _bench("causal", 2, 8, 4096, 64, causal=True),
)


def _sizes(arguments: tuple[Any, ...]) -> tuple[int, int, int, int, int, int]:
    query, key, value = arguments[:3]
    batch, heads, length, size = query.shape
    keys = key.shape[-2]
    if (longest := ATTENTION.named(arguments)["longest"]) is not None:
        batch, (length, keys) = arguments[4].shape[0] - 1, longest
    return batch, heads, length, keys, size, value.shape[-1]


def _flops(arguments: tuple[Any, ...]) -> float:
    batch, heads, length, keys, size, value_size = _sizes(arguments)
    return 2.0 * batch * heads * length * keys * (size + value_size)


def _bytes(arguments: tuple[Any, ...]) -> float:
    query, key, value, mask, key_lengths, *_ = arguments
    batch, heads, length, _ = query.shape
    written = batch * heads * length * (value.shape[-1] + (key.shape[-2] if arguments[10] else 0))
    return bytes_of(query, key, value, mask, key_lengths) + written * query.element_size()


def _useful_share(arguments: tuple[Any, ...]) -> float:
    query, key, _, mask, key_lengths, is_causal, *_ = arguments
    named = ATTENTION.named(arguments)
    query_lengths = named["query_lengths"]
    if named["longest"] is not None:
        batch, _, length, keys, *_ = _sizes(arguments)
        query, key = (
            query[:1, :1, :1].expand(batch, 1, length, -1),
            key[:1, :1, :1].expand(batch, 1, keys, -1),
        )
        key_lengths, query_lengths = key_lengths.diff(), query_lengths.diff()
    visible = visible_places(query, key, mask, key_lengths, is_causal)
    if query_lengths is not None:
        position = torch.arange(query.shape[-2], device=query.device)
        real = (position < query_lengths[:, None])[:, None, :, None]
        visible = real if visible is None else visible & real
    if visible is None or visible.numel() == 0:
        return 1.0
    return int(torch.count_nonzero(visible)) / visible.numel()


def restricted(mask: Tensor | None, visible: Tensor) -> Tensor:
    """Returns the mask that also masks out where the bool tensor ``visible`` is False."""
    if mask is None:
        return visible
    return mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -math.inf)


def _joined_mask(
    query: Tensor, key: Tensor, mask: Tensor | None, key_lengths: Tensor | None, is_causal: bool,
) -> tuple[Tensor | None, bool]:  # fmt: skip
    """Merges lengths into the mask, and causality, too: SDPA accepts a mask or is_causal, not both."""
    keys = key.shape[-2]
    if key_lengths is not None:
        real = torch.arange(keys, device=key.device) < key_lengths[:, None]
        mask = restricted(mask, real[:, None, None, :])
    if mask is None or not is_causal:
        return mask, is_causal
    past = torch.ones(query.shape[-2], keys, dtype=torch.bool, device=key.device).tril()
    return restricted(mask, past), False


@supports_query_lengths
def _by_pytorch(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, key_lengths: Tensor | None,
    is_causal: bool, scale: float | None, dropout_p: float, seed: Tensor | None, enable_gqa: bool,
    need_weights: bool, softcap: float | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    mask, is_causal = _joined_mask(query, key, attn_mask, key_lengths, is_causal)
    if not need_weights and softcap is None:
        output = F.scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return output, None
    # The computation of torch.nn.MultiheadAttention with need_weights=True, and of transformers' eager
    # attention with a soft cap.
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * scale) @ key.transpose(-2, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=key.device).tril()
    if mask is not None:
        hides = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if hides else scores + mask
    weights = torch.softmax(scores, dim=-1)
    if dropout_p:
        weights = F.dropout(weights, dropout_p)
    return weights @ value, weights if need_weights else None


def _text(masked: str, text: Text) -> list[tuple[Any, ...]]:
    calls = []
    for batch, x in zip(text.batches, text.embedded, strict=True):
        query, key, value = (text.heads(x) for _ in range(3))
        mask = batch.real[:, None, None, :] if "mask" in masked else None
        lengths = batch.lengths if "lengths" in masked else None
        options: Any = {"causal": "causal" in masked, "weights": "weights" in masked}
        calls.append(arrange(query, key, value, mask=mask, lengths=lengths, **options))
    return calls


def _padding(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    """Returns lengths between S / 2 and S."""
    return draw.integers(b, end=s // 2 + 1) + (s - s // 2)


def _documents(draw: Draw, b: int, h: int, t: int, s: int) -> Tensor:
    """Returns the block-diagonal mask of four concatenated documents."""
    of_query = torch.arange(t, device=draw.device) * 4 // t
    of_key = torch.arange(s, device=draw.device) * 4 // s
    return (of_query[:, None] == of_key).expand(b, 1, t, s)


_VISIBLE: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"causal": True},
    "key lengths": {"lengths": _padding},
    "lengths of both": {"lengths": _padding, "query_lengths": _padding},
    "documents": {"mask": _documents},
    "bias": {"mask": _floats("hts")},
}


def _gpu_case(
    batch: int, heads: int, queries: int, keys: int, size: int, seen: str, dropout_p: float = 0.0
) -> Case:
    name = f"({batch},{heads},{queries},{keys},{size}), {seen}"
    build = _attention(batch, heads, queries, keys, size, dropout_p=dropout_p, **_VISIBLE[seen])
    name += f", dropout {dropout_p}" if dropout_p else ""
    # Decoding steps have no gradients.
    return case(name, build, queries > 4, "attention")


def _packed_case(heads: int, sequences: int, longest: int, size: int) -> Case:
    # From half of `longest` to `longest`.
    lengths = [longest - i * longest // (2 * sequences) for i in range(sequences)]
    name = f"{sequences} packed sequences of up to {longest}, ({heads},{size})"
    return case(name, _in_sequence(heads, lengths, size), True, "attention")


_UNMASKED = ("no mask", "causal", "key lengths")
#: Batch sizes for 16 heads: the smallest, and one that occupies all multiprocessors.
_FEW, _MANY = 1, 16


def _gpu_cases() -> Iterator[Case]:
    for size in (64, 96, 128):
        for seen in _VISIBLE if size != 96 else _UNMASKED:
            for length in (128, 1024):
                if seen != "lengths of both":
                    yield _gpu_case(_FEW, 16, length, length, size, seen)
                yield _gpu_case(8192 // length, 16, length, length, size, seen)
        # Decoding: 1 or 4 query tokens.
        for seen in ("no mask", "key lengths"):
            for keys in (128, 1024, 4096, 8192):
                for batch in (_FEW, _MANY):
                    yield _gpu_case(batch, 16, 1, keys, size, seen)
                    if size != 96 and keys < 8192:
                        yield _gpu_case(batch, 16, 4, keys, size, seen)
    for size in (64, 128):
        for longest, sequences in ((128, 32), (1024, 8)):
            yield _packed_case(16, sequences, longest, size)
        for seen in _UNMASKED:
            yield _gpu_case(5, 16, 2048, 2048, size, seen)
            yield _gpu_case(_FEW, 16, 4096, 4096, size, seen)
            yield _gpu_case(_FEW, 16, 8192, 8192, size, seen)
        for seen in ("no mask", "causal"):
            yield _gpu_case(5, 16, 4096, 4096, size, seen)
        for seen in ("documents", "bias"):
            for batch in (_FEW, _MANY):
                yield _gpu_case(batch, 16, 1, 1024, size, seen)
        # Cross-attention of a decoder to a source of another length.
        for seen in ("no mask", "key lengths"):
            for queries, keys in ((128, 1024), (1024, 128)):
                for batch in (_FEW, _MANY):
                    yield _gpu_case(batch, 16, queries, keys, size, seen)
    for length in (128, 1024):
        for seen in _UNMASKED:
            yield _gpu_case(2, 16, length, length, 64, seen, 0.1)
            yield _gpu_case(6, 16, length, length, 64, seen, 0.1)


def _gpu_bench_cases() -> Iterator[Case]:
    for size in (64, 128):
        for length in (512, 1024, 2048, 4096, 8192):
            for seen in ("no mask", "causal", "key lengths", "documents"):
                if seen in ("no mask", "causal") or length >= 4096:
                    yield _gpu_case(16384 // length, 16, length, length, size, seen)
        for batch in (1, 32):
            yield _gpu_case(batch, 16, 1, 4096, size, "key lengths")


def _by_public_function(functional: Any, *given: Any) -> tuple[Tensor, Tensor | None]:
    query, key, value, mask, key_lengths, is_causal, scale, _, _, gqa, weights, *rest = given
    query_lengths, _, softcap, *_ = (*rest, None, None, None)
    found = functional.scaled_dot_product_attention(
        query, key, value, mask, 0.0, is_causal, scale, gqa, key_lengths=key_lengths,
        query_lengths=query_lengths, softcap=softcap, need_weights=weights,
    )  # fmt: skip
    return found if weights else (found, None)


ATTENTION = OpSpec(
    name="attention",
    summary="Scaled dot-product attention with masks, causality, key lengths and dropout.",
    paper='"Attention Is All You Need", section 3.2.1',
    arguments=(
        "query", "key", "value", "attn_mask", "key_lengths", "is_causal", "scale", "dropout_p",
        "seed", "enable_gqa", "need_weights", "query_lengths", "longest", "softcap",
    ),
    results=("output", "weights"),
    gradients_of=("query", "key", "value", "attn_mask"),
    cases=CASES,
    bench_cases=BENCH_CASES,
    flops=_flops,
    bytes=_bytes,
    pytorch=_by_pytorch,
    tiny=case("call", _attention(1, 1, 1, 1, 8)),
    text_cases=(
        ("padding mask", partial(_text, "mask")),
        ("key lengths", partial(_text, "lengths")),
        ("causal", partial(_text, "causal")),
        ("with weights", partial(_text, "lengths weights")),
    ),
    gpu_cases=tuple(_gpu_cases()),
    gpu_bench_cases=tuple(_gpu_bench_cases()),
    public=_by_public_function,
    useful_share=_useful_share,
)  # fmt: skip
