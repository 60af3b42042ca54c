"""A budget of memory: what each layer of a cache may hold of it. Which blocks are packed then is the core's to say
(Batch.pack())."""

from __future__ import annotations

import math

from lowkv._core import Error, Scheme, parse_size


class Budget:
    """size: of a whole cache, text as "24MiB" or bytes; windows: those of its layers' sliding windows, or None."""

    def __init__(self, size: str | int, scheme: Scheme, windows: list[int | None]):
        if not isinstance(size, str | int) or isinstance(size, bool):
            raise Error(f"budget must be a str such as '24MiB', or an int of bytes, not {type(size).__name__}")
        self.size, self.bytes, self.rungs = str(size), parse_size(str(size)), scheme.rungs()
        self.scheme, self.windows = scheme, windows
        self._shape: tuple[int, int] | None = None

    def require_alike(self, index: int, shape: tuple[int, int]) -> None:
        """Raises Error where a layer's kv_heads and head_dim are not those of the others."""
        self._shape = self._shape or shape
        if shape != self._shape:
            raise Error(f"layer {index} has kv_heads and head_dim {shape}, and another one {self._shape}: budget is "
                        "for models whose layers are alike; leave it out")

    def share(self, window_of: int | None, unquantized) -> int:
        """Bytes for one layer: equal parts, but what a sliding window does not need goes to the other layers.
        unquantized(window): bytes of a sliding layer's tokens, none of them packed."""
        equal = self.bytes // len(self.windows)
        sliding = {window: min(equal, unquantized(window)) for window in self.windows if window is not None}
        if window_of is not None:
            return sliding[window_of]
        rest = self.bytes - sum(sliding[window] for window in self.windows if window is not None)
        return rest // self.windows.count(None)

    def refuse(self, tokens: int, held: int, unquantized) -> None:
        """Raises Error for a layer that holds so many bytes, all packed by the scheme."""
        needed = sum(held if window is None else min(held, unquantized(window)) for window in self.windows)
        raise Error(f"budget={self.size} is too little: {tokens} tokens take {math.ceil(needed / 2**20 * 10) / 10}MiB "
                    f"at {self.scheme}; give more, a shorter context, or a scheme of fewer bits")
