"""Rows that are kept exactly, in the model's own dtype: the sinks, the window, and everything of an
exact scheme."""

from __future__ import annotations

import torch

_SPARE = 64  # rows allocated beyond those asked for, so that decoding does not allocate at each step


class ExactRows:
    """Keys and values `[batch, heads, rows, head_dim]` of one layer, in two buffers with room to grow."""

    def __init__(self, batch: int, heads: int, head_dim: int, dtype: torch.dtype):
        self._batch, self._heads, self._head_dim, self._dtype = batch, heads, head_dim, dtype
        self.length = 0
        self.key_buffer, self.value_buffer = self._allocate(0), self._allocate(0)

    @property
    def keys(self) -> torch.Tensor:
        return self.key_buffer[:, :, : self.length]

    @property
    def values(self) -> torch.Tensor:
        return self.value_buffer[:, :, : self.length]

    @property
    def nbytes(self) -> int:
        """Bytes allocated, spare room included."""
        return self.key_buffer.nbytes + self.value_buffer.nbytes

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        count = keys.shape[2]
        if self.length + count > self.key_buffer.shape[2]:
            self._move(slice(0, self.length), self.length + count)
        self.key_buffer[:, :, self.length : self.length + count].copy_(keys)
        self.value_buffer[:, :, self.length : self.length + count].copy_(values)
        self.length += count

    def truncate(self, length: int) -> None:
        self.length = length

    def remove(self, first: int, last: int, room: int) -> None:
        """Drops rows [first, last) and leaves room for `room` rows in all."""
        keys, values = self.keys, self.values
        kept = self.length - (last - first)
        new = [self._allocate(max(kept, room)) for _ in range(2)]
        for old, buffer in zip((keys, values), new, strict=True):
            buffer[:, :, :first].copy_(old[:, :, :first])
            buffer[:, :, first:kept].copy_(old[:, :, last:])
        self.key_buffer, self.value_buffer = new
        self.length = kept

    def select(self, rows: torch.Tensor) -> None:
        """Row i of the batch becomes what row `rows[i]` was."""
        self._batch = len(rows)
        with torch.inference_mode(False):
            self.key_buffer = self.key_buffer.index_select(0, rows)
            self.value_buffer = self.value_buffer.index_select(0, rows)

    def copy(self) -> ExactRows:
        new = ExactRows(self._batch, self._heads, self._head_dim, self._dtype)
        new._move_from(self, slice(0, self.length), self.length)
        return new

    def _allocate(self, rows: int) -> torch.Tensor:
        # A tensor made in inference mode could not be written to outside it, and a prefix may be
        # computed in one mode and continued in the other.
        with torch.inference_mode(False):
            return torch.empty(self._batch, self._heads, rows, self._head_dim, dtype=self._dtype)

    def _move(self, rows: slice, room: int) -> None:
        # A quarter on top: copies stay linear in the length, and little memory lies idle.
        self._move_from(self, rows, room + max(room // 4, _SPARE))

    def _move_from(self, other: ExactRows, rows: slice, room: int) -> None:
        keys, values = other.keys[:, :, rows], other.values[:, :, rows]
        new_keys, new_values = self._allocate(room), self._allocate(room)
        new_keys[:, :, : keys.shape[2]].copy_(keys)
        new_values[:, :, : keys.shape[2]].copy_(values)
        self.key_buffer, self.value_buffer, self.length = new_keys, new_values, keys.shape[2]
