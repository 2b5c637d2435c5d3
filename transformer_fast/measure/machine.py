"""Description of the machine, recorded with every result."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import torch

from .. import _native
from .._version import __version__

#: Fields that must be equal for two results to be compared.
IDENTITY = ("cpu", "logical_cpus", "threads", "isa", "gpu")


#: Generations of server CPUs: (vendor, family, models (None: all), name).
_GENERATIONS: tuple[tuple[str, int, range | None, str], ...] = (
    ("AMD", 23, range(16), "Zen"),
    ("AMD", 23, range(48, 64), "Zen 2"),
    ("AMD", 25, range(16), "Zen 3"),
    ("AMD", 25, range(16, 32), "Zen 4"),
    ("AMD", 25, range(160, 176), "Zen 4c"),
    ("AMD", 26, None, "Zen 5"),
    ("Intel", 6, range(85, 86), "Skylake or Cascade Lake"),
    ("Intel", 6, range(106, 109), "Ice Lake"),
    ("Intel", 6, range(143, 144), "Sapphire Rapids"),
    ("Intel", 6, range(207, 208), "Emerald Rapids"),
    ("Intel", 6, range(173, 175), "Granite Rapids"),
)
#: fp32 Gflop/s per thread that only 512-bit units reach: with 256-bit ones, Zen 4 needs 5 GHz.
_WIDE_UNITS = 160.0


def generation(machine: dict[str, Any]) -> str | None:
    """Returns the CPU's generation, such as 'Zen 4', by its family and model; None if unknown.

    Old results have no family and model. In those an AMD CPU with AVX-512-BF16 is Zen 4, or Zen 5 if
    the measured peak needs 512-bit units; an Intel CPU with AMX is Sapphire Rapids or later.
    """
    name, isa = machine["cpu"], machine.get("cpu_isa") or machine["isa"]
    numbers = re.search(r"family (\d+), model (\d+)", name)
    if numbers is not None:
        family, model = map(int, numbers.groups())
        for vendor, of_family, models, known in _GENERATIONS:
            if vendor in name and family == of_family and (models is None or model in models):
                return known
        # A hypervisor may report a model that does not have the instructions.
        return "AMX, cloud VM" if "Intel" in name and isa == "amx" else None
    peak = (machine.get("peaks") or {}).get("fp32")
    if name == "AMD EPYC" and machine["isa"] == isa == "avx512_bf16" and peak is not None:
        return "Zen 5" if peak > _WIDE_UNITS * machine["threads"] else "Zen 4"
    return "Sapphire Rapids or later" if "Intel" in name and isa == "amx" else None


def cpu(machine: dict[str, Any]) -> str:
    """Returns the CPU's name for display, with the generation if known: 'AMD EPYC (Zen 4)'."""
    known = generation(machine)
    if known is None:
        return str(machine["cpu"])
    return re.sub(r"\(R\)|\(TM\)| Processor|, family.*", "", machine["cpu"]) + f" ({known})"


def governor() -> str | None:
    """Returns the CPU frequency governor, or None if the system does not report it."""
    path = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None


_ROOT = Path(__file__).resolve().parents[2]


def git(*arguments: str) -> str | None:
    """Returns the output of a git command in this checkout; None without one, or if git fails."""
    if not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), *arguments]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> str | None:
    """Returns the git commit of this checkout, with '+' if files differ; None without a checkout."""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "transformer_fast", "csrc")
    head = git("rev-parse", "--short=12", "HEAD")
    return None if head is None or changed is None else head + ("+" if changed else "")


def taken(machine: dict[str, Any]) -> str:
    """Returns when results were taken: '2026-11-26, f2ab0742f354' (date and commit)."""
    return ", ".join(filter(None, (machine["date"][:10], machine["commit"])))


def describe(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Returns hardware and versions that may affect measurements on ``device``; JSON-serialisable."""
    device = torch.device(device)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "cpu": _native.cpu_model(),
        "logical_cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": _native.module.isa() if _native.module is not None else None,
        "cpu_isa": _native.module.supported_isas()[-1] if _native.module is not None else None,
        "torch_isa": torch.backends.cpu.get_cpu_capability().lower(),
        "gpu": gpu,
        "governor": governor(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformer_fast": __version__,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def forced_isa(machine: dict[str, Any]) -> str | None:
    """Returns the instruction set in use if the CPU supports a higher one, else None."""
    highest = machine.get("cpu_isa")
    return machine["isa"] if highest is not None and machine["isa"] != highest else None


def line(machine: dict[str, Any]) -> str:
    """Returns a description of the machine in one line, for display."""
    isa = machine["isa"] or "no native module"
    if forced_isa(machine) is not None:
        theirs = f"PyTorch to {machine['torch_isa']}"
        isa = f"held to {isa}, {theirs} (the CPU has {machine['cpu_isa']})"
    parts = [
        machine["gpu"],
        cpu(machine),
        f"{machine['threads']} threads" if machine["threads"] != 1 else "1 thread",
        isa,
        f"governor {machine['governor']}" if machine["governor"] else None,
        f"torch {machine['torch']}",
        f"transformer_fast {machine['transformer_fast']}"
        + (f" ({machine['commit']})" if machine["commit"] else ""),
        machine["date"][:10],
    ]
    return " · ".join(part for part in parts if part)


def peaks_line(machine: dict[str, Any]) -> str:
    """Returns a sentence with the machine's arithmetic rates (see `roof.peaks`), or ''."""
    rates = [f"{name} {rate:.0f}" for name, rate in (machine.get("peaks") or {}).items()]
    return f"Measured peaks in Gflop/s: {', '.join(rates)}." if rates else ""


def slug(machine: dict[str, Any]) -> str:
    """Returns a file name for the machine's results; a forced instruction set is its suffix."""
    text = re.sub(r"\((r|tm)\)|\bcpu\b|\bprocessor\b|@[^,]*", " ", machine["cpu"].lower())
    isa = machine.get("cpu_isa") or machine["isa"] or "pure"
    threads = f"{machine['threads']}-threads"
    parts = [machine["gpu"], text, isa, threads, forced_isa(machine)]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(p.lower() for p in parts if p)).strip("-")


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Returns a sentence for each field of `IDENTITY` that differs; empty if the machines are equal."""
    return [
        f"{key} is {one.get(key)!r} in one and {other.get(key)!r} in the other"
        for key in IDENTITY
        if one.get(key) != other.get(key)
    ]
