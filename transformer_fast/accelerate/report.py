"""The report of `accelerate`: what happened to each module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..dispatch import Explanation

Outcome = Literal["swapped", "already", "left"]

#: Sequences per call, and tokens per sequence, for which the report names backends. At this size no
#: size limit excludes a backend, unless a module has very few features.
BATCH, LENGTH = 8, 512

#: Backend name -> its name in the report.
_BACKENDS = {
    "cpu": "CPU kernels",
    "cuda": "CUDA kernels",
    "reference": "the reference",
    "torch": "PyTorch",
    "triton": "Triton kernels",
}


@dataclass
class Int8Report:
    """The quantised weights of a model, and the error of its results on the inputs of ``verify``."""

    #: Number of quantised modules, bytes of their weights before and after (scales included).
    count: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    #: False: the float weights were freed.
    keeps_weights: bool = True
    #: Class -> bytes of its weights of two or more dimensions that stay in float.
    float_bytes: Counter[str] = field(default_factory=Counter)
    #: Names of the modules whose inputs are multiplied by factors, see ``calibration``.
    smoothed: list[str] = field(default_factory=list)
    #: |error| / |outputs|, and the lowest cosine of a row of outputs with the float model's; None:
    #: not measured.
    error: float | None = None
    cosine: float | None = None
    #: The module with the largest relative error on the inputs that it had in the float model.
    worst: str = ""
    worst_error: float | None = None
    worst_cosine: float | None = None

    def __str__(self) -> str:
        if self.count == 0:
            return "Int8: no module is quantised; the report has the reason for each."
        kept = "beside" if self.keeps_weights else "in place of"
        lines = [
            f"Int8: {self.count} modules with {_megabytes(self.bytes_after)} of weights {kept} "
            f"{_megabytes(self.bytes_before)}."
        ]
        if self.float_bytes:
            left = ", ".join(f"{k} {_megabytes(n)}" for k, n in self.float_bytes.most_common())
            lines.append(
                f"Not in int8: {left} (tables are looked up, and convolutions have no kernel)."
            )
        if self.smoothed:
            lines.append(
                f"Calibration (SmoothQuant): rescaled the inputs of {len(self.smoothed)} modules "
                f"({self.smoothed[0] or 'the model'}, ...)."
            )
        if self.error is not None:
            lines.append(
                f"Int8 against float: relative error {self.error:.2g}, lowest cosine {self.cosine:.6f}; "
                f"largest in {self.worst or 'the model'}: {self.worst_error:.2g}, cosine "
                f"{self.worst_cosine:.6f}. Checked: outputs are finite where the float "
                "model's are. Decide whether the error is acceptable."
            )
        return "\n".join(lines)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.3g} MB"


@dataclass(frozen=True)
class Entry:
    """One module that `accelerate` replaced, or left unchanged for a reason."""

    #: Qualified name; "" is the model itself.
    name: str
    #: Original class.
    kind: str
    outcome: Outcome
    #: Class after the replacement; empty if the module was left unchanged.
    now: str = ""
    #: Reason why the module was left unchanged. For a replaced module a remark, or empty.
    reason: str = ""
    #: Op -> backend, without and with gradients, for calls of 8 sequences of 512 tokens. For ops
    #: that are missing in ``training``, the original forward runs there. `transformer_fast.explain`
    #: gives the backend of any other call.
    inference: dict[str, Explanation] = field(default_factory=dict)
    training: dict[str, Explanation] = field(default_factory=dict)
    #: Op -> the reason why it is not fused; the module calls its parts one by one.
    in_parts: dict[str, str] = field(default_factory=dict)
    #: True if the module's weight is quantised.
    int8: bool = False

    def __str__(self) -> str:
        head = f"{self.name or '(the model)'}: {self.kind}"
        if self.outcome == "left":
            return f"{head} left unchanged: {self.reason}"
        change = "is already" if self.outcome == "already" else "replaced by"
        notes = [*_uses(self.inference)]
        original = [op for op in self.inference if op not in self.training]
        moved = {
            op: found
            for op, found in self.training.items()
            if op not in self.inference or self.inference[op].backend != found.backend
        }
        notes += [f"with gradients {use}" for use in _uses(moved)]
        if any(op.startswith("int8") for op in self.inference):
            notes.append(
                "training is not supported: calls with gradients raise NotImplementedError"
            )
        elif original:
            notes.append(f"with gradients {_verb(original)} the original forward")
        notes += [f"{op} is not fused: {reason}" for op, reason in self.in_parts.items()]
        notes += [self.reason] if self.reason else []
        return f"{head} {change} {self.now}" + (f" ({'; '.join(notes)})" if notes else "")

    def why_not(self) -> dict[str, str]:
        """Returns, for each op that runs on the reference, the reason against each kernel."""
        return {
            f"{op}, {mode}": str(explanation)
            for mode, found in (("inference", self.inference), ("training", self.training))
            for op, explanation in found.items()
            if explanation.backend in (None, "reference")
        }


def _uses(found: dict[str, Explanation]) -> list[str]:
    """Returns one clause per backend, with its ops, and one per op that has none."""
    ops: dict[str, list[str]] = {}
    for op, explanation in found.items():
        if explanation.backend is not None:
            ops.setdefault(explanation.backend, []).append(op)
    uses = [f"{_verb(names)} {_BACKENDS.get(name, name)}" for name, names in ops.items()]
    failed = (f"{op}: {e.remark or 'no backend'}" for op, e in found.items() if e.backend is None)
    return [*uses, *failed]


def _verb(ops: list[str]) -> str:
    """Returns for example ``"linear and attention use"``."""
    listed = " and ".join([", ".join(ops[:-1]), ops[-1]] if len(ops) > 1 else ops)
    return f"{listed} {'use' if len(ops) > 1 else 'uses'}"


@dataclass
class Report:
    """The modules that `accelerate` replaced and left unchanged; ``str()`` formats sentences."""

    entries: list[Entry] = field(default_factory=list)
    #: Remarks about the model as a whole.
    notes: list[str] = field(default_factory=list)
    #: None: no ``verify`` argument. False: it found a difference, and the model was restored.
    verified: bool | None = None
    #: Number of elements of matrix-multiplication weights in replaced modules, and in others by
    #: class.
    weights_swapped: int = 0
    weights_left: Counter[str] = field(default_factory=Counter)
    #: None: ``accelerate`` was called without ``quantize``.
    int8: Int8Report | None = None

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
        count = len(self.swapped)
        counts = f"{count} module{'s' * (count != 1)} replaced, {len(self.left)} left unchanged"
        if self.already:
            counts += f", {len(self.already)} replaced before"
        lines = [f"{counts}.{self._share()}", *_grouped(self.entries), *self.notes]
        lines += [] if self.int8 is None else [str(self.int8)]
        if any(entry.inference or entry.training for entry in self.entries):
            lines[1:1] = [_SIZES]
        return "\n".join(lines)

    def _share(self) -> str:
        """Returns the share of matrix-multiplication weights in replaced modules, as a sentence."""
        total = self.weights_swapped + self.weights_left.total()
        if not total:
            return ""
        share = self.weights_swapped / total
        most = [(n / total, kind) for kind, n in self.weights_left.most_common(3)]
        others = "".join(f"; {kind} holds {part:.0%}" for part, kind in most if part >= 0.01)
        return (
            f" The replaced modules hold {share:.0%} of the matrix-multiplication weights{others}."
        )


_SIZES = (
    f"Backends are for {BATCH} sequences of {LENGTH} tokens; smaller calls may use PyTorch, see "
    "transformer_fast.explain."
)


def _grouped(entries: Iterable[Entry]) -> list[str]:
    """Returns one line per kind and outcome, so that the report of a deep model fits a screen."""
    groups: dict[str, list[str]] = {}
    for entry in entries:
        groups.setdefault(str(entry).partition(": ")[2], []).append(entry.name or "(the model)")
    more = {
        text: f" and {len(names) - 1} more" * (len(names) > 1) for text, names in groups.items()
    }
    return [f"  {names[0]}{more[text]}: {text}" for text, names in groups.items()]
