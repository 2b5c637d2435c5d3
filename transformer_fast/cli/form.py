"""Figures as people read them."""

from __future__ import annotations

import math

from ..measure.summary import Summary

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def _unit(value: float) -> tuple[float, str]:
    return next((unit for unit in _UNITS if value >= unit[0]), _UNITS[-1])


def seconds(value: float) -> str:
    """Three digits and a unit: '12.3 ms'."""
    size, unit = _unit(value)
    return f"{three_digits(value / size)} {unit}"


def interval(low: float, high: float) -> str:
    """'12.1-12.9'."""
    return f"{three_digits(low)}-{three_digits(high)}"


def spread(time: Summary) -> str:
    """The quartiles in the median's unit."""
    size, _ = _unit(time.median)
    return interval(time.low / size, time.high / size)


def three_digits(value: float) -> str:
    if not math.isfinite(value):
        return str(value)
    if value == 0.0:
        return "0"
    before = math.floor(math.log10(abs(value))) + 1
    return f"{value:.{min(3, max(0, 3 - before))}f}"


def error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def times(value: float | None) -> str:
    """'2.14x'."""
    return "" if value is None else f"{three_digits(value)}x"


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def rate(amount: float, time: float) -> str:
    """Billions per second."""
    return three_digits(amount / time / 1e9)


def count(amount: int, noun: str, several: str | None = None) -> str:
    return f"{amount:,} {noun if amount == 1 else several or noun + 's'}"
