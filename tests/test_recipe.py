"""Recipes: the codes of the kernels, and the conversions."""

from __future__ import annotations

import re
from enum import IntEnum
from pathlib import Path

import pytest

from transformer_fast.recipe import NO_NORM, Kind, Layer, Linear, Norm, NormKind, Place, Sublayer

CSRC = Path(__file__).resolve().parents[1] / "csrc" / "cpu"


def codes_in_csrc(folder: str, name: str) -> dict[str, int]:
    """Returns the enumerators of a C++ enum and their values."""
    text = "\n".join(path.read_text() for path in sorted((CSRC / folder).glob("*.[ch]*")))
    (body,) = re.findall(rf"enum class {name} : \w+ {{(.*?)}};", re.sub(r"//.*", "", text), re.S)
    found: dict[str, int] = {}
    for one in filter(None, (each.strip() for each in body.split(","))):
        label, _, code = one.partition(" = ")
        found[label] = int(code) if code else len(found)
    return found


@pytest.mark.parametrize(
    ("ours", "folder"),
    [(Kind, "layers"), (NormKind, "ops/layer_norm")],
    ids=["sub-layers", "norms"],
)
def test_codes_are_those_of_csrc(ours: type[IntEnum], folder: str) -> None:
    theirs = codes_in_csrc(folder, {"layers": "SublayerKind"}.get(folder, "NormKind"))
    assert {kind.name.lower(): int(kind) for kind in ours if kind >= 0} == theirs


def map_of(name: str) -> Linear[str]:
    return Linear(name, f"{name}.bias")


NORM = Norm(NormKind.RMS, "norm", None, 1e-6)
#: Names of the maps, and the kinds and maps that the kernel takes.
PAIRS = {
    "joined heads": (Kind.SELF_ATTENTION, "qkv out", [(0, "qkv out")]),
    "heads": (Kind.CROSS_ATTENTION, "q k v out", [(3, "q k"), (1, "v out")]),
    "network": (Kind.FEED_FORWARD, "first second", [(2, "first second")]),
    "gated": (Kind.GATED_FEED_FORWARD, "gate up second", [(5, "gate gate"), (4, "up second")]),
    "joined gated": (Kind.GATED_FEED_FORWARD, "both second", [(4, "both second")]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_sublayers_in_pairs_of_maps(name: str) -> None:
    kind, maps, expected = PAIRS[name]
    one = Sublayer(kind, tuple(map(map_of, maps.split())), NORM)
    found = [*one.in_pairs()]
    assert [(int(k), f"{a.weight} {b.weight}") for k, a, b, _ in found] == expected
    assert [norm for *_, norm in found] == [NO_NORM] * (len(found) - 1) + [NORM]
    assert [k.is_part for k, *_ in found] == [True] * (len(found) - 1) + [False]


def test_each_converts_every_parameter() -> None:
    place = {name: Place("a.b", name) for name in ("w", "v", "n")}
    maps = Linear(place["w"], None), Linear(place["v"], place["n"])
    norm = Norm(NormKind.LAYER, place["n"], place["w"], 1e-5)
    one = Sublayer(Kind.SELF_ATTENTION, maps, norm, 4, False, 0.5, True, True)
    layer = Layer((one, Sublayer(Kind.FEED_FORWARD, maps, NO_NORM)), True, "silu", ("drop",))
    found = layer.each(lambda place: place.name)
    names = (Linear("w", None), Linear("v", "n"))
    assert found.sublayers[0] == Sublayer(
        Kind.SELF_ATTENTION, names, Norm(NormKind.LAYER, "n", "w", 1e-5), 4, False, 0.5, True, True
    )
    assert found.sublayers[1] == Sublayer(Kind.FEED_FORWARD, names, NO_NORM)
    assert (found.norm_first, found.activation, found.dropouts) == (True, "silu", ("drop",))
