"""Reports of the graph rewriter: what it rewrote, and what it left unchanged and why."""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field

from torch.fx import Node


@dataclass(frozen=True)
class Match:
    """One rewritten or unchanged op, with its place in the user's code."""

    #: Name of the op: this library's if rewritten, else PyTorch's.
    op: str
    #: "file:line" in the user's code; empty if torch.compile does not record it.
    where: str
    #: Reason why the op was left unchanged; empty if it was rewritten.
    reason: str = ""

    def __str__(self) -> str:
        place = f" at {self.where}" if self.where else ""
        return f"{self.op}{place}" + (f" left unchanged: {self.reason}" if self.reason else "")


@dataclass
class GraphReport:
    """Result of rewriting one captured graph; ``str()`` describes it in sentences."""

    rewritten: list[Match] = field(default_factory=list)
    left: list[Match] = field(default_factory=list)
    #: Number of unchanged calls by function name.
    others: Counter[str] = field(default_factory=Counter)
    #: The number of sub-layers of each call that runs several.
    stacks: list[int] = field(default_factory=list)
    #: Whether inductor compiles the unchanged calls, and if not, why not.
    rest: str = ""

    @property
    def counts(self) -> dict[str, int]:
        """Insertions of each op; the key "int8_" + op: how many of these run in 8 bits."""
        return dict(Counter(match.op for match in self.rewritten))

    def __str__(self) -> str:
        counts = self.counts
        int8 = {op.removeprefix(_INT8): counts.pop(op) for op in [*counts] if op.startswith(_INT8)}
        lines = [f"rewritten: {_listed(counts) or 'nothing'}."]
        if int8:
            lines.append(f"  in 8 bits: {_listed(int8)}.")
        if self.stacks:
            count = len(self.stacks)
            lines.append(f"  {sum(self.stacks)} sub-layers run in {count} call{'s' * (count > 1)}.")
        lines += [f"  {match}" for match in self.left]
        if self.others:
            names = ", ".join(f"{count} {name}" for name, count in self.others.most_common(12))
            lines.append(f"  {self.rest or 'left to eager PyTorch'}: {names}.")
        return "\n".join(lines)


#: Prefix of the names of ops whose products were replaced by 8-bit products.
_INT8 = "int8_"


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {op}" for op, count in counts.items())


_reports: deque[GraphReport] = deque(maxlen=256)


def keep_report(report: GraphReport) -> None:
    _reports.append(report)


def compile_reports(clear: bool = False) -> list[GraphReport]:
    """Returns one `GraphReport` for each graph that ``backend="transformer_fast"`` compiled, in
    order.

    A model has several if torch.compile splits it ("graph break"). At most 256 reports are kept.

    Args:
        clear: also delete the kept reports.
    """
    reports = list(_reports)
    if clear:
        _reports.clear()
    return reports


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def where(node: Node) -> str:
    """Returns "file:line" of the user's code that created the node; empty if not recorded."""
    trace = node.meta.get("stack_trace") or ""
    frames = [f for f in _FRAME.findall(trace) if "/torch/" not in f[0].replace("\\", "/")]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else ""
