"""torch's own attention to rows that lie beside each other: those of a first prompt, or decoded ones."""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right

from lowkv.visibility import Visibility

MASK = 1 << 22  # mask values made at a time: 16 MiB of f32
_PIECE = 128  # queries at a time at least: fewer make torch read all keys and values too often
# Queries of a step on a GPU for which packed rows are decoded. attend() reads all codes once for 8 rows of queries. On
# an H100 (bench/gpu_decode.py) 512 queries after 16,384 tokens take 26 ms on decoded rows and 34 on packed ones with
# kivi2, 50 and 60 with lowkv2.8; 128 queries of 16 sequences after 4,096 tokens 77 and 68, 115 and 99.
_MANY = 256
# Of decoded rows at a time, in bytes, where more than one sequence has some.
_SCRATCH = 256 << 20


def wants_decoded(query: torch.Tensor) -> bool:
    """Whether torch's attention to decoded rows is faster than the device's to packed ones."""
    return on_gpu(query) and query.shape[2] >= _MANY


def sequences_at_a_time(bytes_of_one: int) -> int:
    """How many sequences' decoded rows are held at a time."""
    return max(1, _SCRATCH // bytes_of_one)


def attend_to_rows(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visibility: Visibility, scale: float,
                   begin: int = 0) -> torch.Tensor:
    """Attention of `query`, `[batch, heads, queries, head_dim]`, to the rows from cell `begin` on, `[batch, kv_heads,
    cells, head_dim]`. No query sees a cell before them."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    grouped = query.shape[1] != keys.shape[1]
    if visibility.plain_causal and begin == 0:
        if visibility.queries == visibility.total:
            return sdpa(query, keys, values, scale=scale, is_causal=visibility.queries > 1, enable_gqa=grouped)
        if _has_flash(query, keys, values, grouped):
            mask = causal_lower_right(visibility.queries, visibility.total)
            return sdpa(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)
    outs = []
    step = max(_PIECE, MASK // (max(visibility.masks, 1) * visibility.total))
    if visibility.window is not None:  # longer pieces see more cells than their queries do
        step = min(step, max(_PIECE, visibility.window))
    for start in range(0, visibility.queries, step):
        stop = min(start + step, visibility.queries)
        first, last = visibility.cells(start, stop)
        first = max(first, begin)
        mask = visibility.mask(first, last, start, stop)
        mask = None if mask is None else mask.to(query.dtype)
        if mask is not None and mask.is_cuda:  # padding sees nothing, of which some of torch's GPU kernels make NaN
            mask = mask.clamp_min(torch.finfo(mask.dtype).min)
        part = (rows[:, :, first - begin : last - begin] for rows in (keys, values))
        if grouped and on_gpu(query):
            outs.append(_by_kv_head(query[:, :, start:stop], *part, mask, scale))
        else:
            outs.append(sdpa(query[:, :, start:stop], *part, attn_mask=mask, scale=scale, enable_gqa=grouped))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)


def on_gpu(rows: torch.Tensor) -> bool:
    return rows.is_cuda


def _has_flash(query, keys, values, grouped: bool) -> bool:
    """Whether torch has a kernel for causal_lower_right() that needs no mask in memory."""
    if not query.is_cuda:
        return False
    parameters = torch.backends.cuda.SDPAParams(query, keys, values, None, 0.0, False, grouped)
    return torch.backends.cuda.can_use_flash_attention(parameters)


def _by_kv_head(query, keys, values, mask, scale: float) -> torch.Tensor:
    """Attention with the queries of a kv head's heads as those of one head: with a mask, torch's fast GPU kernels
    refuse enable_gqa, and its plain one stores all scores."""
    (batch, heads, queries, head_dim), kv_heads = query.shape, keys.shape[1]
    repeats = heads // kv_heads
    if mask is not None:
        mask = mask.expand(-1, -1, queries, -1)
        mask = mask.repeat(1, 1, repeats, 1) if mask.shape[1] == 1 else mask.unflatten(1, (-1, repeats)).flatten(2, 3)
    query = query.reshape(batch, kv_heads, repeats * queries, head_dim)
    out = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, queries, head_dim)
