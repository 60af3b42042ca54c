"""Attention in every fourth layer, after three with a delta rule, whose state llama.cpp keeps itself."""

from models.base import ATTENTION, EXPERT_KEYS, EXPERTS, GATED, QK_NORMS, RMS, SHARED_EXPERT, write
from models.experts import DRAFTS, SIGMOID_EXPERTS, SIGMOID_KEYS

NORMS = {"attn_norm": "w", "post_attention_norm": "w"}
# Half of the matrix of queries makes the gate of attention's output.
GATED_ATTENTION = ATTENTION | QK_NORMS | {"attn_q": "Qw"}
GATED_EXPERTS = EXPERTS | SHARED_EXPERT | {"ffn_gate_inp_shexp": "w"}
# As many value heads as twice the key heads, all of 128 channels.
KEY_HEADS, CHANNELS = 2, 128
SIZES = {"Q": 2 * 4 * 256, "c": 4 * KEY_HEADS * CHANNELS, "V": 2 * KEY_HEADS * CHANNELS, "H": 2 * KEY_HEADS,
         "D": CHANNELS, "B": 4 * KEY_HEADS, "4": 4, "W": 256}
KEYS = RMS | {"ssm.conv_kernel": 4, "ssm.inner_size": SIZES["V"], "ssm.state_size": CHANNELS,
              "ssm.time_step_rank": SIZES["H"], "ssm.group_count": KEY_HEADS, "full_attention_interval": 4,
              "rope.dimension_count": 64, "rope.freq_base": 1e7}
GATED_EXPERT_KEYS = EXPERT_KEYS | {"expert_shared_feed_forward_length": 64}
SECTIONS = {"rope.dimension_sections": [11, 11, 10, 0]}
DELTA = {"attn_qkv": "cw", "attn_gate": "Vw", "ssm_conv1d": "c4", "ssm_dt.bias": "H", "=ssm_a": "H",
         "ssm_norm": "D", "ssm_out": "wV"}
SPLIT_DELTA = DELTA | {"ssm_alpha": "Hw", "ssm_beta": "Hw"}


def gated_delta_net(path, arch, delta, feed_forward, keys, layers=8, drafts=0):
    """`drafts` layers of attention behind the others: they draft what the model says next."""
    def block(i):
        mixer = GATED_ATTENTION if i % 4 == 3 else delta
        return NORMS | feed_forward | (mixer if i < layers else GATED_ATTENTION | DRAFTS)

    return write(path, arch, block, layers=layers + drafts, head_dim=256, kv_heads=1, width=128, sizes=SIZES,
                 keys=KEYS | keys | {"nextn_predict_layers": drafts}, means={"ffn_gate_inp_shexp": 0.0})


def qwen3next(path):
    """Gated delta nets around gated attention, a quarter of whose heads is rotated."""
    return gated_delta_net(path, "qwen3next", DELTA | {"ssm_ba": "Bw"}, GATED_EXPERTS, GATED_EXPERT_KEYS)


def qwen35(path, drafts=0):
    return gated_delta_net(path, "qwen35", SPLIT_DELTA, GATED, SECTIONS, drafts=drafts)


def qwen35moe(path):
    return gated_delta_net(path, "qwen35moe", SPLIT_DELTA, GATED_EXPERTS, SECTIONS | GATED_EXPERT_KEYS)


def qwen4exp(path, layers=4, streams=2, rank=32, indexer_heads=4, ratio=8, budget=64):
    """Several residual streams, and attention to those blocks of `ratio` tokens that an indexer with a
    cache of its own chooses: a mask that the graph computes."""
    mixers = {f"hc_{side}_{name}": letters for side in ("attn", "ffn") for name, letters in (
        ("norm", "s"), ("down", "Rs"), ("up", "sR"), ("inject", "Ss"))}
    indexer = {"indexer.q_proj.weight": "Iw", "indexer.k_proj.weight": "Dw", "indexer.q_norm.weight": "D",
               "indexer.k_norm.weight": "D"}
    return write(path, "qwen4exp",
                 lambda i: mixers | GATED_EXPERTS | (GATED_ATTENTION | indexer if i % 4 == 3 else SPLIT_DELTA),
                 layers=layers, head_dim=256, kv_heads=1, width=128, means={"ffn_gate_inp_shexp": 0.0},
                 sizes=SIZES | {"s": streams * 128, "R": rank, "S": streams, "I": indexer_heads * CHANNELS},
                 end={"output_hc_norm": "s", "output_hc_down": "Rs", "output_hc_up": "sR", "output": "nw"},
                 keys=KEYS | SECTIONS | GATED_EXPERT_KEYS | {
                     "hyper_connection.count": streams, "hyper_connection.low_rank": rank,
                     "attention.indexer.head_count": indexer_heads, "attention.indexer.key_length": CHANNELS,
                     "attention.indexer.top_k": budget,
                     "attention.compress_ratios": [ratio if i % 4 == 3 else 0 for i in range(layers)]})


def kimi_linear(path):
    """Kimi Delta Attention, with one decay per channel, around latent attention (MLA) without positions."""
    heads, rope, rank, plain = 4, 64, 512, 128
    delta = {"attn_q": "Pw", "attn_k": "Pw", "attn_v": "Pw", "attn_output": "wP",
             "ssm_conv1d_q": "1P14", "ssm_conv1d_k": "1P14", "ssm_conv1d_v": "1P14", "ssm_f_a": "Dw", "ssm_f_b": "PD",
             "ssm_beta": "hw", "=ssm_a": "h1", "ssm_dt.bias": "P", "ssm_g_a": "Dw", "ssm_g_b": "PD", "ssm_norm": "D"}
    latent = {"attn_q": "Lw", "attn_kv_a_mqa": "mw", "attn_kv_a_norm": "l", "attn_k_b": "hlD", "attn_v_b": "hDl",
              "attn_output": "wP"}
    return write(path, "kimi-linear",
                 lambda i: {"attn_norm": "w", "ffn_norm": "w"} | (latent if i % 4 == 3 else delta) |
                 (SIGMOID_EXPERTS | SHARED_EXPERT if i else GATED),
                 layers=4, heads=heads, kv_heads=[0, 0, 0, 1], width=128, head_dim=rank + rope, value_dim=rank,
                 sizes={"P": heads * CHANNELS, "D": CHANNELS, "1": 1, "4": 4, "L": heads * (plain + rope),
                        "m": rank + rope, "l": rank},
                 keys=RMS | SIGMOID_KEYS | {
                     "attention.kv_lora_rank": rank, "attention.key_length_mla": plain + rope,
                     "attention.value_length_mla": CHANNELS, "rope.dimension_count": rope, "ssm.conv_kernel": 4,
                     "kda.head_dim": CHANNELS, "expert_shared_count": 1, "leading_dense_block_count": 1})
