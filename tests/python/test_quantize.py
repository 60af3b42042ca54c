"""The kernel-level functions, with the tests that the Intel package documents: test_kivi.py (round trips, known
values, batches, constants), test_quantize_simple.py (bits), test_attention_fix.py (attention). Needs numpy only."""

import lowkv
import numpy as np
import pytest


def keys_quantized(x):
    b, h, d, t = x.shape
    packed = np.empty((b, h, d, t // 4), np.uint8)
    scales, zeros = (np.empty((b, h, d), np.float32) for _ in range(2))
    lowkv.quantize_keys(x, packed, scales, zeros, t)
    out = np.empty_like(x)
    lowkv.dequantize_keys(packed, scales, zeros, out, t)
    return packed, scales, zeros, out


def values_quantized(x, group=32):
    b, h, t, d = x.shape
    packed = np.empty((b, h, t, d // 4), np.uint8)
    scales, zeros = (np.empty((b, h, t, d // group), np.float32) for _ in range(2))
    lowkv.quantize_values(x, packed, scales, zeros, d, group)
    out = np.empty_like(x)
    lowkv.dequantize_values(packed, scales, zeros, out, d, group)
    return packed, scales, zeros, out


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_key_round_trip():
    x = normal(1, 1, 64, 32)
    _, scales, _, out = keys_quantized(x)
    assert (np.abs(out - x) <= 0.5 * scales[..., None] * 1.0001).all()


def test_value_round_trip():
    x = normal(1, 1, 32, 64)
    _, scales, _, out = values_quantized(x)
    assert (np.abs(out - x) <= 0.5 * scales.repeat(32, axis=3) * 1.0001).all()


def test_known_values_bit_by_bit():
    """[1, 2, 3, 4] in each of 4 channels: scale 1, zero 1, byte 0b11100100, nothing lost."""
    x = np.tile(np.array([1, 2, 3, 4], np.float32), (1, 1, 4, 1))
    packed, scales, zeros, out = keys_quantized(x)
    assert (packed == 0b11100100).all() and packed[0, 0, 0, 0] == 228
    assert (scales == 1.0).all() and (zeros == 1.0).all()
    assert (out == x).all()


def test_multi_batch_and_head():
    keys, values = normal(2, 4, 64, 32), normal(2, 4, 32, 64)
    for quantized, x in ((keys_quantized, keys), (values_quantized, values)):
        together = quantized(x)
        for b in range(2):
            for h in range(4):
                alone = quantized(np.ascontiguousarray(x[b : b + 1, h : h + 1]))
                assert all((a[0, 0] == t[b, h]).all() for a, t in zip(alone, together, strict=True))


def test_constant_input():
    x = np.full((1, 2, 32, 32), 3.7, np.float32)
    for quantized in (keys_quantized, values_quantized):
        *_, out = quantized(x)
        assert np.isfinite(out).all() and (out == x).all()


def test_attention_on_decoded_rows():
    """The Intel package's threshold is 0.85, its result 0.898."""
    q, k, v = normal(1, 2, 1, 64, seed=1), normal(1, 2, 32, 64, seed=2), normal(1, 2, 32, 64, seed=3)
    decoded_k = keys_quantized(np.ascontiguousarray(k.swapaxes(2, 3)))[3].swapaxes(2, 3)
    decoded_v = values_quantized(v)[3]

    def attend(keys, values):
        scores = q @ keys.swapaxes(2, 3) / 8
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ values).ravel()

    want, got = attend(k, v), attend(decoded_k, decoded_v)
    assert np.isfinite(got).all()
    assert want @ got / np.linalg.norm(want) / np.linalg.norm(got) > 0.85


def test_torch_dtypes_without_copies():
    torch = pytest.importorskip("torch")
    x = torch.randn(1, 2, 64, 32)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        packed = torch.empty(1, 2, 64, 8, dtype=torch.uint8)
        scales, zeros, out = torch.empty(1, 2, 64), torch.empty(1, 2, 64), torch.empty(1, 2, 64, 32, dtype=dtype)
        lowkv.quantize_keys(x.to(dtype), packed, scales, zeros, 32)
        lowkv.dequantize_keys(packed, scales, zeros, out, 32)
        error = (out.float() - x.to(dtype).float()).abs()
        assert (error <= scales[..., None] * 0.5 + 0.02).all()


def test_bad_arguments_are_refused():
    x = normal(1, 1, 64, 32)
    packed, scales = np.empty((1, 1, 64, 8), np.uint8), np.empty((1, 1, 64), np.float32)

    def refused(message, *arguments):
        with pytest.raises(lowkv.Error, match=message):
            lowkv.quantize_keys(*arguments)

    refused(r"packed must have shape \[1, 1, 64, 8\]", x, packed[..., :4].copy(), scales, scales, 32)
    refused("packed must be uint8", x, packed.astype(np.int8), scales, scales, 32)
    refused("scales must be float32", x, packed, scales.astype(np.float64), scales, 32)
    refused("input must be float32, float16 or bfloat16", x.astype(np.float64), packed, scales, scales, 32)
    refused("input must be contiguous", x.transpose(0, 1, 3, 2), packed, scales, scales, 64)
    refused("input must have 4 dimensions, not 3", x[0], packed, scales, scales, 32)
    refused("group_size 30 must be a multiple of 4", x, packed, scales, scales, 30)
    refused("one group at a time: 32 tokens", x, packed, scales, scales, 16)
    x[0, 0, 0, 0] = np.nan
    refused("infinite or NaN", x, packed, scales, scales, 32)
    with pytest.raises(lowkv.Error, match="head_dim 64 is not the last dimension"):
        lowkv.quantize_values(x, packed, scales, scales, 64, 32)
