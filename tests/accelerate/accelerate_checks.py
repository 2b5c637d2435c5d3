"""Helpers of the tests of `accelerate` and of the torch.compile backend: models, inputs, checks."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from module_cases import CASES, causal
from module_checks import assert_same_numbers
from torch import Tensor

from transformer_fast import compile_backend
from transformer_fast.compile.graph_report import GraphReport
from transformer_fast.measure.calls import record

B, T, S, M, H, F = 3, 7, 5, 16, 4, 24


def encoder_layer(**kwargs: Any) -> torch.nn.TransformerEncoderLayer:
    return torch.nn.TransformerEncoderLayer(M, H, F, batch_first=True, **kwargs)


def decoder_layer(**kwargs: Any) -> torch.nn.TransformerDecoderLayer:
    return torch.nn.TransformerDecoderLayer(M, H, F, batch_first=True, **kwargs)


def encoder(**kwargs: Any) -> torch.nn.TransformerEncoder:
    layer = encoder_layer(**kwargs)
    return torch.nn.TransformerEncoder(layer, 2, torch.nn.LayerNorm(M), enable_nested_tensor=False)


def form(model: torch.nn.Module) -> list[tuple[type, set[str]]]:
    """Returns the types and attribute names of all modules, which `restore` has to reset."""
    return [(type(module), set(module.__dict__)) for module in model.modules()]


def calls_of_layers(run: Callable[[], Any]) -> int:
    """Returns the number of sub-layers that ran in kernels for whole layers."""
    with torch.no_grad(), record() as found:
        run()
    return sum(n for (name, _), n in found.calls.items() if name.endswith("sub-layer"))


class TextModel(torch.nn.Module):
    """A user's model: embeddings, torch.nn.Transformer with all of its masks, and a head."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, M)
        self.transformer = torch.nn.Transformer(M, H, 2, 2, F, batch_first=True, **kwargs)
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(M), torch.nn.Linear(M, 11))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        length = target.shape[1]
        decoded = self.transformer(
            self.embedding(source),
            self.embedding(target),
            tgt_mask=causal(length),
            src_key_padding_mask=source == 0,
            tgt_key_padding_mask=target == 0,
            memory_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        # Results at padded positions are unspecified, and differ by mode in PyTorch itself.
        return self.head(decoded) * (target != 0).unsqueeze(-1)


class Written(torch.nn.Module):
    """A user's module with the given parts, parameters, buffers and ``forward(self, ...)``."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.written = forward
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.written(self, *args)


def tokens() -> tuple[Tensor, Tensor]:
    source, target = torch.randint(1, 11, (B, S)), torch.randint(1, 11, (B, T))
    source[1, 3:], source[2, 1:], target[0, 4:], target[2, 2:] = 0, 0, 0, 0
    return source, target


def _modules() -> dict[str, Callable[[], tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]]]:
    return {
        name: lambda case=case: (case.make(torch.nn), case.inputs(), case.masks)  # type: ignore[misc]
        for name, case in CASES.items()
        if not name.startswith(("Linear", "RMSNorm")) and "no parameters" not in name
    }


#: Modules of users, with inputs for them.
MODELS = {**_modules(), "text model": lambda: (TextModel(dropout=0.0), tokens(), {})}


def compiled(
    model: Any, quantize: str | None = None, **kwargs: Any
) -> tuple[Any, list[GraphReport]]:
    reports: list[GraphReport] = []
    options = {"report": reports.append, "quantize": quantize}
    return torch.compile(model, backend=compile_backend, options=options, **kwargs), reports


def check(model: torch.nn.Module, *args: Any, **counts: int) -> list[GraphReport]:
    """Asserts the counts of rewritten ops, and equal results in inference and in training.

    Ops that ``counts`` does not name are not checked.
    """
    ours, reports = compiled(copy.deepcopy(model))
    assert_same_numbers(ours.train(), model.train(), args, {}, grad=True)
    ours, more = compiled(copy.deepcopy(model))
    assert_same_numbers(ours.eval(), model.eval(), args, {}, grad=False)
    for report in (*reports, *more):
        for op, count in counts.items():
            assert report.counts.get(op, 0) == count, str(report)
    assert reports
    assert more
    return reports


def check_training(
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    loss: Callable[[Any, int], Tensor],
    steps: int = 6,
    rate: float = 1e-3,
) -> None:
    """Asserts that steps of Adam on ``loss(model, step)`` give the same losses for both models."""
    losses: list[list[float]] = []
    for model in (theirs, ours):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, rate)
        losses.append([])
        for step in range(steps):
            found = loss(model, step)
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
            losses[-1].append(found.item())
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


_LOADED = """
import sys, torch
sys.modules["transformer_fast"] = None
for model, inputs, expected in torch.load("models.pt", weights_only=False):
    found = model(**inputs)
    found = found if isinstance(found, torch.Tensor) else found[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
"""


def check_without_this_library(
    cases: list[tuple[Any, dict[str, Tensor]]], folder: Path
) -> list[Any]:
    """Asserts that pickled models give the same first output in a process without this library.

    Returns the models as unpickled in this process. One process checks all of them, since it has to
    import torch.
    """
    saved = []
    for model, inputs in cases:
        with torch.no_grad():
            found = model(**inputs)
        saved.append((model, inputs, found if isinstance(found, Tensor) else found[0]))
    torch.save(saved, folder / "models.pt")
    subprocess.run([sys.executable, "-W", "ignore", "-c", _LOADED], check=True, cwd=folder)
    return [case[0] for case in torch.load(folder / "models.pt", weights_only=False)]
