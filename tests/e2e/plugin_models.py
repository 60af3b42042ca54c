"""Tiny models with random weights, one per attention variant, written with the gguf package.

Bytes are tokens, so that any text works. The weights are large enough for attention to decide the
logits: a wrong mask, slope or head shows at once.
"""

import zlib

import gguf
import numpy as np

WIDTH_FF = 64


def byte_tokens():
    """GPT-2's printable stand-ins for the 256 bytes, and one merge that the format asks for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {b: chr(b) for b in plain}
    spare = iter(range(256, 512))
    for b in range(256):
        names.setdefault(b, chr(next(spare)))
    return [names[b] for b in range(256)] + ["qz", "<s>"]


class Writer:
    def __init__(self, path, arch, layers, width, heads, kv_heads, head_dim, embedding=1.0):
        self.gguf = gguf.GGUFWriter(str(path), arch)
        self.random = np.random.default_rng(zlib.crc32(str(path.name).encode()))
        g = self.gguf
        g.add_block_count(layers)
        g.add_context_length(4096)
        g.add_embedding_length(width)
        g.add_feed_forward_length(WIDTH_FF)
        g.add_head_count(heads)
        g.add_head_count_kv(kv_heads)
        g.add_key_length(head_dim)
        g.add_value_length(head_dim)
        g.add_tokenizer_model("gpt2")
        g.add_tokenizer_pre("default")
        tokens = byte_tokens()
        g.add_token_list(tokens)
        g.add_token_types([1] * (len(tokens) - 1) + [3])
        g.add_token_merges(["q z"])
        g.add_bos_token_id(len(tokens) - 1)
        g.add_eos_token_id(len(tokens) - 1)
        g.add_add_bos_token(False)
        self.vocabulary = len(tokens)
        self.matrix("token_embd.weight", len(tokens), width, gain=embedding * width**0.5)

    def matrix(self, name, rows, columns, gain=1.0):
        data = self.random.standard_normal((rows, columns)) * gain / columns**0.5
        self.gguf.add_tensor(name, data.astype(np.float32))

    def vector(self, name, n, mean):
        noise = 0.1 * self.random.standard_normal(n)
        self.gguf.add_tensor(name, (mean + noise).astype(np.float32))

    def ones(self, name, n):
        self.vector(name, n, 1)

    def zeros(self, name, n):
        self.vector(name, n, 0)

    def attention(self, i, width, heads, kv_heads, head_dim):
        self.matrix(f"blk.{i}.attn_q.weight", heads * head_dim, width, 1.5)
        self.matrix(f"blk.{i}.attn_k.weight", kv_heads * head_dim, width, 1.5)
        self.matrix(f"blk.{i}.attn_v.weight", kv_heads * head_dim, width, 1.5)
        self.matrix(f"blk.{i}.attn_output.weight", width, heads * head_dim, 2.0)

    def gated_ff(self, i, width):
        self.matrix(f"blk.{i}.ffn_gate.weight", WIDTH_FF, width)
        self.matrix(f"blk.{i}.ffn_up.weight", WIDTH_FF, width)
        self.matrix(f"blk.{i}.ffn_down.weight", width, WIDTH_FF)

    def close(self):
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()


def llama(path, head_dim=64, heads=4, kv_heads=2, layers=2, width=128):
    w = Writer(path, "llama", layers, width, heads, kv_heads, head_dim)
    w.gguf.add_layer_norm_rms_eps(1e-5)
    w.gguf.add_rope_dimension_count(head_dim)
    for i in range(layers):
        w.ones(f"blk.{i}.attn_norm.weight", width)
        w.attention(i, width, heads, kv_heads, head_dim)
        w.ones(f"blk.{i}.ffn_norm.weight", width)
        w.gated_ff(i, width)
    w.ones("output_norm.weight", width)
    w.matrix("output.weight", w.vocabulary, width, 3.0)
    w.close()
    return path


def gemma2(path, head_dim=96, heads=4, kv_heads=2, layers=4, width=128, window=160):
    """Every second layer slides over a window (a cache of its own), and scores are soft-capped."""
    w = Writer(path, "gemma2", layers, width, heads, kv_heads, head_dim, 0.2)
    w.gguf.add_layer_norm_rms_eps(1e-5)
    w.gguf.add_sliding_window(window)
    w.gguf.add_attn_logit_softcapping(5.0)
    w.gguf.add_final_logit_softcapping(30.0)
    for i in range(layers):
        w.ones(f"blk.{i}.attn_norm.weight", width)
        w.attention(i, width, heads, kv_heads, head_dim)
        w.ones(f"blk.{i}.post_attention_norm.weight", width)
        w.ones(f"blk.{i}.ffn_norm.weight", width)
        w.gated_ff(i, width)
        w.ones(f"blk.{i}.post_ffw_norm.weight", width)
    w.ones("output_norm.weight", width)
    w.close()
    return path


def bloom(path, head_dim=64, heads=6, layers=2):
    """ALiBi, with a number of heads that is no power of two: two kinds of slopes."""
    width = heads * head_dim
    w = Writer(path, "bloom", layers, width, heads, heads, head_dim)
    w.gguf.add_layer_norm_eps(1e-5)
    w.ones("token_embd_norm.weight", width)
    w.zeros("token_embd_norm.bias", width)
    for i in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            w.ones(f"blk.{i}.{norm}.weight", width)
            w.zeros(f"blk.{i}.{norm}.bias", width)
        w.matrix(f"blk.{i}.attn_qkv.weight", 3 * width, width, 1.5)
        w.zeros(f"blk.{i}.attn_qkv.bias", 3 * width)
        w.matrix(f"blk.{i}.attn_output.weight", width, width, 2.0)
        w.zeros(f"blk.{i}.attn_output.bias", width)
        w.matrix(f"blk.{i}.ffn_up.weight", WIDTH_FF, width)
        w.zeros(f"blk.{i}.ffn_up.bias", WIDTH_FF)
        w.matrix(f"blk.{i}.ffn_down.weight", width, WIDTH_FF)
        w.zeros(f"blk.{i}.ffn_down.bias", width)
    w.ones("output_norm.weight", width)
    w.zeros("output_norm.bias", width)
    w.matrix("output.weight", w.vocabulary, width, 3.0)
    w.close()
    return path


def lfm2(path, head_dim=64, heads=4, kv_heads=2, layers=3):
    """A hybrid: short convolutions, whose state also lands in our buffer, around one attention."""
    width = heads * head_dim
    per_layer = [kv_heads if i == 1 else 0 for i in range(layers)]
    w = Writer(path, "lfm2", layers, width, heads, per_layer, head_dim)
    w.gguf.add_layer_norm_rms_eps(1e-5)
    w.gguf.add_uint32("lfm2.shortconv.l_cache", 3)
    for i in range(layers):
        w.ones(f"blk.{i}.attn_norm.weight", width)
        if per_layer[i]:
            w.attention(i, width, heads, kv_heads, head_dim)
            w.ones(f"blk.{i}.attn_q_norm.weight", head_dim)
            w.ones(f"blk.{i}.attn_k_norm.weight", head_dim)
        else:
            w.matrix(f"blk.{i}.shortconv.conv.weight", width, 3)
            w.matrix(f"blk.{i}.shortconv.in_proj.weight", 3 * width, width)
            w.matrix(f"blk.{i}.shortconv.out_proj.weight", width, width)
        w.ones(f"blk.{i}.ffn_norm.weight", width)
        w.gated_ff(i, width)
    w.ones("token_embd_norm.weight", width)
    w.matrix("output.weight", w.vocabulary, width, 3.0)
    w.close()
    return path
