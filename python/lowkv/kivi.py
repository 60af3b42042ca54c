"""A cache with the settings and the hand-written-loop methods of the Intel package kivi_sycl, whose users can
go on as they are."""

from __future__ import annotations

from transformers import PreTrainedModel

from lowkv._core import Error
from lowkv.cache import Cache


class KiviCache(Cache):
    """KIVI with 2 bits (Liu et al., 2024): keys per channel, values per token, the newest tokens exact.

    Unlike the original it is attended to packed: get_full_cache() gives the cache itself, which a model takes as
    `cache`.
    """

    @classmethod
    def from_model(cls, model: PreTrainedModel, group_size: int = 32, residual_length: int = 128,
                   device: str | None = None) -> KiviCache:
        """An empty cache. group_size: elements that share a scale, 32, 64 or 128; residual_length: newest tokens
        kept exact; device: as for Cache."""
        codec = f"k=channel-2-g{group_size},v=token-2-g{group_size}"
        return super().from_model(model, f"{codec},window={residual_length},sinks=0", device)

    def add_tokens(self, past_key_values) -> None:
        """Takes over the tokens by which another cache (or a tuple of layers of keys and values,
        `[batch, kv_heads, tokens, head_dim]`) is longer than this one. This cache itself has its tokens already."""
        if past_key_values is self:
            return
        if self.layers_with_states:
            raise Error("add_tokens: a hybrid model keeps states beside keys and values, which are not taken over; "
                        "call the model with this cache from the first token on")
        layers = _layers(past_key_values)
        if len(layers) != len(self.layers):
            raise Error(f"add_tokens: {len(layers)} layers with tokens, but the model has {len(self.layers)}")
        with self.step():
            for layer, (keys, values) in zip(self.layers, layers, strict=True):
                layer.take_over(keys, values)

    def get_full_cache(self) -> KiviCache:
        """What the model takes as `cache`; full() gives a layer's decoded tensors."""
        return self

    def get_stats(self, layer: int = 0) -> dict[str, float | int]:
        """Of one layer: `kivi_bytes` really held, `fp32_bytes` that its tokens would take in float32, their ratio
        `compression`, `tokens`, and how many of them are still exact (`exact_tokens`)."""
        found = self.rows_of(layer)
        held, full = found.nbytes, found.float32_bytes
        return {"compression": full / held if held else 1.0, "kivi_bytes": held, "fp32_bytes": full,
                "tokens": found.length, "exact_tokens": found.exact_tokens}


def _layers(past_key_values):
    if isinstance(past_key_values, Cache):
        dropped = [layer.index for layer in past_key_values.layers if layer.rows is not None and layer.rows.first > 0]
        if dropped:
            raise Error(f"add_tokens: layer {dropped[0]} of that cache has dropped what its sliding window has passed")
        return [past_key_values.full(index) for index in range(len(past_key_values.layers))]
    if hasattr(past_key_values, "layers"):
        return [_rows(index, layer) for index, layer in enumerate(past_key_values.layers) if layer.is_initialized]
    if not isinstance(past_key_values, (tuple, list)):
        raise Error(f"add_tokens takes a cache or a tuple of layers, not {type(past_key_values).__name__}")
    return [tuple(layer[:2]) for layer in past_key_values]


def _rows(index: int, layer):
    """Keys and values of a stock cache's layer, from the first token on."""
    tokens, keys, values = int(layer.get_seq_length()), layer.keys, layer.values
    if hasattr(layer, "_quantize"):
        raise Error(f"add_tokens: layer {index} of that cache is a {type(layer).__name__}, whose tokens are packed in "
                    "another way; give a cache that is not quantized")
    if keys.shape[2] < tokens:
        raise Error(f"add_tokens: layer {index} of that cache, a {type(layer).__name__}, has seen {tokens} tokens and "
                    f"kept {keys.shape[2]}; add them before the window has passed any, or call the model with this "
                    "cache from the first token on")
    return keys[:, :, :tokens], values[:, :, :tokens]  # a static layer has room for more behind them
