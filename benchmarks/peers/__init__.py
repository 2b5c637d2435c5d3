"""Other software that does the same work, one file each.

A peer is a module in this folder with

    NAME: str                            what its rows are called
    PACKAGES: tuple[str, ...]            (optional) whose versions matter
    def available() -> str | None        why it cannot be used here, as a sentence, or None; without it
                                         the packages decide

and any of the following, each of which gives a function to time, or a sentence why there is none,
or None if it is about other work:

    def op(op, arguments)                takes and returns what ``reference.<op>`` does
    def encoder_layer(layer, arguments)  takes (x, mask, padding), as the torch.nn layer it is given
    def encoder(model, arguments)        the same for a torch.nn.TransformerEncoder
    def transformer(model, arguments)    takes (source, target), as the model it is given
    def hand_written(model, adapt)       gives ``adapt(run)``, where ``run`` takes what the model of
                                         `benchmarks.hand_written` takes that it is given
    def training(model, adapt)           the same for a model whose gradients are taken
    def generate(adapt)                  gives ``adapt(**settings)``, which takes (prompt,) and gives
                                         tokens by transformers' ``generate`` with these settings
    def decode(model, arguments, new)    takes (source,), gives (B, new) tokens, chosen greedily;
                                         the model is a `suites.decode.Translator`

Weights may be prepared (packed, converted) before the function is given: they stay the same while
it is timed. Activations may not: they change from call to call. What a peer returns is checked; if
it is wrong (`measure.benchmark_case.PEER_FACTOR`), it gets no speed.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import pkgutil
import signal
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
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


def missing(*packages: str) -> str | None:
    """Which of them is not installed, as a sentence, or None."""
    for package in packages:
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            return f"{package} is not installed (pip install {package})"
    return None


def why_not(peer: Any) -> str | None:
    """Why it cannot be used here, as a sentence, or None."""
    return peer.available() if hasattr(peer, "available") else missing(*peer.PACKAGES)


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
            offer = getattr(peer, kind)(*arguments) if (why := why_not(peer)) is None else why
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


class Remote:
    """The function that ``make(*arguments)`` gives, in a fresh process; all must be picklable.

    For libraries that bring threads of an OpenMP runtime which PyTorch uses as well: they slow down
    everybody else in their process for good. With more threads than processors GNU's runtime stops to
    spin, and each parallel loop then waits for the system to wake a thread.

    Raises, when made or called, what that process raised.
    """

    def __init__(self, make: Callable[..., Callable[..., Any]], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, make, arguments), daemon=True)
        process.start()
        theirs.close()
        self._stop = weakref.finalize(self, process.kill)
        self._receive()

    def __call__(self, *arguments: Any) -> Any:
        self._connection.send(arguments)
        return self._receive()

    def _receive(self) -> Any:
        result, error = self._connection.recv()
        if error is not None:
            raise error
        return result


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends this one
    try:
        call = make(*arguments)
        connection.send((None, None))
    except Exception as error:
        connection.send((None, error))
        return
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            return
        try:
            connection.send((call(*asked), None))
        except Exception as error:
            connection.send((None, error))
