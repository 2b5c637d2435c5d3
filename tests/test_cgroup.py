"""Limits of control groups, in both versions, and the advice on threads that follows from them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from transformer_fast import _cgroup, accelerate
from transformer_fast.__main__ import main
from transformer_fast._cgroup import cpu_quota, memory_limit

MIB = 1 << 20
Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file below ``tmp_path``, the root of the file system."""

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    return write


def test_the_memory_limit_is_the_smallest_of_all_groups(tmp_path: Path, write: Write) -> None:
    machine = memory_limit(tmp_path)
    assert machine == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    write("proc/self/cgroup", "0::/a/b")
    assert memory_limit(tmp_path) == machine
    write("sys/fs/cgroup/a/b/memory.max", "max")
    assert memory_limit(tmp_path) == machine
    write("sys/fs/cgroup/a/memory.max", str(200 * MIB))
    assert memory_limit(tmp_path) == 200 * MIB
    write("sys/fs/cgroup/memory.max", str(100 * MIB))  # a container sees its own group as the root
    assert memory_limit(tmp_path) == 100 * MIB
    write("proc/self/cgroup", "5:cpu:/c\n4:memory:/c/d\n1:name=systemd:/e")
    assert memory_limit(tmp_path) == machine
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", str(50 * MIB))
    assert memory_limit(tmp_path) == 50 * MIB


def test_the_cpu_quota_is_the_smallest_of_all_groups(tmp_path: Path, write: Write) -> None:
    assert cpu_quota(tmp_path) is None
    write("proc/self/cgroup", "0::/a/b")
    assert cpu_quota(tmp_path) is None
    write("sys/fs/cgroup/a/b/cpu.max", "max 100000")
    assert cpu_quota(tmp_path) is None
    write("sys/fs/cgroup/a/cpu.max", "400000 100000")
    assert cpu_quota(tmp_path) == 4.0
    write("sys/fs/cgroup/cpu.max", "75000 50000")
    assert cpu_quota(tmp_path) == 1.5


def test_the_cpu_quota_of_version_1(tmp_path: Path, write: Write) -> None:
    write("proc/self/cgroup", "5:cpu,cpuacct:/c\n4:memory:/c/d\n0::/")
    folder = "sys/fs/cgroup/cpu/c"
    write(f"{folder}/cpu.cfs_quota_us", "-1")
    write(f"{folder}/cpu.cfs_period_us", "100000")
    assert cpu_quota(tmp_path) is None
    write(f"{folder}/cpu.cfs_quota_us", "250000")
    assert cpu_quota(tmp_path) == 2.5


@pytest.mark.thorough
@pytest.mark.usefixtures("threads")
def test_more_threads_than_the_quota_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for threads, quota, expected in (
        (4, None, None), (4, 4.0, None), (4, 2.5, "2.5 CPUs: set torch.set_num_threads(2) or OMP_NU"),
        (2, 0.5, "0.5 CPUs: set torch.set_num_threads(1) or OMP_NUM_THREADS=1."), (1, 1.0, None),
    ):  # fmt: skip
        torch.set_num_threads(threads)
        monkeypatch.setattr(_cgroup, "cpu_quota", lambda quota=quota: quota)
        advice = _cgroup.thread_advice()
        report = str(accelerate(torch.nn.Linear(4, 4)))
        on_meta = str(accelerate(torch.nn.Linear(4, 4, device="meta")))
        assert main(["info"]) == 0
        told = capsys.readouterr().out
        if expected is None:
            assert advice is None
            assert "quota" not in report + told
        else:
            assert advice is not None
            assert f"PyTorch uses {threads} threads, and this container's quota is" in advice
            assert expected in advice
            assert advice in report
            assert advice in told
        assert "quota" not in on_meta
