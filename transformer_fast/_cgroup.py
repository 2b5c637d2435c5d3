"""Limits of the process's control group (a container): memory, and the quota of CPU time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import torch


def _values(root: Path, controller: str, file: str, file_1: str) -> Iterator[tuple[Path, str]]:
    """Yields the group's limits and those of its parents, each with its folder.

    ``file``, ``file_1``: names in versions 2 and 1 of control groups.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        mount, name = root / "sys/fs/cgroup", file
        if controllers:  # version 1
            if controller not in controllers.split(","):
                continue
            mount, name = mount / controller, file_1
        group = mount / path.lstrip("/")
        # In a container the path may be the host's. Then only the root of the mount exists.
        for folder in (group, *group.parents):
            with contextlib.suppress(OSError):
                yield folder, (folder / name).read_text()
            if folder == mount:
                break


def memory_limit(root: Path = Path("/")) -> int:
    """Returns the memory limit of the process in bytes: the machine's, or its control group's."""
    sizes = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for _, text in _values(root, "memory", "memory.max", "memory.limit_in_bytes"):
        with contextlib.suppress(ValueError):  # "max"
            sizes.append(int(text))
    return min(sizes)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Returns the CPU quota of the process's control group, in CPUs; None if there is no limit."""
    quotas = []
    for folder, text in _values(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):  # "max 100000"
            # In version 2 the period, in microseconds too, is in the same line.
            quota, *period = text.split()
            period = period or [(folder / "cpu.cfs_period_us").read_text()]
            if int(quota) > 0:  # version 1 has -1 for no limit
                quotas.append(int(quota) / int(period[0]))
    return min(quotas, default=None)


def thread_advice() -> str | None:
    """Returns a sentence if PyTorch has more threads than the group has CPUs, else None.

    The threads of a parallel loop wait for the last one, and the kernel stops all of them when the quota
    of a period (mostly 100 ms) is used up.
    """
    quota, threads = cpu_quota(), torch.get_num_threads()
    if quota is None or threads <= quota:
        return None
    best, plural = max(1, int(quota)), "s" * (quota != 1)
    return (
        f"PyTorch uses {threads} threads, and this container's quota is {quota:.3g} CPU{plural}: set "
        f"torch.set_num_threads({best}) or OMP_NUM_THREADS={best}."
    )
