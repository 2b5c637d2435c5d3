"""Candidates in processes of their own.

Libraries that bring threads of an OpenMP runtime which PyTorch uses as well slow down everybody
else in their process for good: with more threads than processors GNU's runtime stops to spin, and
each parallel loop then waits for the system to wake a thread.
"""

from __future__ import annotations

import multiprocessing
import signal
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Remote:
    """The function that ``make(*arguments)`` gives, in a fresh process; all must be picklable.

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
