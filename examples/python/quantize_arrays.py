"""KIVI's arithmetic on plain arrays, in the shapes of the package kivi_sycl. Needs numpy only.
python quantize_arrays.py"""

# %% Keys: per channel, one group of tokens. [batch, heads, head_dim, tokens]
import lowkv
import numpy as np

random = np.random.default_rng(1)
batch, heads, head_dim, tokens = 1, 2, 64, 32
keys = random.normal(size=(batch, heads, head_dim, tokens)).astype(np.float32)
packed = np.empty((batch, heads, head_dim, tokens // 4), np.uint8)
scales, zeros = np.empty((batch, heads, head_dim), np.float32), np.empty((batch, heads, head_dim), np.float32)
lowkv.quantize_keys(keys, packed, scales, zeros, tokens)
decoded = np.empty_like(keys)
lowkv.dequantize_keys(packed, scales, zeros, decoded, tokens)
print(f"keys: {packed.nbytes} bytes of codes for {keys.nbytes}, worst error "
      f"{np.abs(decoded - keys).max():.2f}, worst scale {scales.max():.2f}")

# %% Values: per token, in groups of channels. [batch, heads, tokens, head_dim]
group = 32
values = random.normal(size=(batch, heads, tokens, head_dim)).astype(np.float32)
packed = np.empty((batch, heads, tokens, head_dim // 4), np.uint8)
scales, zeros = (np.empty((batch, heads, tokens, head_dim // group), np.float32) for _ in range(2))
lowkv.quantize_values(values, packed, scales, zeros, head_dim, group)
decoded = np.empty_like(values)
lowkv.dequantize_values(packed, scales, zeros, decoded, head_dim, group)
print(f"values: worst error {np.abs(decoded - values).max():.2f}, worst scale {scales.max():.2f}")
