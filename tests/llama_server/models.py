"""Small random-weight models in the places where llama.cpp's server tests look for those of the hub.

`fill` writes a cache as llama.cpp keeps one (models--OWNER--NAME/refs, snapshots), so that the suite's
own `--hf-repo ... --offline` finds them, and the two files that the suite downloads by itself. The
tokenizer has 512 pieces, as the one of the hub's stories models, learnt from a text: prompts get about
as many tokens as the suite expects, and templates and grammars work as with any real tokenizer.
"""

import collections
import itertools
import zlib

import gguf
import numpy as np

COMMIT = "0" * 40
PIECES = 512
CONTROL, NORMAL, UNKNOWN, BYTE = 3, 1, 2, 6
FIM = {"pre": "<PRE>", "suf": "<SUF>", "mid": "<MID>", "rep": "<REP>", "sep": "<SEP>"}


def learn_pieces(text, count):
    """Byte pair encoding on words: single characters, then the most frequent pair, one by one."""
    alphabet = ["\u2581"] + [chr(c) for c in range(33, 127)]
    kept = set(alphabet)
    words = collections.Counter()
    for word in text.split():
        if kept.issuperset(word):
            words["\u2581" + word] += 1
    split = {word: list(word) for word in words}
    pieces = list(alphabet)
    while len(pieces) < count:
        pairs = collections.Counter()
        for word, parts in split.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += words[word]
        left, right = min(pairs, key=lambda p: (-pairs[p], p))
        pieces.append(left + right)
        for parts in split.values():
            i = 0
            while i + 1 < len(parts):
                if (parts[i], parts[i + 1]) == (left, right):
                    parts[i:i + 2] = [left + right]
                i += 1
    return pieces


class Tokenizer:
    def __init__(self, text, extra=()):
        special = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
        special += [(name, CONTROL) for name in extra]
        special += [(f"<0x{b:02X}>", BYTE) for b in range(256)]
        pieces = learn_pieces(text, PIECES - len(special))
        self.tokens = [name for name, _ in special] + pieces
        self.types = [kind for _, kind in special] + [NORMAL] * len(pieces)
        self.scores = [0.0] * len(special) + [-float(i) for i in range(len(pieces))]

    def write(self, g):
        g.add_tokenizer_model("llama")
        g.add_token_list(self.tokens)
        g.add_token_types(self.types)
        g.add_token_scores(self.scores)
        g.add_unk_token_id(0)
        g.add_bos_token_id(1)
        g.add_eos_token_id(2)
        g.add_add_bos_token(True)
        for kind, name in FIM.items():
            if name in self.tokens:
                g.add_uint32(f"tokenizer.ggml.fim_{kind}_token_id", self.tokens.index(name))


class Writer:
    """A GGUF file whose tensors are random, the same on every run."""

    def __init__(self, path, arch):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.gguf = gguf.GGUFWriter(str(path), arch)
        self.random = np.random.default_rng(zlib.crc32(path.name.encode()))

    def add(self, name, *shape, gain=1.0, data_type=np.float32):
        data = self.random.standard_normal(shape) * gain / shape[-1]**0.5
        self.gguf.add_tensor(name, data.astype(data_type))

    def constant(self, name, n, value):
        self.gguf.add_tensor(name, np.full(n, value, np.float32))

    def output(self, tokenizer, width, gain=2.2):
        """Logits that never choose a byte or a control token: answers are text and have full length."""
        data = self.random.standard_normal((len(tokenizer.tokens), width)) * gain / width**0.5
        data[np.array(tokenizer.types) != NORMAL] = 0
        self.gguf.add_tensor("output.weight", data.astype(np.float32))

    def close(self):
        self.gguf.write_header_to_file()
        self.gguf.write_kv_data_to_file()
        self.gguf.write_tensors_to_file()
        self.gguf.close()


def attention(w, i, width, heads, kv_heads, head_dim):
    w.add(f"blk.{i}.attn_q.weight", heads * head_dim, width, gain=1.5)
    w.add(f"blk.{i}.attn_k.weight", kv_heads * head_dim, width, gain=1.5)
    w.add(f"blk.{i}.attn_v.weight", kv_heads * head_dim, width, gain=1.5)
    w.add(f"blk.{i}.attn_output.weight", width, heads * head_dim, gain=2.0)


def sizes(w, layers, width, context, feed_forward, heads, kv_heads, head_dim):
    g = w.gguf
    g.add_block_count(layers)
    g.add_context_length(context)
    g.add_embedding_length(width)
    g.add_feed_forward_length(feed_forward)
    g.add_head_count(heads)
    g.add_head_count_kv(kv_heads)
    g.add_key_length(head_dim)
    g.add_value_length(head_dim)


