"""The matrix product of `linear` and `feed_forward`, with the following operations in its epilogue.

Forward:  z = A @ B + bias,  C = dropout(activation(z)) + residual
Backward: C = dropout(A @ B) * activation'(saved), and the sums of its columns

A (M, K) and B (K, N) have any strides, so B may be a transposed weight (N, K). The sum over K and the
epilogue are in fp32, and the result is rounded once. Programs are ordered in groups of rows, so that
concurrent ones share tiles of B in L2.

There are two kernels. One loads through pointers and supports all tensors. The other, for Hopper and
later, loads through tensor descriptors: the copy engine computes addresses and fills borders with
zeros. It is persistent, with as many programs as multiprocessors, each of which loops over output
tiles. So the loads of the next tile overlap with the epilogue of the current one.

Up to `config.few_rows` rows PyTorch (cuBLAS) computes product and bias, and one kernel the rest of the
epilogue, if there is any. With so few rows the time to read B is the limit. A fast kernel then splits
the sum over K among programs, in numbers that depend on every size and on the GPU; cuBLAS has kernels
for all of these and selects among them. Fusion would save only the write and the read of a few rows,
which stay in L2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import config
from .arithmetic import NONE, RELU, activate, activation_slope, dot, store
from .philox import Dropout, keep_tile, seed_for
from .runtime import ceil_div, constant, dot_precision, launch, multiprocessors


class Operands(NamedTuple):
    """Tensors that the epilogue reads and writes; None if it does not."""

    bias: Any  # (N,)
    residual: Any  # (M, N) contiguous
    saved: Any  # (M, N): z, or the output of relu
    z: Any  # (M, N): written before the activation
    hidden: Any  # (M, N): dropout(activation(saved)), written in the backward
    sums: Any  # (tiles of M, N) fp32: column sums of C per tile
    seed: Any  # () int64
    output: Any  # (M, N) contiguous
    keep_scale: Any


class Constants(NamedTuple):
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP: int
    ACTIVATION: int
    DROPOUT: bool
    BACKWARD: bool
    SLICES: int
    PRECISION: str
    SIDEWAYS: bool = False  # the descriptor of B is that of (N, K)
    RAGGED: bool = False  # K is not a multiple of BLOCK_K


@triton.jit
def _epilogue_slice(total, tile_m, m, first_n, to, rows, columns, limit, C: tl.constexpr):
    n = first_n + tl.arange(0, total.shape[1])
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    place = m.to(tl.int64)[:, None] * columns + n[None, :]
    if to.bias is not None:
        total += tl.load(to.bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    if to.z is not None:
        store(to.z + place, total, inside)
    if C.DROPOUT:
        keep = keep_tile(tl.load(to.seed), m.to(tl.int64), first_n, limit, total.shape[1])
    if C.BACKWARD:
        if C.DROPOUT:
            total = tl.where(keep, total * to.keep_scale, 0.0)
        saved = tl.load(to.saved + place, mask=inside, other=0.0).to(tl.float32)
        total *= activation_slope(saved, C.ACTIVATION)
        if to.hidden is not None:
            hidden = activate(saved, C.ACTIVATION)
            if C.DROPOUT:
                hidden = tl.where(keep, hidden * to.keep_scale, 0.0)
            store(to.hidden + place, hidden, inside)
        if to.sums is not None:
            column_sum = tl.sum(tl.where(inside, total, 0.0), 0)
            tl.store(to.sums + tile_m.to(tl.int64) * columns + n, column_sum, mask=n < columns)
    else:
        total = activate(total, C.ACTIVATION)
        if C.DROPOUT:
            total = tl.where(keep, total * to.keep_scale, 0.0)
        if to.residual is not None:
            total += tl.load(to.residual + place, mask=inside, other=0.0).to(tl.float32)
    store(to.output + place, total, inside)


@triton.jit
def _epilogue(
    total, tile_m, m, first_n, to, rows, columns, limit, SLICES: tl.constexpr, C: tl.constexpr
):
    """Runs the epilogue in slices of columns, because the whole would not fit in registers."""
    if SLICES == 1:
        _epilogue_slice(total, tile_m, m, first_n, to, rows, columns, limit, C)
    else:
        WIDTH: tl.constexpr = total.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(total, [total.shape[0], 2, WIDTH]), [0, 2, 1]))
        _epilogue(left, tile_m, m, first_n, to, rows, columns, limit, SLICES // 2, C)
        _epilogue(right, tile_m, m, first_n + WIDTH, to, rows, columns, limit, SLICES // 2, C)


@triton.jit
def _tile_at(
    number, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    group = number // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    rest = number % (GROUP * across)
    return group * GROUP + rest % height, rest // height


@triton.jit(do_not_specialize=["rows", "limit"])
def matmul_kernel(
    a_ptr,  # (M, K)
    b_ptr,  # (K, N)
    to,
    stride_am, stride_ak, stride_bk, stride_bn, rows, columns, depth, limit,
    C: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile_at(tl.program_id(0), rows, columns, C.BLOCK_M, C.BLOCK_N, C.GROUP)
    m = tile_m * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    n = tile_n * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    k = tl.arange(0, C.BLOCK_K)
    # Beyond the border, row or column 0 is read instead, and its products are not stored.
    row = tl.where(m < rows, m, 0).to(tl.int64)
    column = tl.where(n < columns, n, 0).to(tl.int64)
    a = a_ptr + row[:, None] * stride_am + k.to(tl.int64)[None, :] * stride_ak
    b = b_ptr + k.to(tl.int64)[:, None] * stride_bk + column[None, :] * stride_bn
    total = tl.zeros([C.BLOCK_M, C.BLOCK_N], tl.float32)
    for first in range(0, depth, C.BLOCK_K):
        if C.RAGGED:
            left = k < depth - first
            x = tl.load(a, mask=left[None, :], other=0.0)
            y = tl.load(b, mask=left[:, None], other=0.0)
        else:
            x = tl.load(a)
            y = tl.load(b)
        total = dot(x, y, total, C.PRECISION)
        a += tl.cast(stride_ak, tl.int64) * C.BLOCK_K
        b += tl.cast(stride_bk, tl.int64) * C.BLOCK_K
    _epilogue(total, tile_m, m, tile_n * C.BLOCK_N, to, rows, columns, limit, C.SLICES, C)


@triton.jit(do_not_specialize=["rows", "limit"])
def matmul_descriptor_kernel(
    a_tiles,  # descriptor of (M, K) in blocks of (BLOCK_M, BLOCK_K)
    b_tiles,  # descriptor of (N, K) or (K, N)
    to,
    rows, columns, depth, limit,
    C: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, C.BLOCK_M) * tl.cdiv(columns, C.BLOCK_N)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = _tile_at(number, rows, columns, C.BLOCK_M, C.BLOCK_N, C.GROUP)
        total = tl.zeros([C.BLOCK_M, C.BLOCK_N], tl.float32)
        for step in range(0, tl.cdiv(depth, C.BLOCK_K)):
            x = a_tiles.load([tile_m * C.BLOCK_M, step * C.BLOCK_K])
            if C.SIDEWAYS:
                y = tl.trans(b_tiles.load([tile_n * C.BLOCK_N, step * C.BLOCK_K]))
            else:
                y = b_tiles.load([step * C.BLOCK_K, tile_n * C.BLOCK_N])
            total = dot(x, y, total, C.PRECISION)
        m = tile_m * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
        _epilogue(total, tile_m, m, tile_n * C.BLOCK_N, to, rows, columns, limit, C.SLICES, C)


@triton.jit(do_not_specialize=["rows", "limit"])
def epilogue_kernel(
    product_ptr,  # (M, N) contiguous
    to,
    rows, columns, limit,
    C: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, C.BLOCK_N)
    tile_m, tile_n = tl.program_id(0) // across, tl.program_id(0) % across
    m = tile_m * C.BLOCK_M + tl.arange(0, C.BLOCK_M)
    n = tile_n * C.BLOCK_N + tl.arange(0, C.BLOCK_N)
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    at = product_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    _epilogue_slice(total, tile_m, m, tile_n * C.BLOCK_N, to, rows, columns, limit, C)


class Epilogue(NamedTuple):
    """Operations that follow the product; see the module's docstring."""

    activation: int = NONE
    bias: Tensor | None = None
    residual: Tensor | None = None
    dropout: Dropout = Dropout(False, 0, 1.0)
    seed: Tensor | None = None
    save_z: bool = False
    backward: bool = False
    saved: Tensor | None = None
    make_hidden: bool = False
    make_sums: bool = False

    @property
    def heavy(self) -> bool:
        """True if the epilogue needs more registers than one with bias and relu."""
        return self.backward or self.dropout.active or self.activation not in (NONE, RELU)

    def operands(self, output: Tensor, down: int, **before: Tensor | None) -> Operands:
        """Returns the operands of a kernel that computes ``output`` in ``down`` rows of tiles."""
        sums = None
        if self.make_sums:
            sizes = (down, output.shape[1])
            sums = torch.empty(sizes, dtype=torch.float32, device=output.device)
        return Operands(
            residual=self.residual, saved=self.saved,
            hidden=torch.empty_like(output) if self.make_hidden else None, sums=sums,
            seed=seed_for(self.dropout, self.seed, output.device), output=output,
            keep_scale=self.dropout.scale, **before,
        )  # fmt: skip

    def options(self, tile: config.ProductTile, **more: Any) -> dict[str, Any]:
        """Returns the launch options of kernels with this tile, `Constants` included."""
        constants = Constants(
            BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, GROUP=tile.group,
            ACTIVATION=self.activation, DROPOUT=self.dropout.active, BACKWARD=self.backward,
            SLICES=tile.slices if self.heavy else 1, **more,
        )  # fmt: skip
        return {"warps": tile.warps, "stages": tile.stages, "C": constant(constants)}


