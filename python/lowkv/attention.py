"""The attention function registered with transformers."""

from __future__ import annotations

import sys
from typing import NoReturn

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lowkv._core import Error
from lowkv.masks import lowkv_mask
from lowkv.tripwire import Rows
from lowkv.visibility import Visibility


class _Name(str):
    """A name whose unpickling imports this module: a switched model, or a part of it, finds the attention function
    registered in another process too."""


NAME = _Name("lowkv")


def refuse_weights() -> NoReturn:
    raise Error("output_attentions: lowkv's attention makes no weights to return; leave it out")


def lowkv_attention(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, softcap=None,
                    sliding_window=None, s_aux=None, is_causal=None, position_bias=None, **kwargs):
    """AttentionInterface's function. query: `[batch, heads, queries, head_dim]`; key and value: what
    Layer.update() gave, or plain tensors `[batch, kv_heads, cells, head_dim]` of another cache or of none, which
    get stock attention. Returns `[batch, queries, heads, head_dim]` and None (no weights)."""
    if position_bias is not None:
        raise Error(f"{type(module).__name__} adds a position bias, which lowkv does not serve; use the model's "
                    "own cache and attn_implementation")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if type(key) is not Rows:
        window = sliding_window if sliding_window is not None else _window(module)
        visibility = see(attention_mask, key.shape[2], query, bool(causal), window)
        return _stock(module, query, key, value, visibility, scaling, dropout, softcap, s_aux, kwargs)
    if kwargs.get("output_attentions"):
        refuse_weights()
    out = attend_packed(query, key, attention_mask, bool(causal), scaling=scaling, dropout=dropout, softcap=softcap,
                        window=sliding_window, sink_logits=s_aux)
    return out.transpose(1, 2).contiguous(), None


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
    return Visibility(total, queries, causal=causal, window=window if causal else None, keep=mask, device=device)


def _window(module) -> int | None:
    """The sliding window of a module that does not say it, as PhiMoE's: stock masks would have it."""
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None)
    if types is not None and (layer is None or types[layer] != "sliding_attention"):
        return None
    return getattr(config, "sliding_window", None)


def _stock(module, query, key, value, visibility, scaling, dropout, softcap, s_aux, kwargs):
    """Stock attention with the mask that the compact form stands for."""
    cells, queries = visibility.total, visibility.queries
    all_seen = not visibility.causal and visibility.full is None and visibility.keep is None
    if not softcap and s_aux is None and not kwargs.get("output_attentions"):  # which eager attention alone has
        mask = None
        if not all_seen and not (visibility.plain_causal and queries == cells):
            mask = visibility.seen(0, cells, 0, queries)
        # Bool, as stock masks for sdpa are: an additive one gives padding other gradients.
        if mask is not None and mask.dtype is not torch.bool:
            mask = _finite(mask, query.dtype)
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling,
                                      is_causal=visibility.causal and mask is None and queries == cells)
    # Eager attention knows no other causality than its mask.
    mask = None if all_seen else _finite(visibility.mask(0, cells, 0, queries), query.dtype)
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if s_aux is not None:
        kwargs["s_aux"] = s_aux
    return eager(module, query, key, value, mask, scaling=scaling, dropout=dropout, softcap=softcap, **kwargs)


def _finite(mask, dtype):
    """As stock masks are: with -inf, eager attention gives NaN for a padding token, which sees nothing."""
    return None if mask is None else mask.to(dtype).clamp_min(torch.finfo(dtype).min)


AttentionInterface.register(NAME, lowkv_attention)
AttentionMaskInterface.register(NAME, lowkv_mask)