def decoder(path, tokenizer, arch="llama", layers=3, experts=0, width=128, heads=4, kv_heads=2, head_dim=64):
    feed_forward = 128
    w = Writer(path, arch)
    sizes(w, layers, width, 2048, feed_forward, heads, kv_heads, head_dim)
    w.gguf.add_layer_norm_rms_eps(1e-5)
    w.gguf.add_rope_dimension_count(head_dim)
    if arch == "gemma3":
        w.gguf.add_sliding_window(512)
    if experts:
        w.gguf.add_expert_count(experts)
        w.gguf.add_expert_used_count(2)
    tokenizer.write(w.gguf)
    # Gemma multiplies embeddings by sqrt(width) itself.
    w.add("token_embd.weight", len(tokenizer.tokens), width, gain=1.0 if arch == "gemma3" else width**0.5)
    for i in range(layers):
        w.constant(f"blk.{i}.attn_norm.weight", width, 1)
        attention(w, i, width, heads, kv_heads, head_dim)
        w.constant(f"blk.{i}.ffn_norm.weight", width, 1)
        if arch == "gemma3":
            for name, n in (("post_attention_norm", width), ("post_ffw_norm", width),
                            ("attn_q_norm", head_dim), ("attn_k_norm", head_dim)):
                w.constant(f"blk.{i}.{name}.weight", n, 1)
        lead, suffix = ((experts,), "_exps") if experts else ((), "")
        if experts:
            w.add(f"blk.{i}.ffn_gate_inp.weight", experts, width)
        w.add(f"blk.{i}.ffn_gate{suffix}.weight", *lead, feed_forward, width)
        w.add(f"blk.{i}.ffn_up{suffix}.weight", *lead, feed_forward, width)
        w.add(f"blk.{i}.ffn_down{suffix}.weight", *lead, width, feed_forward)
    w.constant("output_norm.weight", width, 1)
    w.output(tokenizer, width)
    w.close()


def adapter(path, layers=3, width=128, rank=4):
    """A LoRA on every layer's attention output, for `decoder`'s models."""
    w = Writer(path, "llama")
    w.gguf.add_type("adapter")
    w.gguf.add_string("adapter.type", "lora")
    w.gguf.add_float32("adapter.lora.alpha", float(rank))
    for i in range(layers):
        w.add(f"blk.{i}.attn_output.weight.lora_a", rank, 256)
        w.add(f"blk.{i}.attn_output.weight.lora_b", width, rank, gain=2.0)
    w.close()


def encoder(path, vocabulary, rerank=False, layers=2, width=128, heads=4):
    """BERT, with the vocabulary of a GGUF that has nothing else."""
    feed_forward = 128
    w = Writer(path, "bert")
    sizes(w, layers, width, 512, feed_forward, heads, heads, width // heads)
    w.gguf.add_layer_norm_eps(1e-12)
    w.gguf.add_causal_attention(False)
    w.gguf.add_pooling_type(gguf.PoolingType.RANK if rerank else gguf.PoolingType.CLS)
    tokens = 0
    for key, field in gguf.GGUFReader(vocabulary).fields.items():
        if not key.startswith("tokenizer."):
            continue
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        w.gguf.add_key_value(key, field.contents(), field.types[0], sub_type)
        if key == "tokenizer.ggml.tokens":
            tokens = len(field.data)
    w.add("token_embd.weight", tokens, width, data_type=np.float16, gain=4.0)
    w.add("token_types.weight", 2, width)
    w.add("position_embd.weight", 512, width)

    def norm(name):
        w.constant(f"{name}.weight", width, 1)
        w.constant(f"{name}.bias", width, 0)

    norm("token_embd_norm")
    for i in range(layers):
        attention(w, i, width, heads, heads, width // heads)
        norm(f"blk.{i}.attn_output_norm")
        w.add(f"blk.{i}.ffn_up.weight", feed_forward, width)
        w.add(f"blk.{i}.ffn_down.weight", width, feed_forward)
        norm(f"blk.{i}.layer_output_norm")
    if rerank:
        w.add("cls.weight", width, width)
        w.add("cls.output.weight", 1, width)
        w.constant("cls.output.bias", 1, 0)
    w.close()


def fill(hub, downloads, text, source):
    """Writes every model that the suite asks for; `source` is the tree of llama.cpp."""

    def place(repository, name):
        folder = hub / ("models--" + repository.replace("/", "--"))
        (folder / "refs").mkdir(parents=True, exist_ok=True)
        (folder / "refs" / "main").write_text(COMMIT)
        return folder / "snapshots" / COMMIT / name

    plain, infill = Tokenizer(text), Tokenizer(text, FIM.values())
    vocabulary = source / "models" / "ggml-vocab-bert-bge.gguf"
    decoder(place("ggml-org/test-model-stories260K", "stories260K-F32.gguf"), plain)
    decoder(place("ggml-org/test-model-stories260K-infill", "stories260K-infill-F32.gguf"), infill)
    decoder(place("ggml-org/models", "tinyllamas/split/stories15M-q8_0-00001-of-00003.gguf"), plain)
    decoder(place("ggml-org/stories15M_MOE", "stories15M_MOE-F16.gguf"), plain, experts=4)
    decoder(place("ggml-org/tinygemma3-GGUF", "tinygemma3-Q8_0.gguf"), plain, arch="gemma3", layers=6)
    encoder(place("ggml-org/models", "bert-bge-small/ggml-model-f16.gguf"), vocabulary)
    encoder(place("ggml-org/models", "jina-reranker-v1-tiny-en/ggml-model-f16.gguf"), vocabulary, rerank=True)
    decoder(downloads / "stories15M-q4_0.gguf", plain, layers=1)
    adapter(downloads / "moe_shakespeare15M.gguf")
