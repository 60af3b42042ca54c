"""The four families whose attention does not go through transformers' AttentionInterface (GPT-J's does since
transformers 5.24, and needs no adapter there). Their attention modules
become instances of a subclass that hands the rows of a lowkv cache to lowkv. With another cache, or none, the
stock code runs; masks are the stock ones in either case."""

from __future__ import annotations

import torch
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.mpt.modeling_mpt import MptAttention

from lowkv._core import Error
from lowkv.attention import attend_packed
from lowkv.layer import Layer
from lowkv.names import cache_argument
from lowkv.tripwire import Rows


def adapt(model) -> bool:
    """Whether the model's family needs an adapter; it has one afterwards."""
    _turn(model, _ADAPTED)
    return any(type(module) in _ADAPTED.values() for module in model.modules())


def restore(model) -> None:
    """Takes the adapters back."""
    _turn(model, {ours: theirs for theirs, ours in _ADAPTED.items()})


def _turn(model, kinds: dict) -> None:
    """Gives modules the class that stands in `kinds` for theirs."""
    for module in model.modules():
        if (kind := kinds.get(type(module))) is not None:
            # What accelerate's hooks (a device_map with a part on the disk) call is the forward() from before them.
            if getattr(vars(module).get("_old_forward"), "__func__", None) is type(module).forward:
                module._old_forward = kind.forward.__get__(module)
            module.__class__ = kind


def _packed(cache, index: int) -> bool:
    layers = getattr(cache, "layers", ())
    return index < len(layers) and isinstance(layers[index], Layer)


def _merge(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2).flatten(2)


class GPTJ(GPTJAttention):
    def _attn(self, query, key, value, attention_mask=None):
        if type(key) is not Rows:
            return super()._attn(query, key, value, attention_mask)
        return attend_packed(query, key, attention_mask, scaling=1.0 / float(self.scale_attn)).to(query.dtype), None


class Falcon(FalconAttention):
    def forward(self, hidden_states, alibi, attention_mask, position_ids=None, layer_past=None, use_cache=False,
                output_attentions=False, position_embeddings=None, **kwargs):
        if not _packed(layer_past, self.layer_idx):
            return super().forward(hidden_states, alibi, attention_mask, position_ids=position_ids,
                                   layer_past=layer_past, use_cache=use_cache, output_attentions=output_attentions,
                                   position_embeddings=position_embeddings, **kwargs)
        if alibi is not None and attention_mask is None:
            raise Error("Falcon with ALiBi: the model gave no mask, in which the biases are expected")
        query, key, value = self._query_and_kv_heads(self.query_key_value(hidden_states))
        if alibi is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        key, _ = layer_past.update(key, value, self.layer_idx)
        # The model has added the biases to its mask already.
        out = attend_packed(query, key, attention_mask, scaling=self.inv_norm_factor)
        return self.dense(_merge(out)), None

    def _query_and_kv_heads(self, fused):
        """Query, keys and values `[batch, heads, tokens, head_dim]`, one kv head for each group of query heads,
        where the stock code stores a copy for each query head."""
        if not self.new_decoder_architecture:
            return tuple(x.transpose(1, 2) for x in self._split_heads(fused))
        groups = fused.unflatten(2, (self.num_kv_heads, -1, self.head_dim))
        query = groups[:, :, :, :-2].flatten(2, 3)
        return query.transpose(1, 2), groups[:, :, :, -2].transpose(1, 2), groups[:, :, :, -1].transpose(1, 2)


class Bloom(BloomAttention):
    def forward(self, hidden_states, residual, alibi, attention_mask, layer_past=None, use_cache=False,
                output_attentions=False, **kwargs):
        if not _packed(layer_past, self.layer_idx):
            return super().forward(hidden_states, residual, alibi, attention_mask, layer_past=layer_past,
                                   use_cache=use_cache, output_attentions=output_attentions, **kwargs)
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        key, _ = layer_past.update(key, value, self.layer_idx)
        out = attend_packed(query, key, attention_mask, scaling=self.inv_norm_factor,
                            bias=alibi.unflatten(0, (-1, self.num_heads)))
        out = dropout_add(self.dense(_merge(out)), residual, self.hidden_dropout, self.training)
        return out, None


class Mpt(MptAttention):
    def forward(self, hidden_states, position_bias, attention_mask=None, **kwargs):
        cache = kwargs.get(_MPT_CACHE)
        if not _packed(cache, self.layer_idx):
            return super().forward(hidden_states, position_bias, attention_mask=attention_mask, **kwargs)
        qkv = self.Wqkv(hidden_states)
        if self.clip_qkv:
            qkv = qkv.clamp(-self.clip_qkv, self.clip_qkv)
        query, key, value = (x.unflatten(2, (self.n_heads, -1)).transpose(1, 2) for x in qkv.chunk(3, dim=2))
        key, _ = cache.update(key, value, self.layer_idx)
        bias = None
        if position_bias is not None:
            length = cache.get_seq_length(self.layer_idx)
            if length > position_bias.shape[2]:
                raise Error(f"{length} tokens, but the model has biases for max_seq_len={position_bias.shape[2]}")
            bias = position_bias[None, :, :, -length:]
        # MPT's mask is True where a cell is hidden.
        seen = None if attention_mask is None else ~attention_mask
        out = attend_packed(query, key, seen, scaling=self.softmax_scale, bias=bias)
        return self.out_proj(_merge(out)), None


_MPT_CACHE = cache_argument(MptAttention.forward)
_ADAPTED = {FalconAttention: Falcon, BloomAttention: Bloom, MptAttention: Mpt}
if hasattr(GPTJAttention, "_attn"):
    _ADAPTED[GPTJAttention] = GPTJ
