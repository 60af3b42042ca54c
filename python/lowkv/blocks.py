"""Rows to and from the layout of exact blocks that the encoder reads: f16 keys `[channel][token]`, then f16 values
`[token][channel]`, channels being `[head][head_dim]`."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def pieces(keys: torch.Tensor, values: torch.Tensor, tokens: int, most: int) -> Iterator[torch.Tensor]:
    """from_rows() of at most `most` rows at a time, in one buffer: the blocks that are packed in between would else
    settle in the room that the last one left in the heap, and the next one would need new room."""
    rows, step, buffer = keys.shape[2], most // tokens * tokens, None
    for start in range(0, rows, step):
        piece = slice(start, min(start + step, rows))
        if buffer is not None and buffer.shape[1] != (piece.stop - start) // tokens:
            buffer = None
        buffer = from_rows(keys[:, :, piece], values[:, :, piece], tokens, buffer)
        yield buffer


def from_rows(keys: torch.Tensor, values: torch.Tensor, tokens: int, into: torch.Tensor | None = None) -> torch.Tensor:
    """Blocks of `tokens` tokens, the bits of f16 as uint16 `[batch, blocks, halves]`, of keys and values
    `[batch, heads, rows, head_dim]`; rows is a multiple of `tokens`."""
    batch, heads, rows, head_dim = keys.shape
    blocks = rows // tokens
    if into is None:
        into = torch.empty(batch, blocks, 2 * heads * head_dim * tokens, dtype=torch.uint16)
    halves = into.view(torch.float16).view(batch, blocks, 2, -1)
    split = (batch, heads, blocks, tokens, head_dim)
    halves[:, :, 0].view(batch, blocks, heads, head_dim, tokens).copy_(keys.view(split).permute(0, 2, 1, 4, 3))
    halves[:, :, 1].view(batch, blocks, tokens, heads, head_dim).copy_(values.view(split).permute(0, 2, 3, 1, 4))
    return into


def to_rows(halves: torch.Tensor, heads: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse, in f16."""
    batch, blocks, _ = halves.shape
    both = halves.view(torch.float16).view(batch, blocks, 2, -1)
    keys = both[:, :, 0].unflatten(2, (heads, -1, tokens)).permute(0, 2, 1, 4, 3)
    values = both[:, :, 1].unflatten(2, (tokens, heads, -1)).permute(0, 3, 1, 2, 4)
    return keys.flatten(2, 3), values.flatten(2, 3)
