"""The roof: the shortest time in which this machine could do a piece of work.

The longer of arithmetic / peak rate and memory traffic / bandwidth, all rates measured (never read
from a data sheet) beside the work they measure. On the CPU they are the native module's probes: a
loop of multiply-adds in registers, and copying and reading as many bytes as the work touches, so
that work which fits in a cache is held to that cache. What is written is held to the rate of
copying, with as many bytes of what is read; the rest of the reading to the rate of reading. On a
GPU they are a large matrix product and a large copy.

The rates are those of the instruction set in use. On CPUs with AMX fp32 has a second, higher roof:
a product can be made of six products of bfloat16 pieces, which run on tiles. fp32's own roof, its
multiply-adds, may then be exceeded, and `Roof.split_seconds` says where the second one is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .. import _native
from .clock import DeviceClock

#: probe_copy_bandwidth takes no less per thread.
_LEAST_BYTES = 4096
#: Beyond this, more bytes only take more time: no cache is that large.
_MOST_BYTES = 1 << 27
#: Three pieces each; of their nine products the three smallest are beyond fp32's precision.
_PRODUCTS_OF_PIECES = 6.0
#: Instruction sets with products of bfloat16.
_BF16_ISAS = ("avx512_bf16", "amx")


@dataclass(frozen=True)
class Roof:
    """Measured rates, in flop/s and bytes/s, and the work they are applied to."""

    peak: float
    #: Bytes read plus bytes written.
    copy: float
    read: float
    flops: float
    #: Read and written together, and written alone.
    bytes: float
    written: float
    #: The rate of fp32 products made of bfloat16 pieces on tiles; None where there are no tiles.
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
        """`seconds` at `split_peak`, where that is higher."""
        if self.split_peak is None or self.split_peak <= self.peak:
            return None
        return max(self.flops / self.split_peak, self._moving)

    @property
    def bound(self) -> str:
        """Which of the two limits the work: 'compute' or 'bandwidth'."""
        return "compute" if self.flops / self.peak >= self._moving else "bandwidth"

    def better(self, other: Roof | None) -> Roof:
        """The higher of two measurements of each rate; noise only ever lowers them."""
        if other is None:
            return self
        splits = [peak for peak in (self.split_peak, other.split_peak) if peak is not None]
        return replace(
            self,
            peak=max(self.peak, other.peak),
            copy=max(self.copy, other.copy),
            read=max(self.read, other.read),
            split_peak=max(splits, default=None),
        )


def why_no_roof(device: torch.device) -> str | None:
    """Why nothing can be probed on this device, as a sentence, or None."""
    if device.type == "cuda":
        return None
    if device.type != "cpu":
        return f"there are no probes for {device.type} devices"
    return _native.why_not


def peaks(*names: str) -> dict[str, float]:
    """Arithmetic rates of the instruction set in use, in Gflop/s, with torch's number of threads.

    "fp32" and, where there are such instructions, "bf16"; with tiles also "fp32 of bf16 pieces".
    ``names``: which to measure, of those that there are; none: all.
    """
    module = _native.module
    if module is None:
        return {}
    threads, isa = torch.get_num_threads(), module.isa()
    bf16, pieces = isa in _BF16_ISAS, isa == "amx"
    probes: dict[str, tuple[bool, Callable[[int], float], float]] = {
        "fp32": (True, module.probe_fma, 1.0),
        "bf16": (bf16, module.probe_bf16_dot, 1.0),
        "fp32 of bf16 pieces": (pieces, module.probe_bf16_dot, _PRODUCTS_OF_PIECES),
    }
    return {
        name: run(threads) / products
        for name, (there, run, products) in probes.items()
        if there and name in (names or probes)
    }


def _rate(work: Callable[[], object], amount: float, device: torch.device) -> float:
    """Best of five."""
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
    flops: float,
    bytes: float,
    written: float,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Roof | None:
    """Measure the rates now, for work of that size; None where nothing can be probed.

    Takes a few tenths of a second, with torch's number of threads.
    """
    device = torch.device(device)
    if why_no_roof(device) is not None:
        return None
    if device.type == "cuda":
        peak, copy = _gpu_rates(dtype, device)
        return Roof(peak, copy, copy, flops, bytes, written)
    module = _native.module
    assert module is not None
    threads = torch.get_num_threads()
    size = int(min(_MOST_BYTES, max(bytes, 4 * _LEAST_BYTES * threads)))
    # The probe copies between two buffers of this size.
    copy = module.probe_copy_bandwidth(size // 2, threads) * 1e9
    # Copying reads too, so reading is at least as fast, whatever the noise.
    read = max(copy, module.probe_read_bandwidth(size, threads) * 1e9)
    kind = "bf16" if dtype == torch.bfloat16 and module.isa() in _BF16_ISAS else "fp32"
    split = "fp32 of bf16 pieces" if dtype == torch.float32 else kind
    found = {name: 1e9 * rate for name, rate in peaks(kind, split).items()}
    # fp16 is computed in fp32; fp64 has half as many lanes.
    peak = found.pop(kind) / (2.0 if dtype == torch.float64 else 1.0)
    return Roof(peak, copy, read, flops, bytes, written, found.get(split))
