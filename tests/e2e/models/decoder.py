"""Dense decoders, one kind of attention, norm and position each, and encoders."""

from models.base import ATTENTION, END, FUSED, GATED, LAYER_NORM, NORMS, PLAIN, QK_NORMS, RMS, TIED_END, biased, write

BIASED_END = biased({"output_norm": "w"}) | {"output": "nw"}


def llama(path, head_dim=64, heads=4, kv_heads=2, layers=2, width=128, keys=None):
    return write(path, "llama", NORMS | ATTENTION | GATED,
                 keys=RMS | {"rope.dimension_count": head_dim} | (keys or {}), heads=heads,
                 kv_heads=kv_heads, head_dim=head_dim, layers=layers, width=width)


def mistral(path):
    """Mistral 7B 0.1 as it is converted: llama.cpp ignores the window and attends to everything."""
    return llama(path, keys={"attention.sliding_window": 160})


def mistral3(path):
    """YaRN, and queries scaled by their position."""
    return write(path, "mistral3", NORMS | ATTENTION | GATED, width=128, keys=RMS | {
        "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 256, "rope.scaling.yarn_log_multiplier": 1.0,
        "attention.temperature_scale": 0.1})


def qwen2(path):
    return write(path, "qwen2", biased(NORMS | ATTENTION | GATED, "attn_q", "attn_k", "attn_v"),
                 keys=RMS)


def qwen2vl(path):
    """Several positions per token (M-RoPE); a text has all of them equal."""
    return write(path, "qwen2vl", biased(NORMS | ATTENTION | GATED, "attn_q", "attn_k", "attn_v"),
                 keys=RMS | {"rope.dimension_sections": [8, 12, 12, 0]})


def qwen3(path):
    """Queries and keys are normed per head before RoPE."""
    return write(path, "qwen3", NORMS | ATTENTION | QK_NORMS | GATED, keys=RMS, width=128)


def qwen3vl(path):
    """M-RoPE whose sections interleave; images would be added to the first layers, too."""
    return write(path, "qwen3vl", NORMS | ATTENTION | QK_NORMS | GATED, width=128, head_dim=128, layers=4,
                 keys=RMS | {"rope.dimension_sections": [24, 20, 20, 0], "n_deepstack_layers": 3})


def smollm3(path):
    """Every fourth layer has no positions."""
    return write(path, "smollm3", NORMS | ATTENTION | GATED, end=TIED_END, layers=4, kv_heads=1, head_dim=128,
                 width=128, embedding=0.1, keys=RMS | {"rope.dimension_count": 128, "rope.freq_base": 5e6})


