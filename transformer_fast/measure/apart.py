"""Work in a subprocess, which isolates crashes and hangs of GPU kernels."""

from __future__ import annotations

import json
import math
import queue
import subprocess
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
    lines: queue.Queue[str | None] = queue.Queue()
    errors: list[str] = []
    problem = None
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:

        def read() -> None:
            for line in process.stdout or ():
                lines.put(line)
            lines.put(None)

        readers = [
            threading.Thread(target=read, daemon=True),
            threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True),
        ]
        for reader in readers:
            reader.start()
        done = False
        try:
            while True:
                left = max(0.0, until - time.monotonic())
                line = lines.get(timeout=min(patience, left))
                if line is None:
                    break
                take(json.loads(line))
            done = True
        except queue.Empty:
            silent = f"it said nothing for {patience:.0f} seconds"
            problem = OUT_OF_TIME if time.monotonic() >= until else silent
        except json.JSONDecodeError:
            problem = "it printed something else"
        finally:
            if not done:
                process.kill()
            status = process.wait()
            for reader in readers:
                reader.join()
    if problem is None and status != 0:
        last = errors[-1].strip() if errors else "without a word"
        problem = f"signal {-status}" if status < 0 else f"status {status}: {last}"
    return problem