class Result(NamedTuple):
    output: Tensor
    z: Tensor | None
    hidden: Tensor | None
    sums: Tensor | None  # (N,) fp32


def _describable(tensor: Tensor) -> bool:
    item = tensor.element_size()
    return (
        tensor.stride(1) == 1
        and tensor.stride(0) * item % 16 == 0
        and tensor.stride(0) >= tensor.shape[1]
        and tensor.storage_offset() * item % 16 == 0
        and (tensor.is_meta or tensor.data_ptr() % 16 == 0)
    )


def matmul(a: Tensor, b: Tensor, epilogue: Epilogue) -> Result:
    """Computes ``a`` (M, K) @ ``b`` (K, N) and the epilogue; all sizes must be at least 1."""
    rows, depth = a.shape
    columns = b.shape[1]
    if rows <= config.few_rows:
        bias = epilogue.bias
        return follow(a @ b if bias is None else torch.addmm(bias, a, b), epilogue)
    output = a.new_empty((rows, columns))
    z = torch.empty_like(output) if epilogue.save_z else None
    lowp = a.dtype != torch.float32
    sideways = b.stride(0) == 1 and b.stride(1) != 1
    stored = b.t() if sideways else b
    describable = _describable(a) and _describable(stored)
    tile = config.matmul(config.architecture(a.device), rows, columns, lowp, describable)
    down, across = ceil_div(rows, tile.rows), ceil_div(columns, tile.columns)
    to = epilogue.operands(output, down, bias=epilogue.bias, z=z)
    sizes = (rows, columns, depth, epilogue.dropout.limit)
    precision = dot_precision(a.dtype)
    if tile.descriptors and describable:
        block = [tile.columns, tile.depth] if sideways else [tile.depth, tile.columns]
        launch(
            matmul_descriptor_kernel, (min(down * across, multiprocessors(a.device)),),
            TensorDescriptor.from_tensor(a, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(stored, block), to, *sizes,
            **epilogue.options(tile, PRECISION=precision, SIDEWAYS=sideways),
        )  # fmt: skip
    else:
        launch(
            matmul_kernel, (down * across,), a, b, to, *a.stride(), *b.stride(), *sizes,
            **epilogue.options(tile, PRECISION=precision, RAGGED=depth % tile.depth != 0),
        )  # fmt: skip
    return _result(to)


def follow(product: Tensor, epilogue: Epilogue) -> Result:
    """Applies the epilogue, except for its bias, to a contiguous ``product`` (M, N)."""
    z = product if epilogue.save_z else None
    if epilogue.residual is None and not epilogue.heavy and epilogue.activation == NONE:
        return Result(product, z, None, None)
    rows, columns = product.shape
    tile = config.epilogue(rows)
    down, across = ceil_div(rows, tile.rows), ceil_div(columns, tile.columns)
    to = epilogue.operands(torch.empty_like(product), down, bias=None, z=None)
    launch(
        epilogue_kernel, (down * across,), product, to, rows, columns, epilogue.dropout.limit,
        **epilogue.options(tile, PRECISION="ieee"),
    )  # fmt: skip
    return _result(to)._replace(z=z)


def _result(to: Operands) -> Result:
    sums = to.sums  # (rows of tiles, N)
    if sums is not None:
        sums = sums[0] if sums.shape[0] == 1 else sums.sum(0)
    return Result(to.output, to.z, to.hidden, sums)
