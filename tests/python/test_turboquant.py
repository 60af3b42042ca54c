"""TurboQuant's codes against an independent reference in float32: the rotation, the norm and the nearest Lloyd-Max
level, all written here. Needs numpy only."""

import os

import numpy as np
import pytest
from lowkv._core import Batch, Plan, Retention, RowType, Store, parse_scheme

HEADS, BLOCKS = 2, 40


def lloyd_max(count):
    """The levels of N(0, 1) with the least squared error, by Lloyd's iteration on a fine grid."""
    x = np.linspace(-8, 8, 20_001)
    density = np.exp(-x * x / 2)
    mass, moment = (np.concatenate([[0.0], np.cumsum((f[1:] + f[:-1]) / 2)]) for f in (density, density * x))
    levels = np.linspace(-2, 2, count)
    for _ in range(3000):
        cuts = np.concatenate([x[:1], (levels[1:] + levels[:-1]) / 2, x[-1:]])
        levels = np.diff(np.interp(cuts, x, moment)) / np.diff(np.interp(cuts, x, mass))
    return levels.astype(np.float32)


def rotation(n, seed=42):
    """diag(signs) H / sqrt(n), as include/lowkv/rotation.h defines it: H is Sylvester's matrix, and a sign is minus
    where a draw of splitmix64 has its top bit set."""
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs, state, word = [], seed, 2**64 - 1
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & word
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & word
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
        signs.append(-1.0 if (z ^ (z >> 31)) >> 63 else 1.0)
    return (np.array(signs)[:, None] * matrix / np.sqrt(n)).astype(np.float32)


def nearest(x, levels):
    return np.abs(x[..., None] - levels).argmin(-1)


def reference_codes(rows, levels, matrix):
    rotated = rows @ matrix
    return nearest(rotated / np.linalg.norm(rotated, axis=-1, keepdims=True) * np.sqrt(np.float32(len(matrix))), levels)


def stored_codes(decoded, levels, matrix):
    """The codes behind decoded rows, which are a level times the row's unit in each rotated channel."""
    rotated = decoded.astype(np.float64) @ matrix
    unit = np.linalg.norm(rotated, axis=-1, keepdims=True) / np.sqrt(len(matrix))
    for _ in range(2):  # the norm gives the unit roughly, its codes exactly
        codes = nearest(rotated / unit, levels)
        found = levels[codes].astype(np.float64)
        unit = (rotated * found).sum(-1, keepdims=True) / (found * found).sum(-1, keepdims=True)
    # Levels lie on a grid of 8 bits: half a step of it, and what f16 rounds.
    step = (levels[-1] - levels[0]) / 255
    assert np.abs(rotated / unit - found).max() < 0.5 * step + 0.01
    return codes


def through_lowkv(keys, values, scheme):
    """Packed and decoded again. keys and values: f16 [blocks, tokens, heads, head_dim]."""
    blocks, tokens, heads, head_dim = keys.shape
    plan = Plan(parse_scheme(scheme), 0, heads, head_dim, RowType.float16)
    assert plan.block_tokens == tokens
    batch = Batch(Store(os.environ.get("LOWKV_DEVICE", "cpu")), plan, Retention(window=0, sinks=0, flush=0), 1)
    shape = 1, blocks * tokens, heads, head_dim
    batch.append(*(np.ascontiguousarray(rows.reshape(shape).transpose(0, 2, 1, 3)) for rows in (keys, values)))
    batch.pack(0, 1)
    assert batch.packed == (0, blocks * tokens)
    out = [np.empty((1, heads, blocks * tokens, head_dim), np.float16) for _ in range(2)]
    batch.read(0, *out, 1)
    return [rows.transpose(0, 2, 1, 3).reshape(keys.shape) for rows in out]


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_codes_are_those_of_the_reference(head_dim, bits):
    random = np.random.default_rng(head_dim + bits)
    outliers = np.exp(random.normal(size=head_dim))  # channels of different sizes, as keys have
    rows = [(random.normal(size=(BLOCKS, 32, HEADS, head_dim)) * outliers).astype(np.float16) for _ in range(2)]
    levels, matrix = lloyd_max(2**bits), rotation(head_dim)
    for given, decoded in zip(rows, through_lowkv(*rows, f"turboquant{bits}"), strict=True):
        want = reference_codes(given.astype(np.float32), levels, matrix)
        got = stored_codes(decoded, levels, matrix)
        assert len(np.unique(want)) == 2**bits
        assert (got == want).mean() >= 0.9999
