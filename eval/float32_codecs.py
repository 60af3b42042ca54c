#!/usr/bin/env python3
"""The codecs again, in float32 PyTorch: are the plug-in's figures right, and what do blocks change?

A Llama of a few lines on the same tokens and the same dequantized weights, with scores from exact and
from quantized keys, and for each pair of query i and key j a rule that says which is read.

  token by token   exact iff i - j < 128, or j < 5 (the sinks); groups start after the sinks. This is the
                   rule of the reference figures in quality_reference.py
  in blocks        as lowkv's plug-in does it with chunks of 32: a block is read quantized once all of it
                   had left the window before the chunk; the first block, with its sinks, never is

The second column must agree with `lowkv compare` on the same windows; against the first it says what
keeping tokens in blocks is worth. No code is shared with lowkv, only the signs of its rotation. Run it with
the python of the `torch` part of deps/setup.py, as eval/float32_reference.py; results go to OUT/float32.csv.
docs/quality/reference.md has --windows 1 --tokens 1024, and `eval/quality.py` with the same beside it.
"""

import argparse
import csv
import math
from functools import partial
from pathlib import Path

import gguf
import torch
from gguf.quants import dequantize
from paths import ROOT, set_up_paths
from transformers import AutoTokenizer

WINDOW, SINKS, CHUNK, SKIP = 128, 5, 32, 256


def half(x):
    return x.half().float()  # metadata is stored as f16


def uniform(x, bits, dim):
    """Scale and zero of `x` along `dim`, asymmetric."""
    low = x.amin(dim, keepdim=True)
    scale = half((x.amax(dim, keepdim=True) - low) / (2**bits - 1)).clamp(min=1e-8)
    low = half(low)
    return ((x - low) / scale).round().clamp(0, 2**bits - 1) * scale + low


def by_token(x, bits, group=32):
    return uniform(x.unflatten(-1, (-1, group)), bits, -1).flatten(-2)


def tiles(x, start, length):
    """Tokens from `start` on in tiles, [heads, tiles, length, channels], padded with the last token."""
    body = x[:, start:]
    pad = -body.shape[1] % length
    return torch.cat([body, body[:, -1:].expand(-1, pad, -1)], 1).unflatten(1, (-1, length))


def by_channel(x, bits, start, group=32):
    body = uniform(tiles(x, start, group), bits, 2).flatten(1, 2)
    return torch.cat([x[:, :start], body[:, :x.shape[1] - start]], 1)


def lloyd_max(bits):
    """The best levels for N(0, 1)."""
    def density(x):
        return torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    def below(x):
        return (1 + torch.erf(x / math.sqrt(2))) / 2

    levels = torch.linspace(-2, 2, 2**bits, dtype=torch.float64)
    ends = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(2000):
        cuts = torch.cat([-ends, (levels[1:] + levels[:-1]) / 2, ends])
        levels = (density(cuts[:-1]) - density(cuts[1:])) / (below(cuts[1:]) - below(cuts[:-1]))
    return levels.float()


LEVELS = {bits: lloyd_max(bits) for bits in (2, 3, 4)}


def splitmix64(seed, draws):
    mask = 2**64 - 1
    for number in range(1, draws + 1):
        x = (seed + number * 0x9E3779B97F4A7C15) & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        yield x ^ x >> 31


def hadamard(channels):
    """With the signs that lowkv draws (src/codec/rotation.h): others move single tokens by much."""
    matrix = torch.ones(1, 1)
    while len(matrix) < channels:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.tensor([-1.0 if x >> 63 else 1.0 for x in splitmix64(42, channels)])
    return signs[:, None] * matrix / math.sqrt(channels)


