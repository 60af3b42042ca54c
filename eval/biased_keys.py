#!/usr/bin/env python3
"""What each scheme loses where keys have large biases, as Qwen2's and Qwen2.5's have: the table of docs/choose.md.

    eval/biased_keys.py                                goes on where it was stopped
    eval/biased_keys.py --schemes lowkv2 --biases slow
    eval/biased_keys.py --redraw                       the table again, nothing measured

There is no Qwen2 here, so SmolLM2's file gets biases of keys (blk.N.attn_k.bias, which llama.cpp's llama architecture
reads). Their size is that of Qwen2.5 7B, as reported in llama.cpp's issue 21385: the norm of a layer's biases is 605 in
the first layer, 921 in the last and 22 in the median of the others, for 4 kv heads; half of it here for each head. A
bias in a pair of channels that RoPE hardly turns moves all scores of a query alike, so that the model stays as it was
(the first line of the table has its perplexity):

    none    the model as it is
    median  22 in all layers, in the two slowest pairs of channels: 2e-5 radians per token
    slow    605, 22 ..., 921, in the same pairs
    faster  the same at three quarters of the way to the slowest pair: 2e-4 radians per token

Each model is measured against itself with the scheme `exact`, as eval/quality.py does: one window of the handbook,
weights in f16. A scheme takes a minute on two slow cores. Writes OUT/biased_keys.csv."""

import argparse
import sys
from pathlib import Path

import gguf
import measuring
import numpy as np
from paths import ROOT, fingerprint
from quality_tables import fill, shown
from sheet import RECOMMENDED
from weights import FOLDER, model_with, write

SCHEMES = [*RECOMMENDED, "kivi4", "kivi2", "turboquant4", "stock q8_0", "stock q4_0"]
# The norm of a head's biases: in the first layer, in the last, in the others; and where the two pairs of channels
# begin, as a share of the head's pairs.
BIASES = {"none": None, "median": (11, 11, 11, 1), "slow": (302, 460, 11, 1), "faster": (302, 460, 11, 0.75)}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measuring.add_options(parser, jobs=1)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/quality")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="default: %(default)s")
    parser.add_argument("--biases", default=",".join(BIASES), help="default: %(default)s")
    parser.add_argument("--tokens", default=2048, type=int, help="default: %(default)s")
    args = parser.parse_args()
    args.schemes, args.biases = args.schemes.split(","), args.biases.split(",")
    if unknown := set(args.biases) - set(BIASES):
        parser.error(f"--biases {','.join(sorted(unknown))}: they are {', '.join(BIASES)}")
    args.windows = 1
    return args


def biases(source, first, last, other, share):
    """The tensors of a llama model: biases in two neighbouring pairs of channels of each head, in random directions."""
    fields = gguf.GGUFReader(source).fields
    layers, heads, kv_heads, width = (fields[f"llama.{key}"].contents() for key in (
        "block_count", "attention.head_count", "attention.head_count_kv", "embedding_length"))
    channels = width // heads
    begin = round(share * (channels // 2)) * 2 - (4 if share == 1 else 0)  # a pair's channels are neighbours
    random, made = np.random.default_rng(1), {}
    for layer in range(layers):
        bias = np.zeros((kv_heads, channels))
        drawn = random.normal(size=(kv_heads, 4))
        norm = {0: first, layers - 1: last}.get(layer, other)
        bias[:, begin:begin + 4] = norm * drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
        made[f"blk.{layer}.attn_k.bias"] = bias.ravel()
    return made


def biased_model(source, name):
    """The path of the model with these biases; made where it is not there."""
    model = model_with("f16", source)
    if BIASES[name] is None:
        return model
    target = FOLDER / f"{model.stem}-biases-{'-'.join(map(str, BIASES[name]))}.gguf"
    if not target.exists():
        unfinished = target.with_suffix(".part")
        write(model, unfinished, "f16", biases(model, *BIASES[name]))
        unfinished.replace(target)
    return target


def setting(args, source, name):
    """As texts.py has it; the CSV names the model by its source and the biases."""
    return {"windows": 1, "tokens": args.tokens, "chunk": args.chunk, "skip": args.skip, "weights": "stored",
            "calibration": "", "model": f"{fingerprint(source)} {name}", "text": fingerprint(args.file)}


def table(args, find):
    lines = ["| scheme | bits | " + " | ".join(args.biases) + " |", "|---" * (2 + len(args.biases)) + "|"]
    rows = [find("exact", name) for name in args.biases]
    lines.append("| `exact`: perplexity | 16 | " + " | ".join(f"{r['perplexity']:.2f}" if r else "-" for r in rows)
                 + " |")
    for scheme in args.schemes:
        rows = [find(scheme, name) for name in args.biases]
        if known := [row for row in rows if row]:
            cells = [f"{r['mean_kld']:.4f}, {100 * r['same_top1']:.1f}" if r else "-" for r in rows]
            lines.append(f"| `{shown(scheme)}` | {known[0]['bits']:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    args = arguments()
    source = measuring.of_set_up("LOWKV_MODEL")
    args.file = measuring.of_set_up("LOWKV_HANDBOOK_TEXT")
    results = measuring.Results(args.out / "biased_keys.csv",
                                "" if args.redraw else fingerprint(args.build / "lib/libggml-lowkv.so"))
    if not args.redraw:
        for name in args.biases:
            print(f"biases: {name}", file=sys.stderr)
            args.model = biased_model(source, name)
            here = setting(args, source, name)
            measuring.measure(args, results, [(scheme, here) for scheme in args.schemes])
    text = table(args, lambda scheme, name: results.find(scheme, setting(args, source, name)))
    print(text)
    fill(args.out.parent / "choose.md", "<!-- biased-keys -->", "<!-- /biased-keys -->", text)


if __name__ == "__main__":
    main()
