"""Pairs for `autograd` of the CPU kernels: those of `native_pairs`, and what is the CPU's alone."""

from __future__ import annotations

import torch
from torch import Tensor

from .native_pairs import register

_ops = torch.ops.transformer_fast


register("cpu")
