"""Which cells a query sees, and what is added to its scores, whatever form a model says it in."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch


@dataclass
class Visibility:
    """What `queries` new tokens, the last of `total`, see.

    Query i stands at cell `total - queries + i`. Without `full` it sees all cells up to its own, if
    `causal`, that are in its `window` and that `keep` allows.

    keep: bool `[batch, cells]`, False for padding; full: bool (True is seen) or additive
    `[batch, 1 or heads, queries, cells]`, instead of everything above; bias: additive `[batch or 1, heads, 1
    or queries, cells]`, on top (ALiBi). Their last column is cell `total - 1`; cells before the first are
    hidden. device: where masks are made.
    """

    total: int
    queries: int
    causal: bool = True
    window: int | None = None
    keep: torch.Tensor | None = None
    full: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    device: torch.device | str = "cpu"

    @property
    def plain_causal(self) -> bool:
        """Nothing but a causal mask that starts at cell 0."""
        return self.causal and self.masks == 0 and (self.window is None or self.window >= self.total)

    @property
    def masks(self) -> int:
        """How many masks it takes to say it, for rows of a batch and heads that differ; 0: `causal` and `window` do."""
        found = [tensor.shape[:2] for tensor in (self.full, self.bias) if tensor is not None]
        found += [(self.keep.shape[0], 1)] if self.keep is not None else []
        return math.prod(torch.broadcast_shapes(*found)) if found else 0

    @property
    def first_cell(self) -> int:
        """Cells before it are seen by no query."""
        first = 0
        for tensor in (self.keep, self.full):
            if tensor is not None:
                first = max(first, self.total - tensor.shape[-1])
        if self.window is not None and self.full is None:
            first = max(first, self.total - self.queries - self.window + 1)
        return first

    def real(self) -> torch.Tensor | None:
        """The new tokens that are no padding, bool `[batch or 1, queries]`, or None where no mask says it. Padding does
        not see itself."""
        if self.keep is not None:
            return self.keep[:, -self.queries :]
        if self.full is None:
            return None
        own = self.full.diagonal(self.full.shape[-1] - self.queries, dim1=2, dim2=3)
        if own.is_floating_point():  # hidden by -inf, or by the least number of some dtype
            own = own > torch.finfo(torch.float16).min / 2
        return own.any(dim=1)

    def of(self, start: int, stop: int) -> Visibility:
        """That of sequences [start, stop) of the batch."""
        keep, full, bias = (tensor if tensor is None or tensor.shape[0] == 1 else tensor[start:stop]
                            for tensor in (self.keep, self.full, self.bias))
        return replace(self, keep=keep, full=full, bias=bias)

    def cells(self, start: int, stop: int) -> tuple[int, int]:
        """Queries [start, stop) see no cell outside of these: the first, and the one after the last."""
        if self.full is not None or not self.causal:
            return 0, self.total
        before = self.total - self.queries
        return 0 if self.window is None else max(0, before + start - self.window + 1), before + stop

    def mask(self, first: int, last: int, start: int, stop: int) -> torch.Tensor | None:
        """What is added to the scores of queries [start, stop) for cells [first, last): f32, broadcastable to
        `[batch, heads, stop - start, last - first]`, or None where it is all zero."""
        seen = self.seen(first, last, start, stop)
        mask = None
        if seen is not None:
            mask = seen.float() if seen.is_floating_point() else _hide(seen)
        if self.bias is not None:
            rows = self.bias if self.bias.shape[2] == 1 else self.bias[:, :, start:stop]
            bias = self._columns(rows, first, last, 0.0).float()
            mask = bias if mask is None else mask + bias
        return mask

    def seen(self, first: int, last: int, start: int, stop: int) -> torch.Tensor | None:
        """The same without `bias`: bool (True is seen), or additive as `full` is."""
        if self.full is not None:
            hidden = float("-inf") if self.full.is_floating_point() else False
            return self._columns(self.full[:, :, start:stop], first, last, hidden)
        seen = None
        position = self.total - self.queries + start  # of the first query
        ahead = self.causal and last > position + 1
        behind = self.window is not None and first <= self.total - self.queries + stop - 1 - self.window
        if ahead or behind:
            cells = torch.arange(first, last, device=self.device)
            positions = torch.arange(position, position + stop - start, device=self.device)[:, None]
            seen = torch.ones(stop - start, last - first, dtype=torch.bool, device=self.device)
            if ahead:
                seen &= cells <= positions
            if behind:
                seen &= cells > positions - self.window
            seen = seen[None, None]
        if self.keep is not None:
            keep = self._columns(self.keep[:, None, None], first, last, False)
            seen = keep if seen is None else seen & keep
        return seen

    def _columns(self, rows: torch.Tensor, first: int, last: int, fill: float | bool) -> torch.Tensor:
        """Columns of cells [first, last); those before the tensor's first are `fill`."""
        offset = self.total - rows.shape[-1]
        found = rows[..., max(first - offset, 0) : max(last - offset, 0)]
        missing = last - first - found.shape[-1]
        return torch.nn.functional.pad(found, (missing, 0), value=fill) if missing else found


def _hide(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(seen.shape, dtype=torch.float32, device=seen.device).masked_fill_(~seen, float("-inf"))
