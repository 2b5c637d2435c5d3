"""The machine's measured peaks, for ``info --probe``."""

from __future__ import annotations

import torch
from rich.table import Table

from .. import _native
from . import form

_SIZES = ((1 << 15, "32 KiB"), (1 << 19, "512 KiB"), (1 << 22, "4 MiB"), (1 << 26, "64 MiB"))


def table() -> Table:
    """fp32 and bf16 arithmetic by instruction set, bandwidth by size of the buffer."""
    module = _native.module
    assert module is not None
    threads = torch.get_num_threads()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(justify="right")
    grid.add_column()
    for isa in module.supported_isas():
        rate = module.probe_fma(threads, isa)
        grid.add_row(f"fp32 multiply-add, {isa}", form.three_digits(rate), "Gflop/s")
    for isa in module.supported_isas():
        if isa in ("avx512_bf16", "amx"):
            rate = module.probe_bf16_dot(threads, isa)
            grid.add_row(f"bf16 dot product, {isa}", form.three_digits(rate), "Gflop/s")
    for size, name in _SIZES:
        share = size * threads
        read = module.probe_read_bandwidth(share, threads)
        copy = module.probe_copy_bandwidth(share, threads)
        grid.add_row(f"read, {name} per thread", form.three_digits(read), "GB/s")
        grid.add_row(f"copy, {name} per thread", form.three_digits(copy), "GB/s read and written")
    return grid
