"""How the tiny models are written: a table of keys and a table of tensors per architecture.

Bytes are tokens, so that any text works. The weights are large enough for attention to decide the
logits: a wrong mask, slope or head shows at once.

A tensor's shape is a word of letters, as numpy has it (rows first):
  w width   f feed-forward   h heads   g kv heads   d head_dim   n vocabulary   e experts   c context
  q heads x head_dim   k kv heads x head_dim   v kv heads x value_dim   o heads x value_dim
  t q + k + v
and what else a model gives in `sizes`. A name means its ".weight", unless it has a dot or a "=".
"""

import zlib

import gguf
import numpy as np

CONTEXT = 4096
# Attention's shares of the residual stream; other matrices keep their input's size.
GAINS = {"attn_q": 1.5, "attn_k": 1.5, "attn_v": 1.5, "attn_qkv": 1.5, "attn_output": 2.0,
         "output": 3.0}

ATTENTION = {"attn_q": "qw", "attn_k": "kw", "attn_v": "vw", "attn_output": "wo"}
FUSED = {"attn_qkv": "tw", "attn_output": "wo"}
QK_NORMS = {"attn_q_norm": "d", "attn_k_norm": "d"}
GATED = {"ffn_gate": "fw", "ffn_up": "fw", "ffn_down": "wf"}
PLAIN = {"ffn_up": "fw", "ffn_down": "wf"}
NORMS = {"attn_norm": "w", "ffn_norm": "w"}
GEMMA_NORMS = {**NORMS, "post_attention_norm": "w", "post_ffw_norm": "w"}
# All experts are used: a choice between two near equals would turn rounding into other logits.
EXPERTS = {"ffn_gate_inp": "ew", "ffn_gate_exps": "efw", "ffn_up_exps": "efw",
           "ffn_down_exps": "ewf"}
SHARED_EXPERT = {"ffn_gate_shexp": "fw", "ffn_up_shexp": "fw", "ffn_down_shexp": "wf"}
EXPERT_KEYS = {"expert_count": 2, "expert_used_count": 2, "expert_feed_forward_length": 64}
RMS = {"attention.layer_norm_rms_epsilon": 1e-5}
LAYER_NORM = {"attention.layer_norm_epsilon": 1e-5}
END = {"output_norm": "w", "output": "nw"}
TIED_END = {"output_norm": "w"}


def biased(tensors, *names):
    """With a bias for each of the names, or for all."""
    return tensors | {f"{n}.bias": tensors[n][:-1] or tensors[n] for n in names or tensors}


def byte_tokens():
    """GPT-2's printable stand-ins for the 256 bytes, and one merge that the format asks for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {b: chr(b) for b in plain}
    spare = iter(range(256, 512))
    for b in range(256):
        names.setdefault(b, chr(next(spare)))
    return [names[b] for b in range(256)] + ["qz", "<s>"]


def add_tokenizer(g):
    tokens = byte_tokens()
    g.add_tokenizer_model("gpt2")
    g.add_tokenizer_pre("default")
    g.add_token_list(tokens)
    g.add_token_types([1] * (len(tokens) - 1) + [3])
    g.add_token_merges(["q z"])
    g.add_bos_token_id(len(tokens) - 1)
    g.add_eos_token_id(len(tokens) - 1)
    g.add_add_bos_token(False)
    return len(tokens)


def add_key(g, name, value):
    add = {bool: g.add_bool, int: g.add_uint32, float: g.add_float32, str: g.add_string,
           list: g.add_array}
    add[type(value)](name, value)


def values(random, name, shape, embedding, means):
    """Random numbers of the size that suits the tensor's name."""
    stem, _, kind = name.removeprefix("enc.").removeprefix("dec.").partition(".")
    if stem == "blk":
        stem, _, kind = kind.partition(".")[2].partition(".")
    if stem == "ssm_a":  # decay rates
        return -np.exp(random.standard_normal(shape))
    if kind == "bias" or len(shape) == 1 or stem in ("ssm_d", "ssm_norm"):
        return means.get(stem, float(kind != "bias")) + 0.1 * random.standard_normal(shape)
    gain = embedding * shape[-1] ** 0.5 if stem == "token_embd" else GAINS.get(stem, 1.0)
    return random.standard_normal(shape) * gain / shape[-1] ** 0.5


def write(path, arch, block, *, keys, start=None, end=END, layers=2, width=None, heads=4, kv_heads=2,
          head_dim=64, value_dim=None, embedding=1.0, sizes=None, means=None):
    """Writes the model and returns its path. `block` has the tensors of a layer, or makes them from
    its number; `kv_heads` may be a list, one number per layer; `means` are of vectors, by name."""
    value_dim = value_dim or head_dim
    some_kv_heads = max(kv_heads) if isinstance(kv_heads, list) else kv_heads
    size = {"w": width or heads * head_dim, "f": 64, "h": heads, "g": some_kv_heads, "d": head_dim,
            "e": 2, "c": CONTEXT, "q": heads * head_dim, "k": some_kv_heads * head_dim,
            "v": some_kv_heads * value_dim, "o": heads * value_dim}
    size["t"] = size["q"] + size["k"] + size["v"]
    size |= sizes or {}

    g = gguf.GGUFWriter(str(path), arch)
    size["n"] = add_tokenizer(g)
    common = {"block_count": layers, "context_length": CONTEXT, "embedding_length": size["w"],
              "feed_forward_length": size["f"], "attention.head_count": heads,
              "attention.head_count_kv": kv_heads, "attention.key_length": head_dim,
              "attention.value_length": value_dim}
    for name, value in (common | keys).items():
        add_key(g, f"{arch}.{name}", value)

    random = np.random.default_rng(zlib.crc32(path.name.encode()))

    def add(prefix, tensors):
        for name, letters in tensors.items():
            whole = name.startswith("=") or "." in name
            full = prefix + name.lstrip("=") + ("" if whole else ".weight")
            shape = tuple(size[letter] for letter in letters)
            g.add_tensor(full, values(random, full, shape, embedding, means or {}).astype(np.float32))

    add("", {"token_embd": "nw"} | (start or {}))
    for i in range(layers):
        add(f"blk.{i}.", block(i) if callable(block) else block)
    add("", end)
    g.write_header_to_file()
    g.write_kv_data_to_file()
    g.write_tensors_to_file()
    g.close()
    return path
