"""Attention with recurrent layers, whose state also lands in our buffer."""

from models.base import (
    ATTENTION,
    EXPERT_KEYS,
    EXPERTS,
    GATED,
    LAYER_NORM,
    NORMS,
    PLAIN,
    QK_NORMS,
    RMS,
    SHARED_EXPERT,
    write,
)


def lfm2(path, layers=3):
    """Short convolutions around one attention."""
    convolution = {"shortconv.conv.weight": "w3", "shortconv.in_proj.weight": "iw",
                   "shortconv.out_proj.weight": "ww"}
    return write(path, "lfm2",
                 lambda i: NORMS | GATED | (ATTENTION | QK_NORMS if i == 1 else convolution),
                 keys=RMS | {"shortconv.l_cache": 3}, layers=layers, kv_heads=[0, 2, 0],
                 end={"token_embd_norm": "w", "output": "nw"}, sizes={"3": 3, "i": 768})


def jamba(path):
    """Mamba around one attention without positions."""
    mamba = {"ssm_in": "iw", "ssm_conv1d": "m4", "ssm_conv1d.bias": "m", "ssm_x": "xm",
             "ssm_dt_norm": "r", "ssm_dt": "mr", "ssm_dt.bias": "m", "ssm_b_norm": "s",
             "ssm_c_norm": "s", "=ssm_a": "ms", "=ssm_d": "m", "ssm_out": "wm"}
    return write(path, "jamba", lambda i: NORMS | GATED | (ATTENTION if i == 1 else mamba),
                 layers=3, kv_heads=[0, 2, 0],
                 sizes={"i": 1024, "m": 512, "4": 4, "x": 8 + 2 * 16, "r": 8, "s": 16},
                 keys=RMS | {"ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 16,
                             "ssm.time_step_rank": 8})


def falcon_h1(path):
    """Each layer adds attention and Mamba-2."""
    mamba = {"ssm_in": "iw", "ssm_conv1d": "c4", "ssm_conv1d.bias": "c", "ssm_dt.bias": "r",
             "=ssm_a": "r1", "=ssm_d": "r1", "ssm_norm": "1m", "ssm_out": "wm"}
    norms = {"attn_norm": "w", "=ffn_norm": "w"}
    return write(path, "falcon-h1", norms | ATTENTION | GATED | mamba, width=128,
                 sizes={"i": 128 + 160 + 4, "c": 128 + 2 * 16, "4": 4, "r": 4, "1": 1, "m": 128},
                 keys=RMS | {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16,
                             "ssm.time_step_rank": 4, "ssm.group_count": 1})


def mamba2(inner, groups, state=128, head_dim=64):
    """Tensors, sizes and keys of a Mamba-2 layer."""
    heads, convolved = inner // head_dim, inner + 2 * groups * state
    tensors = {"ssm_in": "iw", "ssm_conv1d": "c4", "ssm_conv1d.bias": "c", "ssm_dt.bias": "r", "=ssm_a": "r1",
               "=ssm_d": "r1", "ssm_norm": "am", "ssm_out": "wM"}
    sizes = {"i": inner + convolved + heads, "c": convolved, "4": 4, "r": heads, "1": 1, "a": groups,
             "m": inner // groups, "M": inner}
    keys = {"ssm.conv_kernel": 4, "ssm.inner_size": inner, "ssm.state_size": state, "ssm.time_step_rank": heads,
            "ssm.group_count": groups}
    return tensors, sizes, keys


def granitehybrid(path):
    """Mamba-2 around one attention without positions, whose scores are scaled by less than
    head_dim's root; experts, and scaled embeddings, residuals and logits."""
    tensors, sizes, keys = mamba2(inner=256, groups=1)
    return write(path, "granitehybrid",
                 lambda i: NORMS | EXPERTS | SHARED_EXPERT | (ATTENTION if i == 2 else tensors),
                 layers=4, kv_heads=[0, 0, 1, 0], head_dim=128, width=128, sizes=sizes,
                 keys=RMS | EXPERT_KEYS | keys | {
                     "expert_shared_feed_forward_length": 64, "rope.scaling.finetuned": False,
                     "attention.scale": 0.0625, "residual_scale": 0.5, "embedding_scale": 2.0, "logit_scale": 0.5})


def nemotron_h(path):
    """Each layer is one of three: Mamba-2, attention without positions, or a feed-forward."""
    tensors, sizes, keys = mamba2(inner=256, groups=2)
    kinds = [tensors, PLAIN, tensors, ATTENTION, PLAIN, tensors]
    return write(path, "nemotron_h", lambda i: {"attn_norm": "w"} | kinds[i], layers=len(kinds), head_dim=128,
                 width=128, kv_heads=[1 if kind is ATTENTION else 0 for kind in kinds], sizes=sizes,
                 keys=RMS | LAYER_NORM | keys | {
                     "feed_forward_length": [64 if kind is PLAIN else 0 for kind in kinds]})