def rotated(x, bits, fit="norm"):
    """TurboQuant: per token and head a norm and Lloyd-Max codes, rotated."""
    turn = hadamard(x.shape[-1])
    y = x @ turn
    rms = y.square().mean(-1, keepdim=True).sqrt().clamp(min=1e-12)
    levels = LEVELS[bits]
    code = levels[torch.bucketize((y / rms).contiguous(), (levels[1:] + levels[:-1]) / 2)]
    if fit == "norm":
        scale = y.norm(dim=-1, keepdim=True) / code.norm(dim=-1, keepdim=True)
    else:  # unbiased
        scale = y.square().sum(-1, keepdim=True) / (y * code).sum(-1, keepdim=True)
    return half(scale) * code @ turn.T


def centred(x, bits, start):
    """The same for keys less their tile's mean."""
    tile = tiles(x, start, 128)
    mean = half(tile.mean(2, keepdim=True))
    body = (rotated(tile - mean, bits) + mean).flatten(1, 2)
    return torch.cat([x[:, :start], body[:, :x.shape[1] - start]], 1)


def in_halves(codec, x, *args):
    """A codec on keys with their channels in Hugging Face's order: RoPE's pairs are halves, not neighbours."""
    order = torch.arange(x.shape[-1]).unflatten(0, (-1, 2)).T.flatten()
    return codec(x[..., order], *args)[..., order.argsort()]


def kivi(bits):
    return lambda k, v, start: (by_channel(k, bits, start), by_token(v, bits))


def turboquant(bits):
    return lambda k, v, start: (rotated(k, bits), rotated(v, bits))


def lowkv(key_bits, value_bits, fit="norm"):
    return lambda k, v, start: (centred(k, key_bits, start), rotated(v, value_bits, fit))


H = "head-normal-hadamard"
IN_HALVES = "the same, keys' channels in Hugging Face's order"
# As in the CSV of quality.py: keys and values of one layer, tokens of a block, sinks.
SCHEMES = {
    "kivi2": (kivi(2), 32, SINKS),
    "kivi2+sinks=0": (kivi(2), 32, 0),
    "kivi4": (kivi(4), 32, SINKS),
    "k=token-2-g32+v=token-2-g32+window=128+sinks=0": (
        lambda k, v, start: (by_token(k, 2), by_token(v, 2)), 32, 0),
    IN_HALVES: (lambda k, v, start: (in_halves(by_token, k, 2), by_token(v, 2)), 32, 0),
    "turboquant2": (turboquant(2), 32, SINKS),
    "turboquant4": (turboquant(4), 32, SINKS),
    f"k=token-2-{H}-mean+v=token-2-{H}": (lowkv(2, 2), 128, SINKS),
    f"k=token-2-{H}-mean+v=token-2-{H}-unbiased": (lowkv(2, 2, "unbiased"), 128, SINKS),
    f"k=token-3-{H}-mean+v=token-2-{H}": (lowkv(3, 2), 128, SINKS),
    "lowkv4": (lowkv(4, 4, "unbiased"), 128, SINKS),
}
RULES = ["token", "blocks"]


