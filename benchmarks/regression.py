"""What became slower between two sets of results.

What is compared is not a time but a time relative to PyTorch's in the same rounds of the same
process, because the machine is never twice as fast or as slow as it was. A slow-down counts if its
95 % interval lies above the tolerance, in every pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from transformer_fast.measure import machine
from transformer_fast.measure.contest import Row

from . import store

_RESAMPLES = 2000
#: PyTorch's contenders, any of which is the same code before and after.
_CONTROLS = ("torch", "torch eager", "torch fast path")

#: The suites of a run, by name, as `store.read` gives them.
Suites = dict[str, Any]
#: Before and after.
Pass = tuple[Suites, Suites]


class Key(NamedTuple):
    """Whose time it is."""

    suite: str
    op: str
    case: str
    contender: str


class Change(NamedTuple):
    """New time / old time, both relative to PyTorch's, with its 95 % interval."""

    value: float
    low: float
    high: float
    #: Without PyTorch to compare with: times as they are, of two processes.
    raw: bool


def _medians(samples: Sequence[Sequence[float]], seed: int) -> torch.Tensor:
    """Bootstrap medians (series, draws) of paired series."""
    paired = torch.tensor([list(series) for series in samples], dtype=torch.float64)
    rounds = torch.randint(
        paired.shape[1],
        (_RESAMPLES, paired.shape[1]),
        generator=torch.Generator().manual_seed(seed),
    )
    return torch.quantile(paired[:, rounds], 0.5, dim=-1)


def _relative(row: Row, control: Row | None, seed: int) -> tuple[float, torch.Tensor]:
    """The row's time over the control's (or 1): median, and bootstrap draws."""
    series = [row.samples] if control is None else [row.samples, control.samples]
    exact = torch.quantile(torch.tensor(series, dtype=torch.float64), 0.5, dim=-1)
    draws = _medians(series, seed)
    if control is None:
        return exact[0].item(), draws[0]
    return (exact[0] / exact[1]).item(), draws[0] / draws[1]


def _timed(rows: Sequence[Row], contender: str | None) -> Row | None:
    return next((row for row in rows if row.contender == contender and row.samples), None)


def _control(rows: Sequence[Row], other: Sequence[Row]) -> str | None:
    return next((name for name in _CONTROLS if _timed(rows, name) and _timed(other, name)), None)


def _before(rows: Sequence[Row], after: Row) -> Row | None:
    """What ``after`` is to be compared with: the same contender, or what was chosen in its place.

    The dispatcher may come to choose other backends for a module, as 'cpu' for 'cpu+torch'.
    """
    same = _timed(rows, after.contender)
    if same is None and after.chosen:
        same = next((row for row in rows if row.chosen and row.samples), None)
    return same


def change(old: Sequence[Row], new: Sequence[Row], contender: str) -> Change | None:
    """How ``contender`` changed between the rows of one case, then and now; None: not timed."""
    after = _timed(new, contender)
    before = None if after is None else _before(old, after)
    if before is None or after is None:
        return None
    name = _control(old, new)
    was, was_draws = _relative(before, _timed(old, name), 1)
    now, now_draws = _relative(after, _timed(new, name), 2)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.quantile(now_draws / was_draws, ends).tolist()
    return Change(now / was, low, high, name is None)


def _keys(suites: Suites) -> Iterator[Key]:
    """Every row of ours."""
    for name, suite in suites.items():
        for row in suite["rows"]:
            if row.ours and row.contender != "reference":
                yield Key(name, row.op, row.case, row.contender)


def _rows(suites: Suites, key: Key) -> list[Row]:
    return store.find(suites[key.suite]["rows"], key.op, key.case) if key.suite in suites else []


def changes(passes: Sequence[Pass]) -> dict[Key, list[Change]]:
    """The change of every row of ours that both sides have, pass by pass."""
    found: dict[Key, list[Change]] = {}
    for old, new in passes:
        for key in dict.fromkeys(_keys(new)):
            seen = change(_rows(old, key), _rows(new, key), key.contender)
            if seen is not None:
                found.setdefault(key, []).append(seen)
    return found


def lost(passes: Sequence[Pass]) -> dict[Key, str]:
    """Rows of ours that had a speed and have none any more, in any pass, with the reason."""
    found: dict[Key, str] = {}
    for old, new in passes:
        for key in dict.fromkeys(_keys(new)):
            after = next(r for r in _rows(new, key) if r.contender == key.contender)
            if not after.samples and _timed(_rows(old, key), key.contender):
                found[key] = after.reason or "it was not timed"
    return found


def slower(seen: Sequence[Change], tolerance: float) -> bool:
    """Whether every pass shows a slow-down beyond the tolerance."""
    return all(one.low > 1.0 + tolerance for one in seen)


def faster(seen: Sequence[Change], tolerance: float) -> bool:
    return all(one.high < 1.0 - tolerance for one in seen)


def other_machines(old: Suites, new: Suites) -> list[str]:
    """Why the two may not be compared, in sentences; empty: they are of the same machine."""
    found: list[str] = []
    for name in new:
        if name in old:
            found += machine.differences(old[name]["machine"], new[name]["machine"])
    return list(dict.fromkeys(found))
