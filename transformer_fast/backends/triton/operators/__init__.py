"""The Triton kernels as operators of torch (``torch.ops.transformer_fast.triton_*``).

Per op: schemas, fakes that tell shapes and strides, implementations, the pair for `autograd`, and the
function the dispatcher runs. Triton is imported by the first call, not here. The operators take no
empty tensors: there is nothing to compute, and the functions give those calls to the reference.
"""

from __future__ import annotations