def exact_pairs(rule, tokens, block, sinks):
    """[queries, keys]: which pairs read the key as it came."""
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    if rule == "token":
        return (i - j < WINDOW) | (j < sinks)
    packed = ((i // CHUNK * CHUNK - WINDOW).clamp(min=0) // block) * block
    return (j >= packed) | (j < (block if sinks else 0))


class Model:
    """A Llama from a GGUF file, in float32; keys and values go through the codec where one is set."""

    codec, pairs, start = None, None, 0

    def __init__(self, path):
        reader = gguf.GGUFReader(path)

        def field(name):
            return reader.fields[f"llama.{name}"].contents()

        self.layers, self.heads = field("block_count"), field("attention.head_count")
        self.kv_heads, self.epsilon = field("attention.head_count_kv"), field("attention.layer_norm_rms_epsilon")
        self.base = field("rope.freq_base")
        self.weights = {t.name.removesuffix(".weight"): torch.tensor(dequantize(t.data, t.tensor_type))
                        for t in reader.tensors}

    def norm(self, x, name):
        return x * (x.square().mean(-1, keepdim=True) + self.epsilon).rsqrt() * self.weights[name]

    def rotate(self, x):
        """RoPE on neighbouring channels, llama.cpp's order of a Llama file."""
        tokens, channels = x.shape[1:]
        angles = torch.arange(tokens)[:, None] * self.base ** (-torch.arange(0, channels, 2) / channels)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

    def attend(self, query, key, value):
        wide = partial(torch.repeat_interleave, repeats=self.heads // self.kv_heads, dim=0)
        scale = 1 / math.sqrt(key.shape[-1])
        scores = query @ wide(key).mT * scale
        if self.pairs is not None:
            coded_key, coded_value = self.codec(key, value, self.start)
            scores = torch.where(self.pairs, scores, query @ wide(coded_key).mT * scale)
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        weights = scores.masked_fill(~causal, -math.inf).softmax(-1)
        if self.pairs is None:
            return weights @ wide(value)
        return (weights * self.pairs) @ wide(value) + (weights * ~self.pairs) @ wide(coded_value)

    def predict(self, tokens):
        """Log-probabilities of what follows each position from SKIP on, but for the last."""
        w = self.weights
        x = w["token_embd"][tokens]
        for layer in range(self.layers):
            name = f"blk.{layer}."
            y = self.norm(x, name + "attn_norm")
            query, key, value = ((y @ w[f"{name}attn_{part}"].T).unflatten(-1, (heads, -1)).transpose(0, 1)
                                 for part, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)))
            attended = self.attend(self.rotate(query), self.rotate(key), value)
            x = x + attended.transpose(0, 1).flatten(1) @ w[name + "attn_output"].T
            y = self.norm(x, name + "ffn_norm")
            gate = torch.nn.functional.silu(y @ w[name + "ffn_gate"].T)
            x = x + (gate * (y @ w[name + "ffn_up"].T)) @ w[name + "ffn_down"].T
        last = self.norm(x[SKIP:-1], "output_norm")
        return (last @ w.get("output", w["token_embd"]).T).log_softmax(-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=ROOT / "docs/quality", type=Path)
    parser.add_argument("--schemes", help="some of them, with a slash between; default: all")
    parser.add_argument("--tokens", default=2048, type=int)
    parser.add_argument("--windows", default=2, type=int)
    parser.add_argument("--threads", default=2, type=int)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    paths = set_up_paths()
    model = Model(paths["LOWKV_MODEL"])
    text = Path(paths["LOWKV_HANDBOOK_TEXT"]).read_text()[:8 * args.tokens * args.windows]
    tokenizer = AutoTokenizer.from_pretrained(Path(paths["LOWKV_MODEL"]).parent,
                                              gguf_file=Path(paths["LOWKV_MODEL"]).name)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
    names = args.schemes.split("/") if args.schemes else list(SCHEMES)
    sums = {(scheme, rule): 0.0 for scheme in names for rule in RULES}
    for number in range(args.windows):
        window = ids[number * args.tokens:(number + 1) * args.tokens]
        model.pairs = None
        exact = model.predict(window)
        for scheme, rule in sums:
            model.codec, block, sinks = SCHEMES[scheme]
            model.pairs = exact_pairs(rule, args.tokens, block, sinks)
            model.start = sinks if rule == "token" else 0
            kld = (exact.exp() * (exact - model.predict(window))).sum(-1).mean().item()
            sums[scheme, rule] += kld / args.windows
            print(f"window {number}, {scheme}, {rule}: {kld:.5f}", flush=True)
    with open(args.out / "float32.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["scheme", "windows", "tokens", *RULES])
        for scheme in names:
            writer.writerow([scheme, args.windows, args.tokens, *(f"{sums[scheme, r]:.6f}" for r in RULES)])


if __name__ == "__main__":
    main()
