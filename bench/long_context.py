#!/usr/bin/env python3
"""One sequence of a million tokens, really held in all layers of SmolLM2's shape, by the Python package, as a picture.

    bench/long_context.py                                     some minutes, 5 GiB
    bench/long_context.py --tokens 64Ki --schemes lowkv2      shorter

Random keys and values, the same in all layers, each layer with blocks of its own. At 1,024 tokens and each doubling
one query token attends in all layers; before it a buffer larger than the processor's caches is read, and the figure is
the median. Writes length.csv and length.png into --out. Left: what the cache holds, beside what f16 would. Right: what
attention of one token takes in all layers, beside what reading the held bytes takes at the measured bandwidth."""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
PIECE, ROUNDS = 512, 5


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="1Mi", help="at the end, as 64Ki or 1Mi (default: %(default)s)")
    parser.add_argument("--schemes", default="lowkv2.8", help="one after the other (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/performance", help="default: %(default)s")
    parser.add_argument("--python", default=sys.executable, help="one with lowkv and torch (default: this one)")
    parser.add_argument("--measure", metavar="SCHEME", help="only measure, and print the rows as JSON")
    return parser.parse_args()


def seconds(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(options, scheme):
    """Rows of the table: at 1,024 tokens, and at each doubling."""
    import torch
    from lowkv.cache import Cache
    from lowkv.visibility import Visibility

    last = int(options.tokens.removesuffix("Ki").removesuffix("Mi"))
    last <<= {"Ki": 10, "Mi": 20}.get(options.tokens[-2:], 0)
    random = torch.Generator().manual_seed(1)
    layers = Cache(scheme, [None] * LAYERS).layers
    other = torch.ones(128 << 20, dtype=torch.int64)  # larger than the caches
    bandwidth = other.nbytes / statistics.median(seconds(other.sum) for _ in range(7))
    found, tokens, packing = [], 0, 0.0
    query = torch.randn(1, HEADS, 1, HEAD_DIM, generator=random)
    while tokens < last:
        keys, values = (torch.randn(1, KV_HEADS, PIECE, HEAD_DIM, generator=random).half() for _ in range(2))
        for layer in layers:
            layer.append(keys, values)
            packing += seconds(layer.pack)
        tokens += PIECE
        if tokens < 1024 or (tokens & (tokens - 1) and tokens != last):
            continue
        times, arguments = [], (query, Visibility(tokens, 1), HEAD_DIM**-0.5, 0.0, None)
        for _ in range(ROUNDS):
            other.sum()
            times.append(sum(seconds(functools.partial(layer._attend, *arguments)) for layer in layers))
        held = sum(layer.nbytes for layer in layers)
        found.append({"scheme": scheme, "tokens": tokens, "bytes": held,
                      "f16_bytes": LAYERS * 4 * KV_HEADS * HEAD_DIM * tokens, "pack_us": packing / tokens * 1e6,
                      "ms": statistics.median(times) * 1e3, "floor_ms": held / bandwidth * 1e3})
        print(f"{tokens:>9,} tokens: {held / 2**20:7.1f} MiB, a token's attention {found[-1]['ms']:.2f} ms",
              file=sys.stderr, flush=True)
    return found


def measured(options, scheme):
    """The same by a Python with torch: this one draws."""
    command = [options.python, __file__, "--tokens", options.tokens, "--measure", scheme]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def plot(rows, out):
    import pictures

    figure, (left, right) = pictures.side_by_side(2)
    for scheme, colour, marker in zip(dict.fromkeys(row["scheme"] for row in rows), pictures.COLOURS[1:],
                                      pictures.MARKERS[1:], strict=False):
        mine = [row for row in rows if row["scheme"] == scheme]
        tokens = [row["tokens"] for row in mine]
        if scheme == rows[0]["scheme"]:
            left.plot(tokens, [row["f16_bytes"] / GIB for row in mine], color=pictures.COLOURS[0], marker="s",
                      label="f16 (computed)")
        left.plot(tokens, [row["bytes"] / GIB for row in mine], color=colour, marker=marker, label=scheme)
        right.plot(tokens, [row["ms"] for row in mine], color=colour, marker=marker, label=scheme)
        right.plot(tokens, [row["floor_ms"] for row in mine], color=colour, linestyle="--", linewidth=1,
                   label=f"{scheme}: reading its bytes")
    left.set_ylabel("cache, GiB")
    right.set_ylabel("attention of one token, all layers, ms")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("tokens held")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.set_xticks([1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20],
                        ["1k", "4k", "16k", "64k", "256k", "1M"])
        axis.legend(frameon=False)
    pictures.save(figure, rows, out, "length")


def main():
    options = arguments()
    if options.measure:
        print(json.dumps(measure(options, options.measure)))
        return
    rows = [row for scheme in options.schemes.split(",") for row in measured(options, scheme)]
    plot(rows, options.out)


if __name__ == "__main__":
    main()
