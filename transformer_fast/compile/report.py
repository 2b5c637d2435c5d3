"""What the graph rewriter found, and what it did not recognise."""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field

from torch.fx import Node


@dataclass(frozen=True)
class Found:
    """One place of the user's code."""

    #: The name of an op of ours, or of PyTorch's if it was left.
    op: str
    #: "file:line" of the user's code, where torch.compile knows it.
    where: str
    #: Empty if it was rewritten; else why not.
    reason: str = ""

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.op}{place}" + (f" left unchanged: {self.reason}" if self.reason else "")


@dataclass
class GraphReport:
    """What became of one captured graph; ``str()`` gives it in sentences."""

    rewritten: list[Found] = field(default_factory=list)
    left: list[Found] = field(default_factory=list)
    #: Calls that stay as the user wrote them, by name.
    others: Counter[str] = field(default_factory=Counter)
    #: How they run, by default: whether inductor compiles them, and why not.
    rest: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """How often each op was put in."""
        return dict(Counter(found.op for found in self.rewritten))

    def __str__(self) -> str:
        ops = ", ".join(f"{count} {op}" for op, count in self.counts.items()) or "nothing"
        lines = [f"rewritten: {ops}."]
        lines += [f"  {found}" for found in self.left]
        if self.others:
            names = ", ".join(f"{count} {name}" for name, count in self.others.most_common(12))
            lines.append(f"  {self.rest or 'left to eager PyTorch'}: {names}.")
        return "\n".join(lines)


_reports: deque[GraphReport] = deque(maxlen=256)


def remember(report: GraphReport) -> None:
    _reports.append(report)


def compile_reports(clear: bool = False) -> list[GraphReport]:
    """One `GraphReport` for each graph that ``backend="transformer_fast"`` has compiled, in order.

    A model that torch.compile splits ("graph break") has several. At most 256 are kept.

    Args:
        clear: forget them afterwards.
    """
    found = list(_reports)
    if clear:
        _reports.clear()
    return found


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def where(node: Node) -> str:
    """The innermost line of the user's code that made the node."""
    trace = node.meta.get("stack_trace") or ""
    frames = [f for f in _FRAME.findall(trace) if "/torch/" not in f[0].replace("\\", "/")]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
