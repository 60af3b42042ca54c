"""The Gemma family: sliding windows with a cache of their own, and layers that share a cache."""

from models.base import ATTENTION, GATED, GEMMA_NORMS, QK_NORMS, RMS, TIED_END, write


def gemma2(path, head_dim=96, layers=4, width=128, window=160):
    """Every second layer slides over a window, and scores are soft-capped."""
    return write(path, "gemma2", GEMMA_NORMS | ATTENTION | GATED, end=TIED_END, layers=layers,
                 head_dim=head_dim, width=width, embedding=0.1, keys=RMS | {
                     "attention.sliding_window": window, "attn_logit_softcapping": 5.0,
                     "final_logit_softcapping": 30.0})


def gemma3(path, layers=6, window=160):
    """Five layers of six slide, with a RoPE of their own; one kv head."""
    return write(path, "gemma3", GEMMA_NORMS | ATTENTION | QK_NORMS | GATED,
                 layers=layers, kv_heads=1, width=128, embedding=0.1,
                 keys=RMS | {"attention.sliding_window": window, "rope.freq_base": 1e6,
                             "rope.freq_base_swa": 1e4})


# These scale no scores by head_dim: their norms do.
NARROW_NORMS = {"attn_q_norm": 0.3, "attn_k_norm": 0.3}


def gemma3n(path, window=160):
    """The layers from the 21st on have no cache: they read that of layer 18 (sliding) or 19. That
    number and the sizes of AltUp and Laurel are llama.cpp's own."""
    layers = 25
    block = GEMMA_NORMS | ATTENTION | QK_NORMS | GATED | {
        "inp_gate": "aw", "proj": "wa", "post_norm": "w", "altup_correct_coef": "44",
        "altup_correct_scale": "w", "altup_predict_coef": "64", "altup_router": "4w",
        "altup_router_norm": "w", "laurel_l": "lw", "laurel_r": "wl", "laurel_post_norm": "w"}
    start = {"altup_proj": "3ww", "altup_unembd_proj": "3ww", "per_layer_token_embd": "np",
             "per_layer_model_proj": "pw", "per_layer_proj_norm": "a"}
    return write(path, "gemma3n", block, start=start, layers=layers, heads=2,
                 kv_heads=1, width=64, embedding=0.1,
                 sizes={"a": 256, "p": 256 * layers, "l": 64, "3": 3, "4": 4, "6": 16},
                 keys=RMS | {"attention.sliding_window": window},
                 # Its 25 layers would amplify rounding.
                 means=NARROW_NORMS | dict.fromkeys(["post_attention_norm", "post_ffw_norm",
                                                     "post_norm", "laurel_post_norm"], 0.3))


def gemma4(path, head_dim=128, window=160):
    """Heads of full layers are wider than those of sliding ones (the real ones 512 and 256), and the
    last layers read the caches of the two before them."""
    sliding, layers = [True, False] * 3, 6

    def block(i):
        own = {"attn_k": "kw", "attn_v": "vw", "attn_k_norm": "d"} if i < 4 else {}
        tensors = GEMMA_NORMS | GATED | {
            "attn_q": "qw", **own, "attn_output": "wo", "attn_q_norm": "d", "inp_gate": "aw",
            "proj": "wa", "post_norm": "w", "layer_output_scale": "1"}
        if sliding[i]:
            tensors |= {name: letters.translate(str.maketrans("qkvod", "QKVOD"))
                        for name, letters in tensors.items()}
        return tensors

    start = {"per_layer_token_embd": "np", "per_layer_model_proj": "pw", "per_layer_proj_norm": "a",
             "rope_freqs": "r"}
    narrow = 64
    return write(path, "gemma4", block, start=start, layers=layers, head_dim=head_dim,
                 kv_heads=1, width=128, embedding=0.1, means=NARROW_NORMS,
                 sizes={"a": 32, "p": 32 * layers, "r": head_dim // 2, "1": 1, "Q": 4 * narrow,
                        "K": narrow, "V": narrow, "O": 4 * narrow, "D": narrow},
                 keys=RMS | {
                     "attention.sliding_window": window, "attention.shared_kv_layers": 2,
                     "attention.sliding_window_pattern": sliding,
                     "attention.key_length_swa": narrow, "attention.value_length_swa": narrow,
                     "rope.dimension_count_swa": narrow,
                     "embedding_length_per_layer_input": 32})


def gemma4_assistant(path, window=160):
    """A draft for gemma4(): it stores nothing, and attends to the target's last sliding layer and its last full one."""
    sliding, layers = [True, False] * 2, 4

    def block(i):
        tensors = GEMMA_NORMS | GATED | {"attn_q": "qw", "attn_output": "wo", "attn_q_norm": "d",
                                         "layer_output_scale": "1"}
        if sliding[i]:
            tensors |= {name: letters.translate(str.maketrans("qod", "QOD")) for name, letters in tensors.items()}
        return tensors

    narrow, wide, target = 64, 128, 128
    return write(path, "gemma4-assistant", block, layers=layers, head_dim=wide, kv_heads=1, width=64, embedding=0.1,
                 means=NARROW_NORMS, end=TIED_END | {"nextn.post_projection.weight": "tw"},
                 start={"nextn.pre_projection.weight": "wT", "rope_freqs": "r"},
                 sizes={"t": target, "T": 2 * target, "r": wide // 2, "1": 1, "Q": 4 * narrow, "O": 4 * narrow,
                        "D": narrow},
                 keys=RMS | {
                     "embedding_length_out": target, "nextn_predict_layers": layers,
                     "attention.sliding_window": window, "attention.sliding_window_pattern": sliding,
                     "attention.key_length_swa": narrow, "attention.value_length_swa": narrow,
                     "rope.dimension_count_swa": narrow, "rope.freq_base_swa": 1e4})
