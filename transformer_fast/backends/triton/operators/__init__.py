"""The Triton kernels as operators of torch (``torch.ops.transformer_fast.triton_*``).

Per op: implementations, schemas where all backends do not share them, the pair for `autograd`, and the
function the dispatcher runs. Triton is imported by the first call, not here. But for norms the
operators take no empty tensors: the functions give those calls to the reference.
"""

from __future__ import annotations
