"""The matrix product behind `linear` and `feed_forward`, with what follows it in its epilogue.

Forward:  z = A @ B + bias,  C = dropout(activation(z)) + residual
Backward: C = dropout(A @ B) * activation'(saved), and the sums of its columns

A (M, K) and B (K, N) through their strides, so B may be a weight (N, K) seen from the side. The sum
over K is fp32, and so is the epilogue; it is rounded once. Programs are ordered in groups of rows, so
that those running together share tiles of B in L2.

Two kernels: one loads through pointers and takes everything; the other, for Hopper and later, loads
through tensor descriptors (the copy engine computes addresses and fills borders with zeros) and is
persistent: as many programs as multiprocessors, each walking over output tiles, so that the loads of
the next tile run under the epilogue of this one.

Up to `config.few_rows` rows the product and its bias are torch's (cuBLAS), and one kernel does the rest
of the epilogue, if there is one. So few rows are bound by the time to read B: that wants programs that
share the sum over K, of numbers that depend on every size and on the GPU. cuBLAS has kernels for each
and chooses among them; fusing saves the write and the read of a few rows, which stay in L2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import config
from .activation import NONE, RELU, activate, activation_slope
from .arithmetic import dot, store
from .philox import Dropout, keep_tile, seed_for
from .runtime import ceil_div, dot_precision, launch, multiprocessors


@triton.jit
def _epilogue_slice(
    total,
    tile_m, m, first_n,
    bias_ptr, residual_ptr, saved_ptr, z_ptr, hidden_ptr, sum_ptr, seed_ptr, c_ptr,
    rows, columns, limit, keep_scale,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    n = first_n + tl.arange(0, total.shape[1])
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    place = m.to(tl.int64)[:, None] * columns + n[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    if z_ptr is not None:
        store(z_ptr + place, total, inside)
    if DROPOUT:
        keep = keep_tile(tl.load(seed_ptr), m.to(tl.int64), first_n, limit, total.shape[1])
    if BACKWARD:
        if DROPOUT:
            total = tl.where(keep, total * keep_scale, 0.0)
        saved = tl.load(saved_ptr + place, mask=inside, other=0.0).to(tl.float32)
        total *= activation_slope(saved, ACTIVATION)
        if hidden_ptr is not None:
            hidden = activate(saved, ACTIVATION)
            if DROPOUT:
                hidden = tl.where(keep, hidden * keep_scale, 0.0)
            store(hidden_ptr + place, hidden, inside)
        if sum_ptr is not None:
            column_sum = tl.sum(tl.where(inside, total, 0.0), 0)
            tl.store(sum_ptr + tile_m.to(tl.int64) * columns + n, column_sum, mask=n < columns)
    else:
        total = activate(total, ACTIVATION)
        if DROPOUT:
            total = tl.where(keep, total * keep_scale, 0.0)
        if residual_ptr is not None:
            total += tl.load(residual_ptr + place, mask=inside, other=0.0).to(tl.float32)
    store(c_ptr + place, total, inside)


@triton.jit
def _epilogue(
    total,
    tile_m, m, first_n,
    bias_ptr, residual_ptr, saved_ptr, z_ptr, hidden_ptr, sum_ptr, seed_ptr, c_ptr,
    rows, columns, limit, keep_scale,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, BACKWARD: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """The epilogue in slices of columns, one after the other: all at once would not fit in registers."""
    if SLICES == 1:
        _epilogue_slice(
            total, tile_m, m, first_n, bias_ptr, residual_ptr, saved_ptr, z_ptr, hidden_ptr, sum_ptr,
            seed_ptr, c_ptr, rows, columns, limit, keep_scale, ACTIVATION, DROPOUT, BACKWARD,
        )  # fmt: skip
    else:
        WIDTH: tl.constexpr = total.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(total, [total.shape[0], 2, WIDTH]), [0, 2, 1]))
        _epilogue(
            left, tile_m, m, first_n, bias_ptr, residual_ptr, saved_ptr, z_ptr, hidden_ptr, sum_ptr,
            seed_ptr, c_ptr, rows, columns, limit, keep_scale, ACTIVATION, DROPOUT, BACKWARD,
            SLICES // 2,
        )  # fmt: skip
        _epilogue(
            right, tile_m, m, first_n + WIDTH, bias_ptr, residual_ptr, saved_ptr, z_ptr, hidden_ptr,
            sum_ptr, seed_ptr, c_ptr, rows, columns, limit, keep_scale, ACTIVATION, DROPOUT, BACKWARD,
            SLICES // 2,
        )  # fmt: skip


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
    bias_ptr,  # (N,) or None
    residual_ptr,  # (M, N) contiguous or None
    saved_ptr,  # (M, N) or None: z, or the output of relu
    z_ptr,  # (M, N) or None: written before the activation
    hidden_ptr,  # (M, N) or None: dropout(activation(saved)), written in the backward
    sum_ptr,  # (tiles of M, N) fp32 or None: column sums of C per tile
    seed_ptr,
    c_ptr,  # (M, N) contiguous
    stride_am, stride_ak, stride_bk, stride_bn,
    rows, columns, depth,
    limit, keep_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    RAGGED: tl.constexpr,  # K is no multiple of BLOCK_K
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, BACKWARD: tl.constexpr, SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile_at(tl.program_id(0), rows, columns, BLOCK_M, BLOCK_N, GROUP)
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Beyond the border row 0 is read: its products end in places that are not stored.
    row = tl.where(m < rows, m, 0).to(tl.int64)
    column = tl.where(n < columns, n, 0).to(tl.int64)
    a = a_ptr + row[:, None] * stride_am + k.to(tl.int64)[None, :] * stride_ak
    b = b_ptr + k.to(tl.int64)[:, None] * stride_bk + column[None, :] * stride_bn
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, depth, BLOCK_K):
        if RAGGED:
            left = k < depth - first
            x = tl.load(a, mask=left[None, :], other=0.0)
            y = tl.load(b, mask=left[:, None], other=0.0)
        else:
            x = tl.load(a)
            y = tl.load(b)
        total = dot(x, y, total, PRECISION)
        a += tl.cast(stride_ak, tl.int64) * BLOCK_K
        b += tl.cast(stride_bk, tl.int64) * BLOCK_K
    _epilogue(
        total, tile_m, m, tile_n * BLOCK_N, bias_ptr, residual_ptr, saved_ptr, z_ptr, hidden_ptr, sum_ptr,
        seed_ptr, c_ptr, rows, columns, limit, keep_scale, ACTIVATION, DROPOUT, BACKWARD, SLICES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "limit"])
def matmul_descriptor_kernel(
    a_tiles,  # descriptor of (M, K) in blocks of (BLOCK_M, BLOCK_K)
    b_tiles,  # descriptor of (N, K) or (K, N)
    bias_ptr, residual_ptr, saved_ptr, z_ptr, hidden_ptr, sum_ptr, seed_ptr, c_ptr,
    rows, columns, depth,
    limit, keep_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    SIDEWAYS: tl.constexpr,  # B is described as (N, K)
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, BACKWARD: tl.constexpr, SLICES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(rows, BLOCK_M) * tl.cdiv(columns, BLOCK_N)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = _tile_at(number, rows, columns, BLOCK_M, BLOCK_N, GROUP)
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for step in range(0, tl.cdiv(depth, BLOCK_K)):
            x = a_tiles.load([tile_m * BLOCK_M, step * BLOCK_K])
            if SIDEWAYS:
                y = tl.trans(b_tiles.load([tile_n * BLOCK_N, step * BLOCK_K]))
            else:
                y = b_tiles.load([step * BLOCK_K, tile_n * BLOCK_N])
            total = dot(x, y, total, PRECISION)
        m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        _epilogue(
            total, tile_m, m, tile_n * BLOCK_N, bias_ptr, residual_ptr, saved_ptr, z_ptr, hidden_ptr,
            sum_ptr, seed_ptr, c_ptr, rows, columns, limit, keep_scale, ACTIVATION, DROPOUT, BACKWARD,
            SLICES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "limit"])
def epilogue_kernel(
    product_ptr,  # (M, N) contiguous
    residual_ptr, saved_ptr, hidden_ptr, sum_ptr, seed_ptr, c_ptr,  # as in matmul_kernel
    rows, columns, limit, keep_scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr, DROPOUT: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, BLOCK_N)
    tile_m, tile_n = tl.program_id(0) // across, tl.program_id(0) % across
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (m < rows)[:, None] & (n < columns)[None, :]
    at = product_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    _epilogue_slice(
        total, tile_m, m, tile_n * BLOCK_N, None, residual_ptr, saved_ptr, None, hidden_ptr, sum_ptr,
        seed_ptr, c_ptr, rows, columns, limit, keep_scale, ACTIVATION, DROPOUT, BACKWARD,
    )  # fmt: skip


class Epilogue(NamedTuple):
    """What follows the product; see the head of this file."""

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
        """Whether it needs registers beyond those of a bias and a relu."""
        return self.backward or self.dropout.active or self.activation not in (NONE, RELU)

    @property
    def only_bias(self) -> bool:
        return self.residual is None and not self.heavy and self.activation == NONE


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
    """``a`` (M, K) @ ``b`` (K, N) and the epilogue; sizes are at least 1."""
    rows, depth = a.shape
    columns = b.shape[1]
    if rows <= config.few_rows:
        bias = epilogue.bias
        return follow(a @ b if bias is None else torch.addmm(bias, a, b), epilogue)
    output = a.new_empty((rows, columns))
    z = torch.empty_like(output) if epilogue.save_z else None
    hidden = torch.empty_like(output) if epilogue.make_hidden else None
    half = a.dtype != torch.float32
    sideways = b.stride(0) == 1 and b.stride(1) != 1
    stored = b.t() if sideways else b
    describable = _describable(a) and _describable(stored)
    tile = config.matmul(config.architecture(a.device), rows, columns, half, describable)
    down, across = ceil_div(rows, tile.rows), ceil_div(columns, tile.columns)
    sums = None
    if epilogue.make_sums:
        sums = torch.empty((down, columns), dtype=torch.float32, device=a.device)
    common = (
        epilogue.bias,
        epilogue.residual,
        epilogue.saved,
        z,
        hidden,
        sums,
        seed_for(epilogue.dropout, epilogue.seed, a.device),
        output,
    )
    sizes = (rows, columns, depth, epilogue.dropout.limit, epilogue.dropout.scale)
    constants = {
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "GROUP": tile.group,
        "ACTIVATION": epilogue.activation,
        "DROPOUT": epilogue.dropout.active,
        "BACKWARD": epilogue.backward,
        "SLICES": tile.slices if epilogue.heavy else 1,
        "PRECISION": dot_precision(a.dtype),
    }
    if tile.descriptors and describable:
        block = [tile.columns, tile.depth] if sideways else [tile.depth, tile.columns]
        launch(
            matmul_descriptor_kernel,
            (min(down * across, multiprocessors(a.device)),),
            TensorDescriptor.from_tensor(a, [tile.rows, tile.depth]),
            TensorDescriptor.from_tensor(stored, block),
            *common,
            *sizes,
            warps=tile.warps,
            stages=tile.stages,
            SIDEWAYS=sideways,
            **constants,
        )
    else:
        launch(
            matmul_kernel,
            (down * across,),
            a,
            b,
            *common,
            *a.stride(),
            *b.stride(),
            *sizes,
            warps=tile.warps,
            stages=tile.stages,
            RAGGED=depth % tile.depth != 0,
            **constants,
        )
    return Result(output, z, hidden, _added(sums))


def follow(product: Tensor, epilogue: Epilogue) -> Result:
    """What the epilogue does after the bias, to a contiguous ``product`` (M, N) that has it."""
    z = product if epilogue.save_z else None
    if epilogue.only_bias:
        return Result(product, z, None, None)
    rows, columns = product.shape
    output = torch.empty_like(product)
    hidden = torch.empty_like(product) if epilogue.make_hidden else None
    tile = config.epilogue(rows)
    down, across = ceil_div(rows, tile.rows), ceil_div(columns, tile.columns)
    sums = None
    if epilogue.make_sums:
        sums = torch.empty((down, columns), dtype=torch.float32, device=product.device)
    launch(
        epilogue_kernel,
        (down * across,),
        product,
        epilogue.residual,
        epilogue.saved,
        hidden,
        sums,
        seed_for(epilogue.dropout, epilogue.seed, product.device),
        output,
        rows,
        columns,
        epilogue.dropout.limit,
        epilogue.dropout.scale,
        warps=tile.warps,
        stages=tile.stages,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        ACTIVATION=epilogue.activation,
        DROPOUT=epilogue.dropout.active,
        BACKWARD=epilogue.backward,
    )
    return Result(output, z, hidden, _added(sums))


def _added(sums: Tensor | None) -> Tensor | None:
    """The column sums of all tiles, from those of each."""
    if sums is None:
        return None
    return sums[0] if sums.shape[0] == 1 else sums.sum(0)
