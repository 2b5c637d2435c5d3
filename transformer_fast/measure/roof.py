"""Roofline: the shortest time in which this machine could do a piece of work.

It is the longer of FLOPs / peak rate and memory traffic / bandwidth. All rates are measured, never
read from a data sheet, and at about the same time as the work. On a GPU the probes are a large matrix
product and a large copy.

On the CPU the native module's probes measure three rates: multiply-adds in registers, and copying
and reading as many bytes as the work touches. So work that fits in a cache is compared with that
cache's bandwidth. The bytes that are written, and as many of those that are read, count at the rate
of copying; the rest of the reading counts at the rate of reading.

The rates are those of the instruction set in use. On CPUs with AMX fp32 has a second, higher
roofline: a product can be computed as six products of bfloat16 pieces, which run on AMX tiles. Such
kernels can exceed fp32's first roofline, its multiply-adds; `Roof.split_seconds` is the second one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import _native
from .clock import DeviceClock

#: Smallest buffer that probe_copy_bandwidth accepts, per thread.
_LEAST_BYTES = 4096
#: Largest buffer to probe. No cache is larger, so the rate would not change, only the probe's time.
_MOST_BYTES = 1 << 27
#: An fp32 value is split into three pieces; of the nine products of two values' pieces the three
#: smallest are below fp32's precision and are omitted.
_PRODUCTS_OF_PIECES = 6.0


@dataclass(frozen=True)
class Roof:
    """Measured rates (in FLOP/s and bytes/s) and the cost of the work (in FLOPs and bytes)."""

    peak: float
    #: Bytes read plus bytes written, per second.
    copy: float
    read: float
    flops: float
    #: ``bytes``: read plus written; ``written``: the written ones alone.
    bytes: float
    written: float
    #: The rate of fp32 products computed from bfloat16 pieces on AMX tiles; None without AMX.
    split_peak: float | None = None

    @property
    def _moving(self) -> float:
        copied = min(2.0 * self.written, self.bytes)
        return copied / self.copy + (self.bytes - copied) / self.read

    @property
    def seconds(self) -> float:
        return max(self.flops / self.peak, self._moving)

    @property
    def split_seconds(self) -> float | None:
        """`seconds` at `split_peak`; None if that is not the higher rate."""
        if self.split_peak is None or self.split_peak <= self.peak:
            return None
        return max(self.flops / self.split_peak, self._moving)

    @property
    def bound(self) -> str:
        """The limit of the work: 'compute' or 'bandwidth'."""
        return "compute" if self.flops / self.peak >= self._moving else "bandwidth"

    def better(self, other: Roof | None) -> Roof:
        """Returns the higher of two measurements of each rate, since noise can only lower them."""
        if other is None:
            return self
        splits = [peak for peak in (self.split_peak, other.split_peak) if peak is not None]
        return replace(
            self, peak=max(self.peak, other.peak), copy=max(self.copy, other.copy),
            read=max(self.read, other.read), split_peak=max(splits, default=None),
        )  # fmt: skip


def why_no_roof(device: torch.device) -> str | None:
    """Returns the reason why the device cannot be probed, or None."""
    if device.type == "cuda":
        return None
    if device.type != "cpu":
        return f"there are no probes for {device.type} devices"
    return _native.why_not


def peaks(*names: str) -> dict[str, float]:
    """Measures the arithmetic rates of the instruction set in use, in Gflop/s, on PyTorch's threads.

    The rates are "fp32"; "bf16" and "int8" with instructions for them; "fp32 of bf16 pieces" with AMX.
    ``names``: rates to measure, if available; none given: all of them.
    """
    module = _native.module
    if module is None:
        return {}
    threads, dots, pieces = torch.get_num_threads(), module.dot_types(), module.isa() == "amx"
    probes: dict[str, tuple[bool, Callable[[int], float], float]] = {
        "fp32": (True, module.probe_fma, 1.0),
        # Kernels convert to float32 where that is faster than dot products (Intel without AMX).
        "bf16": ("bf16" in dots, lambda n: max(module.probe_bf16_dot(n), module.probe_fma(n)), 1.0),
        "int8": ("int8" in dots, module.probe_int8_dot, 1.0),
        "fp32 of bf16 pieces": (pieces, module.probe_bf16_dot, _PRODUCTS_OF_PIECES),
    }
    return {
        name: run(threads) / products
        for name, (there, run, products) in probes.items()
        if there and name in (names or probes)
    }


def _rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """Returns the best rate of five runs."""
    clock = DeviceClock(device)
    work()
    return max(amount / clock(lambda _: work(), 1, 1).device for _ in range(5))


def _gpu_rates(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    size = 4096 if dtype in (torch.float32, torch.float64) else 8192
    with torch.cuda.device(device):
        a = torch.randn(size, size, device=device, dtype=dtype)
        b, c = torch.randn_like(a), torch.empty_like(a)
        peak = _rate(lambda: torch.mm(a, b, out=c), 2.0 * size**3, device)
        source = torch.empty(1 << 28, device=device, dtype=torch.uint8)
        target = torch.empty_like(source)
        return peak, _rate(lambda: target.copy_(source), 2.0 * source.numel(), device)


def probe(
    flops: float, bytes: float, written: float, dtype: torch.dtype,
    device: torch.device | str = "cpu", product: str | None = None,
) -> Roof | None:  # fmt: skip
    """Measures the rates now, for work of that size; returns None if the device cannot be probed.

    ``product``: the kind of products, see `peaks`; None, or a kind that the instruction set has no
    instructions for: that of the dtype.
    Takes a few tenths of a second, on PyTorch's number of threads.
    """
    device = torch.device(device)
    if why_no_roof(device) is not None:
        return None
    if device.type == "cuda":
        peak, copy = _gpu_rates(dtype, device)
        return Roof(peak, copy, copy, flops, bytes, written)
    module: Any = _native.module
    threads = torch.get_num_threads()
    size = int(min(_MOST_BYTES, max(bytes, 4 * _LEAST_BYTES * threads)))
    # The probe copies between two buffers of this size.
    copy = module.probe_copy_bandwidth(size // 2, threads) * 1e9
    # A copy reads, too, so reading is at least as fast; a lower measurement is noise.
    read = max(copy, module.probe_read_bandwidth(size, threads) * 1e9)
    kinds = (product or "", "bf16" if dtype == torch.bfloat16 else "fp32")
    known = ("fp32", *module.dot_types())
    kind = next((kind for kind in kinds if kind in known), "fp32")
    split = "fp32 of bf16 pieces" if dtype == torch.float32 and product is None else kind
    found = {name: 1e9 * rate for name, rate in peaks(kind, split).items()}
    # fp16 is computed in fp32; fp64 has half as many SIMD lanes.
    peak = found.pop(kind) / (2.0 if dtype == torch.float64 else 1.0)
    return Roof(peak, copy, read, flops, bytes, written, found.get(split))
