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


# Experts are chosen by sigmoids and a bias.
SIGMOID_EXPERTS = EXPERTS | {"exp_probs_b.bias": "e"}
SIGMOID_KEYS = EXPERT_KEYS | {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5}
# What a layer has besides that drafts the token after the next (MTP).
DRAFTS = {"nextn.eh_proj.weight": "wW", "nextn.enorm.weight": "w", "nextn.hnorm.weight": "w"}


def glm4moe(path):
    """GLM 4.5: half of a head is rotated, q, k and v have biases; the first layer has no experts, and
    a last one, which llama.cpp only runs to draft, has no cache."""
    block = biased(ATTENTION, "attn_q", "attn_k", "attn_v") | QK_NORMS | {
        "attn_norm": "w", "post_attention_norm": "w"}
    feed_forward = [GATED, SIGMOID_EXPERTS | SHARED_EXPERT, SIGMOID_EXPERTS | SHARED_EXPERT | DRAFTS]
    return write(path, "glm4moe", lambda i: block | feed_forward[i], layers=3, heads=8, kv_heads=1, head_dim=128,
                 width=128, sizes={"W": 256}, keys=RMS | SIGMOID_KEYS | {
                     "rope.dimension_count": 64, "leading_dense_block_count": 1, "expert_shared_count": 1,
                     "nextn_predict_layers": 1})


def minimax_m2(path):
    """Queries and keys are normed over all heads at once, and half of a head is rotated."""
    return write(path, "minimax-m2", NORMS | ATTENTION | SIGMOID_EXPERTS | {"attn_q_norm": "q", "attn_k_norm": "k"},
                 heads=6, kv_heads=1, head_dim=128, width=128,
                 keys=RMS | EXPERT_KEYS | {"expert_gating_func": 2, "rope.dimension_count": 64})


def afmoe(path, window=160):
    """Attention's output is gated; three layers of four slide and rotate, the fourth does neither."""
    block = NORMS | ATTENTION | QK_NORMS | {
        "attn_gate": "qw", "post_attention_norm": "w", "post_ffw_norm": "w"}
    return write(path, "afmoe", lambda i: block | (SIGMOID_EXPERTS | SHARED_EXPERT if i > 1 else GATED),
                 layers=4, head_dim=128, width=128, embedding=0.1, keys=RMS | SIGMOID_KEYS | {
                     "rope.dimension_count": 128, "leading_dense_block_count": 2, "expert_shared_count": 1,
                     "attention.sliding_window": window})


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
