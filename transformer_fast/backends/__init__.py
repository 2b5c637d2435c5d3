"""The backends; importing this registers their kernels with the dispatcher."""

from . import cpu, reference, torch, triton

__all__ = ["cpu", "reference", "torch", "triton"]
