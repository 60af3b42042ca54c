#!/usr/bin/env python3
"""What packed rows of multi-head latent attention (MLA) would lose: the table of docs/quality/mla.md.

    make package
    $LOWKV_TRANSFORMERS_PYTHON eval/mla.py                  goes on where it was stopped
    ... eval/mla.py --bases random --ways lowkv3,one-v:lowkv3
    ... eval/mla.py --redraw                                the page's table again, nothing measured

There is no DeepSeek here, so SmolLM2 is written in MLA's form, which changes its predictions by roundings only. Of each
of its 3 kv heads, the 8 pairs of channels that RoPE turns fastest are stored after RoPE and apart: 48 channels in the
place of DeepSeek's 64. The other 144 channels of the keys, before RoPE, and the 192 of the values are scaled to one
standard deviation and turned by an orthogonal matrix into one latent vector of 336 channels, from which both are
computed again. Bases: a `random` matrix, so that all channels are alike; the latents' `principal` axes, so that they
differ as much as they can; `centred`, the random one after the mean of each channel was taken off, which stands for a
model whose latents have none.

A way is FORM:SCHEME, or FORM:SCHEME:RSCHEME with another scheme for the channels after RoPE (f16: unquantized).

    heads     keys and values of heads, as SmolLM2 has them ("heads:" may be left out)
    one-k     one copy of each row, by the scheme's key codec
    one-v     one copy, by its value codec
    two       the row as key and again as value

Windows of the handbook are read whole. Each query sees the first 128 tokens and the --newest unquantized; positions
from 256 on are counted. Bits are of a number of the row (of keys and values for `heads`); two copies count twice."""

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, quants
from paths import ROOT, set_up_paths
from quality_tables import fill

PAIRS = 8  # of a head, the fastest, that are stored after RoPE
SKIP = 256
QUERIES = 512  # tokens by whose queries key codecs weigh channels
THREADS = 2
OTHER = {"k": "v", "v": "k"}  # codecs of a scheme
COPIES = {"one-k": "kk", "one-v": "vv", "two": "kv"}  # whose codec the key's copy has, and the value's
STOCK = {"q8_0": 8.5, "q4_0": 4.5}
EVEN, MEAN = "k=sorted-3333-head-trellis-2rows-weighted", "k=token-3-head-trellis-hadamard-mean"
EVEN_4 = "k=sorted-4444-head-2rows-weighted"
WAYS = ["q8_0", "lowkv4", "q4_0", "lowkv3", "lowkv2.8", "lowkv2",
        "one-k:q8_0", "one-k:lowkv4", "one-k:q4_0", "one-k:lowkv3", f"one-k:{EVEN}", f"one-k:{EVEN}:lowkv4",
        f"one-k:{EVEN_4}", f"one-k:{MEAN}", "one-v:lowkv4", "one-v:lowkv3:f16", "one-v:lowkv3", "one-v:lowkv2",
        "two:lowkv2.8", "two:lowkv2", "two:lowkv1.5"]
KEY = ["newest", "window", "basis", "way"]
BASES = ["random", "principal", "centred"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=ROOT / "build/python/site", help="where lowkv is installed")
    parser.add_argument("--bases", default=",".join(BASES), help="default: %(default)s")
    parser.add_argument("--ways", default=",".join(WAYS), help="default: all (%(default)s)")
    parser.add_argument("--windows", default=1, type=int, help="default: %(default)s")
    parser.add_argument("--tokens", default=1024, type=int, help="of a window (default: %(default)s)")
    parser.add_argument("--newest", default=128, type=int, help="tokens (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/quality/mla.json", help="default: %(default)s")
    parser.add_argument("--redraw", action="store_true")
    args = parser.parse_args()
    args.bases, args.ways = args.bases.split(","), args.ways.split(",")
    if unknown := set(args.bases) - set(BASES):
        parser.error(f"--bases {','.join(sorted(unknown))}: they are {', '.join(BASES)}")
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"--ways {','.join(sorted(unknown))}: they are {', '.join(WAYS)}")
    return args


def split_way(way):
    """(form, scheme, scheme of the channels after RoPE)."""
    form, *schemes = way.split(":") if ":" in way else ("heads", way)
    return form, schemes[0], schemes[-1]


