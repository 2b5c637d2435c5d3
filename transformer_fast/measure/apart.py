"""Work in a subprocess, which isolates crashes and hangs of GPU kernels."""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

#: Returned by `lines_of` for a command that was still running at ``until``.
OUT_OF_TIME = "there was no time left"


def lines_of(
    command: Sequence[str], take: Callable[[Any], None], patience: float, until: float = math.inf
) -> str | None:
    """Runs a command and passes each line of JSON it prints to ``take``; returns an error or None.

    The command is killed after ``patience`` seconds without output, and at ``until``
    (`time.monotonic`).
    """
    problem: str | None = None
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):

        def give_up(why: str) -> None:
            nonlocal problem
            problem = why
            process.kill()

        def timer() -> threading.Timer:
            left = max(0.0, until - time.monotonic())
            silent = f"it said nothing for {patience:.0f} seconds"
            why = silent if patience < left else OUT_OF_TIME
            started = threading.Timer(min(patience, left), give_up, [why])
            started.start()
            return started

        waiting = timer()
        try:
            for line in process.stdout or ():
                waiting.cancel()
                take(json.loads(line))
                waiting = timer()
        except json.JSONDecodeError:
            give_up("it printed something else")
        except BaseException:
            process.kill()
            raise
        finally:
            waiting.cancel()
        status = process.wait()
        errors.seek(0)
        last = errors.read().strip().rpartition("\n")[2] or "without a word"
    if problem is None and status != 0:
        problem = f"signal {-status}" if status < 0 else f"status {status}: {last}"
    return problem
