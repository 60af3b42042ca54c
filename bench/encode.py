#!/usr/bin/env python3
"""What packing a token costs, and reading one back, with lowkv installed:

    bench/encode.py --head-dim 64,128 --schemes lowkv2.8,kivi2

Rows of f16 are packed as a cache packs them when they leave its window. Microseconds are of one token of one layer, all
kv heads, keys and values: times the layers, and beside a token's time in a model, they are the share that packing
takes. Schemes take turns, each with a warm-up; figures are medians."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
from lowkv._core import Batch, Plan, Retention, Store, implementation, parse_scheme


def round_of(plan, rows, threads):
    """Seconds to pack all tokens, and to read them back."""
    batch = Batch(Store(), plan, Retention(0, 0, 0), 1)
    batch.append(*rows)
    start = time.perf_counter()
    batch.pack(0, threads)
    packed = time.perf_counter()
    out = [np.empty_like(part) for part in rows]
    batch.read(0, *out, threads)
    first, end = batch.packed
    assert end - first == rows[0].shape[2], "tokens are no whole number of blocks"
    return packed - start, time.perf_counter() - packed


def measure(scheme, head_dim, args):
    shape = (1, args.kv_heads, args.tokens, head_dim)
    random = np.random.default_rng(1)
    rows = [random.standard_normal(shape, np.float32).astype(np.float16) for _ in range(2)]
    plan = Plan(parse_scheme(scheme), 0, args.kv_heads, head_dim, "float16")
    rounds = [round_of(plan, rows, args.threads) for _ in range(args.rounds + 1)][1:]
    encode, decode = (1e6 * statistics.median(times) / args.tokens for times in zip(*rounds, strict=True))
    bits = 8 * plan.packed_bytes / (2 * args.kv_heads * head_dim * plan.block_tokens)
    return {"scheme": scheme, "head_dim": head_dim, "bits": bits, "encode_us": encode, "decode_us": decode}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default="lowkv1.5,lowkv2,lowkv2.8,lowkv3,lowkv4,kivi2,kivi4,int8",
                        help="+ stands for the comma within one (default: %(default)s)")
    parser.add_argument("--head-dim", default="64,128", help="default: %(default)s")
    parser.add_argument("--kv-heads", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=2048, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=9, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures to this file, a list")
    args = parser.parse_args()
    print("| scheme | head_dim | bits | encode us | ns a number | decode us |\n|---|--:|--:|--:|--:|--:|")
    found = []
    for head_dim in map(int, args.head_dim.split(",")):
        for scheme in args.schemes.replace("+", "\0").split(","):
            found.append(row := measure(scheme.replace("\0", ","), head_dim, args))
            each = 1e3 * row["encode_us"] / (2 * args.kv_heads * head_dim)
            print(f"| {row['scheme']} | {head_dim} | {row['bits']:.2f} | {row['encode_us']:.2f} | {each:.2f} | "
                  f"{row['decode_us']:.2f} |", flush=True)
    print(f"\nus: of a token of one layer with {args.kv_heads} kv heads; {args.threads} threads, kernels "
          f"{implementation()}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