def stock(rows, name):
    """As llama.cpp's cache of this type has them: 32 numbers to a scale."""
    kind = GGMLQuantizationType[name.upper()]
    return quants.dequantize(quants.quantize(rows.reshape(-1, 32), kind), kind).reshape(rows.shape)


def plan_of(scheme, part, layer, heads, channels):
    """Of the part alone: the other one is not quantized."""
    from lowkv._core import Plan, RowType, parse_scheme

    return Plan(parse_scheme(f"{scheme},{OTHER[part]}=exact"), layer, heads, channels, RowType.float32)


def decoded(rows, scheme, part, layer, queries):
    """Rows [heads, tokens, channels] after packing by the scheme's key codec ("k"), which weighs channels by the
    queries [heads, queries, channels], or by its value codec ("v")."""
    if scheme == "f16":
        return rows
    if scheme in STOCK:
        return stock(rows, scheme)
    from lowkv._core import Batch, Retention, Store

    rows = np.ascontiguousarray(rows[None])
    batch = Batch(Store(), plan_of(scheme, part, layer, rows.shape[1], rows.shape[3]), Retention(0, 1, 0), 1)
    batch.append(rows, rows)
    batch.update_query_stats(np.ascontiguousarray(queries[None]))
    batch.pack(0, THREADS)
    found = {each: np.empty_like(rows) for each in "kv"}
    batch.read(0, found["k"], found["v"], THREADS)
    return found[part][0]


def part_bits(scheme, part, channels, heads=1):
    """Bits of a number."""
    if scheme == "f16" or scheme in STOCK:
        return STOCK.get(scheme, 16)
    plan = plan_of(scheme, part, 0, heads, channels)
    return plan.packed_bytes * 8 / (heads * channels * plan.block_tokens) - 16


def side_by_side(heads):
    """[heads, tokens, channels] as [tokens, all channels]."""
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)


def in_heads(rows, count):
    return rows.reshape(len(rows), count, -1).swapaxes(0, 1)


