"""Rows to and from the layout of exact blocks that the encoder reads: f16 keys `[channel][token]`, then f16 values
`[token][channel]`, channels being `[head][head_dim]`."""

from __future__ import annotations

import torch

from lowkv._core import Error


def from_rows(keys: torch.Tensor, values: torch.Tensor, tokens: int) -> torch.Tensor:
    """Blocks of `tokens` tokens, the bits of f16 as uint16 `[batch, blocks, halves]`, of keys and values
    `[batch, heads, rows, head_dim]`; rows is a multiple of `tokens`. Raises Error for what f16 can't hold."""
    batch, heads, rows, head_dim = keys.shape
    blocks = rows // tokens
    halves = torch.empty(batch, blocks, 2, heads * head_dim * tokens, dtype=torch.float16)
    split = (batch, heads, blocks, tokens, head_dim)
    halves[:, :, 0].view(batch, blocks, heads, head_dim, tokens).copy_(keys.view(split).permute(0, 2, 1, 4, 3))
    halves[:, :, 1].view(batch, blocks, tokens, heads, head_dim).copy_(values.view(split).permute(0, 2, 3, 1, 4))
    if not torch.isfinite(halves).all():
        raise Error("keys or values are infinite, NaN, or above 65504, which a packed block can't hold; use "
                    "scheme='exact'")
    return halves.flatten(2).view(torch.uint16)


def to_rows(halves: torch.Tensor, heads: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse, in f16."""
    batch, blocks, _ = halves.shape
    both = halves.view(torch.float16).view(batch, blocks, 2, -1)
    keys = both[:, :, 0].unflatten(2, (heads, -1, tokens)).permute(0, 2, 1, 4, 3)
    values = both[:, :, 1].unflatten(2, (tokens, heads, -1)).permute(0, 3, 1, 2, 4)
    return keys.flatten(2, 3), values.flatten(2, 3)
