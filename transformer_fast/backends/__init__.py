"""The backends; importing this registers their kernels with the dispatcher."""

from ..ops import operator as _operator
from . import call_cache, cpu, cpu_blocks, cuda, reference, torch, triton
from .triton import warm

__all__ = ["call_cache", "cpu", "cpu_blocks", "cuda", "reference", "torch", "triton", "warm"]

_operator.register_rules()  # after all backends have defined their operators
