"""The attention function registered with transformers."""

from __future__ import annotations

import sys
from typing import NoReturn

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from lowkv._core import Error
from lowkv.masks import NAME, computing, lowkv_mask, stock_of
from lowkv.tripwire import Rows
from lowkv.visibility import Visibility


def refuse_weights() -> NoReturn:
    raise Error("output_attentions: lowkv's attention makes no weights to return; leave it out")


def refuse_unstored(module) -> NoReturn:
    raise Error(f"{type(module).__name__} did not store its keys in the lowkv cache that it was given. In training "
                "mode gradient checkpointing leaves caches out: call model.eval()")


def lowkv_attention(module, query, key, value, attention_mask=None, **kwargs):
    """AttentionInterface's function. query: `[batch, heads, queries, head_dim]`; key and value: what
    Layer.update() gave, or plain tensors `[batch, kv_heads, cells, head_dim]` of another cache or of none, which
    get stock attention. Returns `[batch, queries, heads, head_dim]` and weights, or None."""
    stock = stock_of(getattr(module, "config", None))
    if type(key) is Rows:
        return _packed(module, query, key, attention_mask, stock, **kwargs)
    if computing() == NAME and attention_mask is not None and attention_mask.ndim == 2:
        refuse_unstored(module)
    attend = _of(module, "ALL_ATTENTION_FUNCTIONS").get(stock) or _of(module, "eager_attention_forward")
    return attend(module, query, key, value, attention_mask, **kwargs)


def _packed(module, query, key, mask, stock, scaling=None, dropout=0.0, softcap=None, sliding_window=None, s_aux=None,
            is_causal=None, position_bias=None, **kwargs):
    if position_bias is not None:
        raise Error(f"{type(module).__name__} adds a position bias, which lowkv does not serve; use the model's "
                    "own cache and attn_implementation")
    if kwargs.get("output_attentions"):
        refuse_weights()
    causal = True
    if mask is None and query.shape[2] > 1:  # stock sdpa then asks the module, stock eager attention masks nothing
        causal = stock != "eager" and (is_causal if is_causal is not None else getattr(module, "is_causal", True))
    out = attend_packed(query, key, mask, bool(causal), scaling=scaling, dropout=dropout, softcap=softcap,
                        window=sliding_window, sink_logits=s_aux)
    return out.transpose(1, 2).contiguous(), None


def _of(module, name: str):
    """What the file of the module's class, or of the one that this is derived from, has under this name."""
    files = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    return next(getattr(file, name) for file in files if hasattr(file, name))


def attend_packed(query, rows: Rows, mask, causal=True, scaling=None, dropout=0.0, softcap=None, window=None,
                  sink_logits=None, bias=None):
    """Attention over the cache that `rows` stands for; also called by the adapters.

    mask: as lowkv_mask() makes it; bias: additive `[batch or 1, heads, 1 or queries, cells]`, or None. Returns
    `[batch, heads, queries, head_dim]`."""
    layer = rows.layer
    if dropout:
        raise Error("attention dropout with a cache: call model.eval()")
    if window is not None and layer.sliding_window is not None and window != layer.sliding_window:
        raise Error(f"layer {layer.index} slides over {window} tokens, but the cache was made for "
                    f"{layer.sliding_window}: make it with Cache.from_model() of this model")
    if mask is not None and mask.ndim == 4 and layer.sliding_window is not None:
        columns = layer.sliding_window + query.shape[2] - 1
        if layer.length > columns and mask.shape[3] > columns:
            raise Error(f"an attention mask of shape {tuple(mask.shape)} for layer {layer.index}, which slides over "
                        f"{layer.sliding_window} tokens: it takes the columns of the newest {columns} cells. Give the "
                        "model a mask per layer type, {'full_attention': ..., 'sliding_attention': ...}, or a 2-D one")
    visibility = see(mask, layer.length, query, causal, layer.sliding_window or window)
    visibility.bias = bias
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    return layer.attend(query, visibility, float(scale), softcap, sink_logits)


def see(mask: torch.Tensor | None, total: int, query: torch.Tensor, causal: bool, window: int | None) -> Visibility:
    """What a model's attention_mask says, in any of the forms that lowkv_mask() or a user gives it, of `query`,
    `[batch, heads, queries, head_dim]`, among `total` cells."""
    queries, device = query.shape[2], query.device
    if mask is not None and mask.ndim not in (2, 4):
        raise Error(f"an attention mask of shape {tuple(mask.shape)}; lowkv takes [batch, cells] and "
                    "[batch, heads or 1, queries, cells]")
    if mask is not None and mask.ndim == 4:
        if mask.shape[2] not in (1, queries):
            raise Error(f"an attention mask of shape {tuple(mask.shape)} for {queries} queries")
        # On a sliding layer it begins where the window does.
        if mask.shape[3] < (min(total, window + queries - 1) if window is not None else total):
            raise Error(f"an attention mask of shape {tuple(mask.shape)} for {total} cells: it has a column for each "
                        "token in the cache and for each new one")
        full = mask if mask.shape[2] == queries else mask.expand(-1, -1, queries, -1)
        # Masks for caches with room to spare are longer than what is there.
        return Visibility(total, queries, full=full[..., :total], device=device)
    if mask is not None and mask.stride() == (0, 0):  # lowkv_mask() saw no padding
        mask = None
    return Visibility(total, queries, causal=causal, window=window if causal else None, keep=mask, device=device)


AttentionInterface.register(NAME, lowkv_attention)
AttentionMaskInterface.register(NAME, lowkv_mask)