def exaone4(path, layers=2, head_dim=64, keys=None):
    """Norms behind attention and feed-forward only, and frequency factors. With 64 layers llama.cpp
    takes it for the 32B: three layers of four slide, and the fourth has no positions."""
    block = ATTENTION | QK_NORMS | GATED | {"post_attention_norm": "w", "post_ffw_norm": "w"}
    return write(path, "exaone4", block, layers=layers, head_dim=head_dim, start={"rope_freqs": "r"},
                 sizes={"r": head_dim // 2}, keys=RMS | {"rope.dimension_count": head_dim} | (keys or {}))


def ernie4_5(path):
    """Eight heads share a kv head."""
    return write(path, "ernie4_5", NORMS | ATTENTION | GATED, end=TIED_END, heads=8, kv_heads=1, head_dim=128,
                 width=128, embedding=0.1, keys=RMS | {"rope.dimension_count": 128, "rope.freq_base": 5e5})


def seed_oss(path):
    """Biases of q, k and v, heads wider than the model, and attention's norm named after it."""
    block = biased(ATTENTION, "attn_q", "attn_k", "attn_v") | GATED | {
        "attn_norm": "w", "post_attention_norm": "w"}
    return write(path, "seed_oss", block, width=128, heads=8, kv_heads=1, head_dim=128,
                 keys=RMS | {"rope.dimension_count": 128, "rope.freq_base": 1e7})


def phi3(path):
    """One matrix for q, k and v, and frequency factors."""
    return write(path, "phi3", NORMS | FUSED | {"ffn_up": "uw", "ffn_down": "wf"}, keys=RMS,
                 start={"rope_factors_long": "r", "rope_factors_short": "r"},
                 sizes={"u": 128, "r": 32})


def falcon(path):
    """Attention beside the feed-forward, and one kv head."""
    return write(path, "falcon", biased({"attn_norm": "w"}) | FUSED | PLAIN, keys=LAYER_NORM,
                 kv_heads=1, end=BIASED_END)


def mpt(path):
    """ALiBi without any position in the embedding, q, k and v clamped."""
    return write(path, "mpt", NORMS | FUSED | PLAIN, kv_heads=4, end=END, keys=LAYER_NORM | {
        "attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 4.0})


def bloom(path, head_dim=64, heads=6, layers=2):
    """ALiBi, with a number of heads that is no power of two: two kinds of slopes."""
    return write(path, "bloom", biased(NORMS | FUSED | PLAIN), keys=LAYER_NORM, layers=layers,
                 heads=heads, kv_heads=heads, head_dim=head_dim,
                 start=biased({"token_embd_norm": "w"}), end=BIASED_END)


def stablelm(path):
    """A quarter of each head is rotated."""
    return write(path, "stablelm", biased(NORMS) | ATTENTION | GATED, end=BIASED_END,
                 keys=LAYER_NORM | {"rope.dimension_count": 16})


def gpt2(path):
    """Learned positions: nothing is rotated."""
    return write(path, "gpt2", biased(NORMS | FUSED | PLAIN), keys=LAYER_NORM, kv_heads=4,
                 start={"position_embd": "cw"}, end=BIASED_END)


def gptneox(path):
    return write(path, "gptneox", biased(NORMS | FUSED | PLAIN), kv_heads=4, end=BIASED_END,
                 keys=LAYER_NORM | {"use_parallel_residual": True, "rope.dimension_count": 16})


def command_r(path):
    """Attention beside the feed-forward, one norm for both."""
    return write(path, "command-r", {"attn_norm": "w"} | ATTENTION | GATED, end=TIED_END,
                 embedding=0.1, keys=LAYER_NORM | {"logit_scale": 0.5})


def cohere2(path, window=160):
    """Three layers of four slide over a window and rotate; the fourth does neither."""
    return write(path, "cohere2", {"attn_norm": "w"} | ATTENTION | GATED, end=TIED_END, layers=4,
                 embedding=0.1,
                 keys=LAYER_NORM | {"logit_scale": 0.5, "attention.sliding_window": window})


def eurobert(path):
    """An encoder alone: it attends to all of its text at once and keeps nothing."""
    return write(path, "eurobert", NORMS | ATTENTION | GATED, end=TIED_END, kv_heads=4,
                 keys=RMS | {"attention.causal": False})


def t5(path):
    """An encoder, a decoder that reads it, and positions as a bias of the scores."""
    side = {"attn_norm": "w", "attn_q": "qw", "attn_k": "kw", "attn_v": "vw", "attn_o": "wo"}
    bias = {"attn_rel_b": "bh"}
    cross = {f"cross_{name}": letters for name, letters in side.items()}
    feed_forward = {"ffn_norm": "w"} | PLAIN
    layers = {}
    for i in range(2):
        first = bias if i == 0 else {}
        for prefix, tensors in (("enc", side | first), ("dec", side | first | cross)):
            layers |= {f"{prefix}.blk.{i}.{name}.weight": letters
                       for name, letters in (tensors | feed_forward).items()}
    return write(path, "t5", {}, keys=RMS | {
        "attention.relative_buckets_count": 32, "decoder_start_token_id": 0,
        "decoder_block_count": 2}, kv_heads=4, sizes={"b": 32}, start=layers, end={
            "enc.output_norm.weight": "w", "dec.output_norm.weight": "w", "output": "nw"})
