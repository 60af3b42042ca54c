#!/usr/bin/env python3
"""One sequence of a million tokens, really held in all layers of SmolLM2's shape: `lowkv-bench length`, as a picture.

    bench/long_context.py                                     three minutes, 5 GiB
    bench/long_context.py --tokens 64Ki --schemes lowkv2      shorter

Writes length.csv and length.png into --out. Left: what the cache holds, beside what f16 would. Right: what
attention of one token takes in all layers, beside what reading the held bytes takes at the measured bandwidth."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pictures

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, default=ROOT / "build/release/bin/lowkv-bench",
                        help="default: %(default)s")
    parser.add_argument("--tokens", default="1Mi", help="at the end (default: %(default)s)")
    parser.add_argument("--schemes", default="lowkv2.8", help="one after the other (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/performance", help="default: %(default)s")
    return parser.parse_args()


def measure(options, scheme):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "length.json"
        done = subprocess.run([options.bench, "length", "--tokens", options.tokens, "--scheme", scheme,
                               "--json", file])
        if done.returncode != 0:
            sys.exit(f"long_context.py: `lowkv-bench length` failed ({done.returncode})")
        return json.loads(file.read_text())


def plot(rows, out):
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
    rows = [row for scheme in options.schemes.split(",") for row in measure(options, scheme)]
    plot(rows, options.out)


if __name__ == "__main__":
    main()
