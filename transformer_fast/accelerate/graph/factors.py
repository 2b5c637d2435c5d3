"""Products and sums as users write them, taken apart: ``0.5 * x * (1 + erf(x / 1.41))``."""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Node

from .nodes import is_number
from .ops import read


class Factors(NamedTuple):
    """``number * nodes[0] * nodes[1] * ...``"""

    number: float
    nodes: tuple[Node, ...]


def factors(node: Node, depth: int = 6) -> Factors:
    """What a chain of multiplications, and divisions by numbers, multiplies."""
    op = read(node)
    if op is None or depth == 0:
        return Factors(1.0, (node,))
    if op.name == "neg":
        inner = factors(op["input"], depth - 1)
        return Factors(-inner.number, inner.nodes)
    if op.name == "pow" and op["exponent"] in (2, 3) and isinstance(op["input"], Node):
        inner = factors(op["input"], depth - 1)
        times = int(op["exponent"])
        return Factors(inner.number**times, inner.nodes * times)
    if op.name not in ("mul", "div"):
        return Factors(1.0, (node,))
    number = 1.0
    nodes: tuple[Node, ...] = ()
    for name in ("input", "other"):
        x = op[name]
        divides = op.name == "div" and name == "other"
        known = _as_number(x)
        if known is not None and not (divides and known == 0):
            number = number / known if divides else number * known
        elif divides or not isinstance(x, Node):
            return Factors(1.0, (node,))
        else:
            inner = factors(x, depth - 1)
            number, nodes = number * inner.number, nodes + inner.nodes
    return Factors(number, nodes)


def _as_number(x: object) -> float | None:
    if is_number(x):
        return float(x)  # type: ignore[arg-type]
    op = read(x)
    if op is None:
        return None
    if op.name == "tensor" and is_number(op["value"]):
        return float(op["value"])
    if op.name == "sqrt":
        inner = _as_number(op["input"])
        return None if inner is None or inner < 0 else inner**0.5
    return None


def plus(node: object) -> tuple[float, Node] | None:
    """``(c, x)`` of ``x + c`` with a number c, or None."""
    op = read(node)
    if op is None or op.name != "add":
        return None
    for x, number in ((op["input"], op["other"]), (op["other"], op["input"])):
        if is_number(number) and isinstance(x, Node):
            return float(number), x
    return None


def close(found: float, wanted: float) -> bool:
    """Whether a constant of the user's, written with a few digits, is the wanted one."""
    return abs(found - wanted) <= 1e-4 * abs(wanted)