class Shape:
    """Of the model: which channels RoPE turns fast, and its angles."""

    def __init__(self, heads, kv_heads, channels, theta):
        self.heads, self.kv_heads, self.channels = heads, kv_heads, channels
        half = channels // 2
        self.fast = [at + pair for at in (0, half) for pair in range(PAIRS)]
        self.slow = [channel for channel in range(channels) if channel not in self.fast]
        self.speeds = np.tile(theta ** (-np.arange(half) / half), 2)
        self.apart = kv_heads * len(self.fast)
        self.slow_keys = kv_heads * len(self.slow)
        self.latent = self.slow_keys + kv_heads * channels

    def turned(self, rows, direction=1):
        """Rows [heads, tokens, channels] after RoPE; of direction -1, before it."""
        angles = np.arange(rows.shape[1])[:, None] * self.speeds * direction
        one, other = np.split(rows, 2, -1)
        return (rows * np.cos(angles) + np.concatenate((-other, one), -1) * np.sin(angles)).astype(np.float32)

    def whole_queries(self, queries, channels):
        """Queries [heads, tokens, channels], these channels of them, at their kv head's place in a row of all."""
        placed = np.zeros((*queries.shape[:2], self.kv_heads, len(channels)), np.float32)
        for head in range(self.heads):
            placed[head, :, head * self.kv_heads // self.heads] = queries[head][:, channels]
        return placed.reshape(*queries.shape[:2], -1)


class Basis:
    """What makes latents of a layer's rows: keys (slow channels, before RoPE) beside values. Scales, and an orthogonal
    matrix."""

    def __init__(self, kind, rows, key_channels, layer):
        deviations = rows.std(0)
        self.scales = np.concatenate([np.full(part.shape, np.sqrt(np.square(part).mean()), np.float32)
                                      for part in np.split(deviations, [key_channels])])
        self.key_channels = key_channels
        self.mean = rows.mean(0) if kind == "centred" else np.zeros_like(self.scales)
        if kind == "principal":
            matrix = np.linalg.eigh(np.cov((rows / self.scales).T))[1]
        else:
            matrix = np.linalg.qr(np.random.default_rng(layer).normal(size=(len(self.scales),) * 2))[0]
        self.matrix = matrix.astype(np.float32)

    def latents(self, rows):
        return ((rows - self.mean) / self.scales) @ self.matrix

    def rows(self, latents):
        return (latents @ self.matrix.T) * self.scales + self.mean

    def queries(self, queries):
        """What is multiplied with latents for [heads, tokens, key channels]."""
        return (queries * self.scales[: self.key_channels]) @ self.matrix[: self.key_channels]


def stored(keys, values, queries, way, shape, basis, layer):
    """Keys and values [kv heads, tokens, channels], before RoPE, after they were stored."""
    form, scheme, rope = split_way(way)
    queries = queries[:, :QUERIES]
    turned, asked = shape.turned(keys), shape.turned(queries)
    if form == "heads":
        return (shape.turned(decoded(turned, scheme, "k", layer, asked), -1),
                decoded(values, scheme, "v", layer, asked))
    as_key, as_value = COPIES[form]
    latents = basis.latents(np.concatenate((side_by_side(keys[..., shape.slow]), side_by_side(values)), 1))
    apart = side_by_side(turned[..., shape.fast])
    if scheme in STOCK:  # groups of 32 run on over the latent's end
        row = stock(np.concatenate((latents, apart), 1), scheme)
        copies, apart = dict.fromkeys("kv", row[:, : shape.latent]), row[:, shape.latent :]
    else:
        of_latents = basis.queries(shape.whole_queries(queries, shape.slow))
        copies = {part: decoded(latents[None], scheme, part, layer, of_latents)[0] for part in {as_key, as_value}}
        apart = decoded(apart[None], rope, as_key, layer, shape.whole_queries(asked, shape.fast))[0]
    turned = np.zeros_like(keys)
    turned[..., shape.fast] = in_heads(apart, shape.kv_heads)
    keys = shape.turned(turned, -1)
    keys[..., shape.slow] = in_heads(basis.rows(copies[as_key])[:, : shape.slow_keys], shape.kv_heads)
    return keys, in_heads(basis.rows(copies[as_value])[:, shape.slow_keys :], shape.kv_heads)


def bits_of(way, shape):
    """Of a number of the row; two copies of the latent count twice, the channels after RoPE are no values."""
    form, scheme, rope = split_way(way)
    if form == "heads":
        return sum(part_bits(scheme, part, shape.channels, shape.kv_heads) for part in "kv") / 2
    latent = sum(part_bits(scheme, part, shape.latent) for part in set(COPIES[form]))
    apart = part_bits(rope, COPIES[form][0], shape.apart)
    return (latent * shape.latent + apart * shape.apart) / (shape.latent + shape.apart)


class Layer:
    """Stands between a layer's projections and its attention, which gets keys and values that were stored."""

    def __init__(self, attention, shape, number, newest):
        import torch

        self.newest = newest  # tokens that a query sees unquantized
        self.way, self.basis, self.rows = None, None, None

        def take_queries(module, inputs, output):
            self.queries = in_heads(output[0].numpy(), shape.heads)

        def take_keys(module, inputs, output):
            values = torch.nn.functional.linear(inputs[0], attention.v_proj.weight)
            keys, values = (in_heads(part[0].numpy(), shape.kv_heads) for part in (output, values))
            self.exact = torch.from_numpy(shape.turned(keys)), torch.from_numpy(values)
            if self.way is None:
                self.rows = np.concatenate((side_by_side(keys[..., shape.slow]), side_by_side(values)), 1)
            else:
                keys, values = stored(keys, values, self.queries, self.way, shape, self.basis, number)
            self.values = torch.from_numpy(side_by_side(values))[None]
            return torch.from_numpy(side_by_side(keys))[None]

        attention.q_proj.register_forward_hook(take_queries)
        attention.k_proj.register_forward_hook(take_keys)
        attention.v_proj.register_forward_hook(lambda *_: self.values)
        attention.unquantized = self


def attend(module, query, key, value, attention_mask, scaling, **_):
    """For transformers: each query's newest tokens as they were before they were stored."""
    import torch

    tokens, group = query.shape[2], query.shape[1] // key.shape[1]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    near = (distance < module.unquantized.newest).float()
    (exact_key, exact_value), (key, value) = ((part.repeat_interleave(group, 0) for part in parts) for parts in (
        module.unquantized.exact, (key[0], value[0])))
    query = query[0] * scaling
    scores = torch.where(near.bool(), query @ exact_key.mT, query @ key.mT).masked_fill(distance < 0, -torch.inf)
    weights = scores.softmax(-1)
    out = (weights * near) @ exact_value + (weights * (1 - near)) @ value
    return out.transpose(0, 1)[None], None


def said(model, ids):
    """Log probabilities at the counted positions."""
    import torch

    with torch.no_grad():
        return model(torch.tensor(ids)[None], use_cache=False).logits[0, SKIP:].double().log_softmax(-1).numpy()


def measured(args, known):
    """Yields the figures of the windows, bases and ways that `known` lacks."""
    sys.path.insert(0, str(args.package))
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

    AttentionInterface.register("newest_unquantized", attend)
    paths = set_up_paths()
    folder, file = Path(paths["LOWKV_MODEL"]).parent, Path(paths["LOWKV_MODEL"]).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32,
                                                 attn_implementation="newest_unquantized").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    text, config = Path(paths["LOWKV_HANDBOOK_TEXT"]).read_text(), model.config
    shape = Shape(config.num_attention_heads, config.num_key_value_heads,
                  config.hidden_size // config.num_attention_heads, config.rope_parameters["rope_theta"])
    layers = [Layer(layer.self_attn, shape, number, args.newest) for number, layer in enumerate(model.model.layers)]
    said(model, tokenizer(text[-30_000:])["input_ids"][-args.tokens :])  # the book's end, which no window reaches
    samples = [layer.rows for layer in layers]
    ids = tokenizer(text[: args.windows * args.tokens * 16])["input_ids"]
    for number in range(args.windows):
        missing = [of for of in ((args.newest, number, "" if split_way(way)[0] == "heads" else basis, way)
                                 for basis in args.bases for way in args.ways) if of not in known]
        if not missing:
            continue
        window = ids[number * args.tokens : (number + 1) * args.tokens]
        for layer in layers:
            layer.way = None
        exact = said(model, window)
        for of in dict.fromkeys(missing):
            *_, basis, way = of
            for index, layer in enumerate(layers):
                layer.way = way
                layer.basis = Basis(basis, samples[index], shape.slow_keys, index) if basis else None
            found = said(model, window)
            yield dict(zip(KEY, of, strict=True)) | {
                "bits": bits_of(way, shape), "kld": float((np.exp(exact) * (exact - found)).sum(-1).mean()),
                "same": float((exact.argmax(-1) == found.argmax(-1)).mean())}


def table(figures):
    """A line for each way: mean divergence, and how often the likeliest token is the same."""
    columns = sorted({(figure["newest"], BASES.index(figure["basis"])) for figure in figures if figure["basis"]})
    lines = ["| way | bits | " + " | ".join(f"{BASES[basis]}, {newest} newest" for newest, basis in columns) + " |",
             "|---|--:" + "|--:" * len(columns) + "|"]
    for way in sorted({figure["way"] for figure in figures}, key=WAYS.index):
        cells = []
        for newest, basis in columns:
            here = [figure for figure in figures if figure["way"] == way and figure["newest"] == newest
                    and figure["basis"] in (BASES[basis], "")]
            cells.append(f"{statistics.mean(figure['kld'] for figure in here):.4f}, "
                         f"{100 * statistics.mean(figure['same'] for figure in here):.0f} %" if here else "-")
        bits = next(figure["bits"] for figure in figures if figure["way"] == way)
        lines.append(f"| `{way}` | {bits:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    args = arguments()
    figures = json.loads(args.out.read_text()) if args.out.exists() else []
    known = {tuple(figure[key] for key in KEY) for figure in figures}
    for figure in [] if args.redraw else measured(args, known):
        print(json.dumps(figure), file=sys.stderr, flush=True)
        figures.append(figure)
        args.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(table(figures))
    fill(args.out.with_suffix(".md"), "<!-- mla -->", "<!-- /mla -->", table(figures))


if __name__ == "__main__":
    main()
