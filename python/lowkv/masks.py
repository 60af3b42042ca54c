"""The mask function registered with transformers: compact forms for what lowkv knows by itself, stock 4-D masks
for everything else."""

from __future__ import annotations

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_overlay

_SLIDING = sliding_window_overlay(1).__code__


def lowkv_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function,
               attention_mask=None, use_vmap=False, device="cpu", **kwargs):
    """None for a causal mask (with the layer's sliding window, if it has one); bool `[batch, kv_length]`, False
    for padding, beside it; otherwise bool `[batch, 1, q_length, kv_length]`, True where a query sees a cell."""
    ends_together = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    covers = attention_mask is None or attention_mask.shape[-1] >= kv_offset + kv_length
    if ends_together and covers and not use_vmap and _is_causal(mask_function):
        if attention_mask is None:
            return None
        keep = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        return None if keep.all() else keep
    kwargs.pop("allow_is_causal_skip", None)
    kwargs.pop("allow_is_bidirectional_skip", None)
    return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                     kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
                     use_vmap=use_vmap, device=device, allow_is_causal_skip=False, **kwargs)


def _is_causal(mask_function) -> bool:
    """Causal, or causal and a sliding window and nothing else. transformers builds the latter as a closure."""
    if mask_function is causal_mask_function:
        return True
    parts = [c.cell_contents for c in mask_function.__closure__ or ()]
    if len(parts) != 1 or not isinstance(parts[0], tuple) or len(parts[0]) != 2:
        return False
    sliding = [getattr(f, "__code__", None) is _SLIDING for f in parts[0]]
    return sum(sliding) == 1 and parts[0][sliding.index(False)] is causal_mask_function
