"""The backends; importing this registers their kernels with the dispatcher."""

from . import cpu, cuda, operator_rules, reference, torch, triton

__all__ = ["cpu", "cuda", "reference", "torch", "triton"]

operator_rules.tell()  # of the operators that all of them have defined
