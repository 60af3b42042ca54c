"""KIVI's arithmetic (Liu et al., 2024, section 3) on plain arrays, with the shapes of the Intel package kivi_sycl.
The cache does not use it: its blocks have another layout.

    scale = (max - min) / 3, zero = min, code = round((x - zero) / scale), four codes to a byte,
    the first in the lowest bits

All take numpy arrays or torch tensors in main memory, contiguous, and write into those given."""

import re
import sys

import numpy as np

from lowkv._core import Error

_SHIFTS = np.arange(0, 8, 2, dtype=np.uint8)


def _check(legal, message):
    if not legal:
        raise Error(message)


def _flat(given, name, types, shape):
    """Its elements in one dimension, in the same memory; of bfloat16, which numpy lacks, the bits as uint16."""
    kind = str(given.dtype).removeprefix("torch.")
    _check(kind in re.findall(r"\w+", types), f"{name} must be {types}")
    _check(list(given.shape) == shape, f"{name} must have shape {shape}, not {list(given.shape)}")
    bits = kind == "bfloat16"
    array = np.asarray(given.view(sys.modules["torch"].int16)).view(np.uint16) if bits else np.asarray(given)
    _check(array.flags.c_contiguous, f"{name} must be contiguous: call contiguous() first")
    return array.reshape(-1)


def _groups(full, name, packed, scales, zeros, group, one_group):
    """The four arrays, [groups, elements]. Groups run along the last dimension: tokens of keys, channels of values."""
    shape = list(full.shape)
    _check(len(shape) == 4, f"{name} must have 4 dimensions, not {len(shape)}")
    *rows, last = shape
    _check(group > 0 and group % 4 == 0 and last % group == 0,
           f"group_size {group} must be a multiple of 4 that divides {last}, the last dimension of {name}")
    _check(not one_group or last == group,
           f"keys are quantized one group at a time: {last} tokens were given, group_size is {group}")
    of_groups = rows if one_group else [*rows, last // group]
    return (_flat(full, name, "float32, float16 or bfloat16", shape).reshape(-1, group),
            _flat(packed, "packed", "uint8", [*rows, last // 4]).reshape(-1, group // 4),
            *(_flat(array, label, "float32", of_groups).reshape(-1, 1)
              for array, label in ((scales, "scales"), (zeros, "zeros"))))


def _quantize(full, *arguments):
    x, packed, scales, zeros = _groups(full, "input", *arguments)
    x = (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32)
    _check(np.isfinite(x).all(), "the input has infinite or NaN elements")
    zeros[:], three = x.min(1, keepdims=True), np.float32(3)
    scales[:] = x.max(1, keepdims=True) / three - zeros / three  # max - min may overflow
    with np.errstate(all="ignore"):  # of a constant group, whose scale is 0: its codes are 0
        codes = np.where(scales > 0, np.rint((x - zeros) / scales), 0).clip(0, 3).astype(np.uint8)
    packed[:] = np.bitwise_or.reduce(codes.reshape(*packed.shape, 4) << _SHIFTS, axis=-1)


def _dequantize(full, *arguments):
    x, packed, scales, zeros = _groups(full, "output", *arguments)
    out = (packed[..., None] >> _SHIFTS & 3).reshape(x.shape) * scales + zeros
    if x.dtype == np.uint16:  # to the nearest, ties to even
        bits = out.view(np.uint32)
        out = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    x[:] = out


def _check_head_dim(values, head_dim):
    _check(values.shape[-1] == head_dim, f"head_dim {head_dim} is not the last dimension of the values")


def quantize_keys(input, packed, scales, zeros, group_size: int) -> None:
    """One group of tokens, per channel: input [B, H, D, T], T being group_size, float32, float16 or bfloat16.
    Writes packed [B, H, D, T / 4] uint8, scales and zeros [B, H, D] float32."""
    _quantize(input, packed, scales, zeros, group_size, True)


def dequantize_keys(packed, scales, zeros, output, group_size: int) -> None:
    """The inverse of quantize_keys(): writes output [B, H, D, T]."""
    _dequantize(output, packed, scales, zeros, group_size, True)


def quantize_values(input, packed, scales, zeros, head_dim: int, group_size: int) -> None:
    """Per token, in groups of channels: input [B, H, T, D] float32, float16 or bfloat16. Writes packed
    [B, H, T, D / 4] uint8, scales and zeros [B, H, T, D / group_size] float32."""
    _check_head_dim(input, head_dim)
    _quantize(input, packed, scales, zeros, group_size, False)


def dequantize_values(packed, scales, zeros, output, head_dim: int, group_size: int) -> None:
    """The inverse of quantize_values(): writes output [B, H, T, D]."""
    _check_head_dim(output, head_dim)
    _dequantize(output, packed, scales, zeros, group_size, False)
