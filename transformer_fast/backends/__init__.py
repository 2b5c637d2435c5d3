"""The backends; importing this registers their kernels with the dispatcher."""

from . import cpu, cuda, reference, torch, triton

__all__ = ["cpu", "cuda", "reference", "torch", "triton"]
