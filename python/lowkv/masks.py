"""The mask function registered with transformers, and which attention a call of a switched model computes with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_overlay,
)

NAME = "lowkv"  # a switched model's attn_implementation
_SLIDING = sliding_window_overlay(1).__code__
# Of the call of a model in this thread: lowkv's attention for a lowkv cache, "eager" for weights, else None: the stock
# one that the model was loaded with.
_CALL: ContextVar[str | None] = ContextVar("lowkv_call", default=None)


@contextlib.contextmanager
def computed_by(attention: str | None) -> Iterator[None]:
    """Has what this thread computes meanwhile be computed by this attention."""
    token = _CALL.set(attention)
    try:
        yield
    finally:
        _CALL.reset(token)


def computing() -> str | None:
    """What computed_by() says."""
    return None if torch.compiler.is_dynamo_compiling() else _CALL.get()  # which can't follow a ContextVar


def stock_of(config) -> str:
    """The stock attention that a call of a model with this config computes with, where lowkv's does not."""
    found = getattr(getattr(config, "_attn_implementation", None), "stock", "sdpa")  # install.Switched's
    if computing() is None or found == "eager":
        return found
    return "eager" if computing() == "eager" else "sdpa"  # whose masks lowkv reads, unlike flash attention's


def lowkv_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function,
               attention_mask=None, use_vmap=False, device="cpu", config=None, allow_is_causal_skip=True,
               local_size=None, **kwargs):
    """In a step with a lowkv cache, for a causal mask (with the layer's sliding window, if it has one): bool `[batch,
    kv_length]`, False for padding, with strides of 0 where there is none; or None where stock sdpa would leave
    causality to the module. For everything else, and in other calls, the stock mask."""
    stock = stock_of(config)
    ends_together = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    covers = attention_mask is None or attention_mask.shape[-1] >= kv_offset + kv_length
    if (computing() == NAME and allow_is_causal_skip and ends_together and covers and not use_vmap
            and _is_causal(mask_function)):
        keep = None if attention_mask is None else attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
        if keep is not None and not keep.all():
            return keep
        whole = q_length in (1, kv_length) and (local_size is None or kv_length < local_size)
        if whole and stock != "eager":
            return None
        return torch.ones((), dtype=torch.bool, device=device).expand(batch_size, kv_length)
    make = ALL_MASK_ATTENTION_FUNCTIONS.get(stock)
    return make and make(batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                         kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
                         use_vmap=use_vmap, device=device, config=config, allow_is_causal_skip=allow_is_causal_skip,
                         local_size=local_size, **kwargs)


def _is_causal(mask_function) -> bool:
    """Causal, or causal and a sliding window and nothing else. transformers builds the latter as a closure."""
    if mask_function is causal_mask_function:
        return True
    parts = [c.cell_contents for c in mask_function.__closure__ or ()]
    if len(parts) != 1 or not isinstance(parts[0], tuple) or len(parts[0]) != 2:
        return False
    sliding = [getattr(f, "__code__", None) is _SLIDING for f in parts[0]]
    return sum(sliding) == 1 and parts[0][sliding.index(False)] is causal_mask_function
