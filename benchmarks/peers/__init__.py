"""Other software that does the same work, one file each.

A peer is a module in this folder with

    NAME: str                            what its rows are called
    PACKAGES: tuple[str, ...]            (optional) whose versions matter
    def available() -> str | None        why it cannot be used here, as a sentence, or None

and any of the following, each of which gives a function to time, or a sentence why there is none,
or None if it is about other work:

    def op(op, arguments)                takes and returns what ``reference.<op>`` does
    def encoder_layer(layer, arguments)  takes (x, mask, padding), as the torch.nn layer it is given
    def encoder(model, arguments)        the same for a torch.nn.TransformerEncoder
    def transformer(model, arguments)    takes (source, target), as the model it is given
    def hand_written(model, adapt)       gives ``adapt(run)``, where ``run`` takes what the model of
                                         `benchmarks.hand_written` takes that it is given
    def decode(model, arguments, new)    takes (source,), gives (B, new) tokens, chosen greedily;
                                         the model is a `suites.decode.Translator`

Weights may be prepared (packed, converted) before the function is given: they stay the same while
it is timed. Activations may not: they change from call to call. What a peer returns is checked; if
it is wrong (`measure.benchmark_case.PEER_FACTOR`), it gets no speed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from transformer_fast.measure.benchmark_case import Candidate

#: What a peer's functions give: something to run, or why not.
Offer = Callable[..., Any] | str | None


def load(names: Sequence[str] | None = None) -> list[ModuleType]:
    """The peers in this folder, by file name; None: all."""
    found = sorted(module.name for module in pkgutil.iter_modules(__path__))
    for name in names or ():
        if name not in found:
            raise ValueError(f"there is no peer {name!r}; there are: {', '.join(found)}")
    wanted = found if names is None else [name for name in found if name in names]
    return [importlib.import_module(f"{__name__}.{name}") for name in wanted]


def versions(peers: Sequence[ModuleType]) -> dict[str, str]:
    """Of the peers' packages, those that are installed."""
    found = {}
    for package in sorted({name for peer in peers for name in getattr(peer, "PACKAGES", ())}):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def candidates(peers: Sequence[ModuleType], kind: str, *arguments: Any) -> list[Candidate]:
    """The peers that know this kind of work ('op', ...); with the reason, if they cannot."""
    found = []
    for peer in peers:
        if not hasattr(peer, kind):
            continue
        offer: Offer
        try:
            offer = getattr(peer, kind)(*arguments) if (why := peer.available()) is None else why
        except Exception as error:
            # Software of others may break in its own ways; that must not end the run.
            lines = str(error).strip().splitlines() or ["no message"]
            offer = f"{type(error).__name__}: {lines[0]}"
        if offer is None:
            continue
        if isinstance(offer, str):
            found.append(Candidate(peer.NAME, None, offer, ours=False))
        else:
            found.append(Candidate(peer.NAME, offer, ours=False))
    return found
