"""What `accelerate` did, module by module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..dispatch import Explanation

Outcome = Literal["swapped", "already", "left"]


@dataclass(frozen=True)
class Entry:
    """One module that `accelerate` knows how to treat."""

    #: Its qualified name; "" is the model itself.
    name: str
    #: The class it had.
    kind: str
    outcome: Outcome
    #: What it runs as now; empty if it was left as it was.
    now: str = ""
    #: Why it was left as it was; empty if it was not.
    reason: str = ""
    #: For each op it calls, who runs it without gradients and with them; no entry in ``training``:
    #: the module's own forward. Sizes and masks of a call may decide otherwise;
    #: `transformer_fast.explain` tells for a given one.
    inference: dict[str, Explanation] = field(default_factory=dict)
    training: dict[str, Explanation] = field(default_factory=dict)
    #: For each op that its parts would make up, and that they are called for one by one: why.
    in_parts: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        head = f"{self.name or '(the model)'}: {self.kind}"
        if self.outcome == "left":
            return f"{head} left as it is: {self.reason}"
        ops = []
        for op, inference in self.inference.items():
            where = f"{inference.backend}"
            training = self.training[op].backend if op in self.training else "as before"
            ops.append(f"{op} on {where if training == where else f'{where}, training {training}'}")
        ops += [f"{op} in parts: {reason}" for op, reason in self.in_parts.items()]
        told = f" ({'; '.join(ops)})" if ops else ""
        already = " already" if self.outcome == "already" else ""
        return f"{head} runs{already} as {self.now}{told}"

    def why_not(self) -> dict[str, str]:
        """For each op that runs on the reference: what stands against each kernel."""
        return {
            f"{op}, {mode}": str(explanation)
            for mode, found in (("inference", self.inference), ("training", self.training))
            for op, explanation in found.items()
            if explanation.backend in (None, "reference")
        }


@dataclass
class Report:
    """What `accelerate` swapped, what it left as it was and why; ``str()`` gives sentences."""

    entries: list[Entry] = field(default_factory=list)
    #: About the model as a whole.
    notes: list[str] = field(default_factory=list)
    #: None: not asked for. False: the numbers differed, and the model is as it was.
    verified: bool | None = None
    #: Elements of the weights of matrix products in swapped modules, and in the others by class.
    weights_swapped: int = 0
    weights_left: Counter[str] = field(default_factory=Counter)

    def _with(self, outcome: Outcome) -> list[Entry]:
        return [entry for entry in self.entries if entry.outcome == outcome]

    @property
    def swapped(self) -> list[Entry]:
        return self._with("swapped")

    @property
    def already(self) -> list[Entry]:
        return self._with("already")

    @property
    def left(self) -> list[Entry]:
        return self._with("left")

    def __getitem__(self, name: str) -> Entry:
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(f"no module {name!r} in this report")

    def __str__(self) -> str:
        counts = f"{len(self.swapped)} modules swapped, {len(self.left)} left as they were"
        if self.already:
            counts += f", {len(self.already)} swapped before"
        return "\n".join([f"{counts}.{self._share()}", *_grouped(self.entries), *self.notes])

    def _share(self) -> str:
        """The part of the matrix products that was reached, by their weights."""
        total = self.weights_swapped + self.weights_left.total()
        if not total:
            return ""
        share = (
            f" {self.weights_swapped / total:.0%} of the weights of products are in swapped modules"
        )
        most = [(n / total, kind) for kind, n in self.weights_left.most_common(3)]
        left = ", ".join(f"{part:.0%} in {kind}" for part, kind in most if part >= 0.01)
        return f"{share}{left and f'; left: {left}'}."


def _grouped(entries: Iterable[Entry]) -> list[str]:
    """One line per kind and fate, so that a deep model's report fits on a screen."""
    groups: dict[str, list[str]] = {}
    for entry in entries:
        groups.setdefault(str(entry).partition(": ")[2], []).append(entry.name or "(the model)")
    more = {
        told: f" and {len(names) - 1} more" * (len(names) > 1) for told, names in groups.items()
    }
    return [f"  {names[0]}{more[told]}: {told}" for told, names in groups.items()]
