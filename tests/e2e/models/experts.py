"""Mixtures of experts, and what came with them: attention sinks, latent attention."""

from models.base import ATTENTION, END, EXPERT_KEYS, EXPERTS, GATED, NORMS, QK_NORMS, RMS, SHARED_EXPERT, biased, write


def mixtral(path):
    return write(path, "llama", NORMS | ATTENTION | EXPERTS, width=128,
                 keys=RMS | EXPERT_KEYS | {"rope.dimension_count": 64})


def qwen3moe(path):
    return write(path, "qwen3moe", NORMS | ATTENTION | QK_NORMS | EXPERTS, width=128,
                 keys=RMS | EXPERT_KEYS)


def gpt_oss(path, window=128):
    """Attention sinks (a logit per head that takes part in the softmax), every second layer slides."""
    block = biased({"attn_norm": "w", "post_attention_norm": "w"} | ATTENTION | EXPERTS,
                   *ATTENTION, *EXPERTS) | {"attn_sinks": "h"}
    return write(path, "gpt-oss", block, width=128,
                 keys=RMS | EXPERT_KEYS | {"attention.sliding_window": window})


def hunyuan_moe(path):
    """Queries and keys are normed after RoPE."""
    return write(path, "hunyuan-moe", NORMS | ATTENTION | QK_NORMS | EXPERTS | SHARED_EXPERT,
                 width=128, keys=RMS | EXPERT_KEYS)


def deepseek2(path, latent, layers=2, heads=4, plain=128, value=128, query_rank=64):
    """With `latent`, the cache holds one key of 512 + 64 channels per token, and the values are its
    first 512 (MLA); without, as old files have it, keys of 192 channels and values of 128."""
    block = NORMS | {"attn_kv_a_mqa": "mw", "attn_kv_a_norm": "l", "attn_output": "wV"}
    # llama.cpp knows DeepSeek V2 Lite, whose queries are not compressed, by its 27 layers.
    block |= {"attn_q": "Qw"} if layers == 27 else {
        "attn_q_a": "aw", "attn_q_a_norm": "a", "attn_q_b": "Qa"}
    block |= {"attn_k_b": "hlp", "attn_v_b": "hyl"} if latent else {"attn_kv_b": "bl"}
    rope, rank = 64, 512
    keys = RMS | EXPERT_KEYS | {
        "attention.q_lora_rank": query_rank, "attention.kv_lora_rank": rank, "rope.dimension_count": rope,
        "leading_dense_block_count": 1, "expert_shared_count": 1}
    if latent:
        keys |= {"attention.key_length_mla": plain + rope, "attention.value_length_mla": value}
    return write(path, "deepseek2", lambda i: block | (EXPERTS | SHARED_EXPERT if i else GATED),
                 keys=keys, end=END, layers=layers, heads=heads, kv_heads=1 if latent else heads, width=128,
                 head_dim=rank + rope if latent else plain + rope,
                 value_dim=rank if latent else value,
                 sizes={"a": query_rank, "Q": heads * (plain + rope), "m": rank + rope, "l": rank,
                        "V": heads * value, "p": plain, "y": value, "b": heads * (plain + value)})
