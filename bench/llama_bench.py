#!/usr/bin/env python3
"""Stock llama-bench with and without the plug-in, taking turns, at several depths.

    bench/llama_bench.py                                    what `make bench` runs
    bench/llama_bench.py --schemes kivi2,kivi4 --depths 8000 --json out.json

For each depth and round, llama-bench runs once without the plug-in (stock f16) and once with each scheme;
each figure is the median of its rounds. pp512 is a prompt of 512 tokens at that depth, tg32 32 tokens of
answer. Only ratios mean something: absolute speeds belong to one machine and one hour."""

import argparse
import json
import statistics
from pathlib import Path

from llama_tools import Tool, add_options, each_in_turn


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "llama-bench")
    parser.add_argument("--depths", default="0,4096,8000", help="tokens in the cache before (default: %(default)s)")
    parser.add_argument("--schemes", default="lowkv2.8,kivi2", help="default: %(default)s")
    parser.add_argument("-p", "--prompt", type=int, default=512, help="prompt tokens (default: %(default)s)")
    parser.add_argument("-n", "--answer", type=int, default=32, help="answer tokens (default: %(default)s)")
    parser.add_argument("-r", "--rounds", type=int, default=3, help="rounds of turns (default: %(default)s)")
    parser.add_argument("--json", help="write the figures to this file")
    return parser.parse_args()


def run(bench, scheme, depth, options):
    """One llama-bench: {'pp': tokens/s, 'tg': tokens/s}."""
    out, _ = bench.run(scheme, "-fa", 1, "-r", 1, "-o", "json", "-p", options.prompt, "-n", options.answer, "-d", depth)
    return {"pp" if row["n_prompt"] else "tg": row["avg_ts"] for row in json.loads(out)}


def table(rows, options):
    header = ["depth", "cache", f"pp{options.prompt} t/s", "of stock", f"tg{options.answer} t/s", "of stock"]
    lines = [header, ["-" * len(word) for word in header]]
    for row in rows:
        lines.append(
            [str(row["depth"]), row["scheme"], f"{row['pp']:.1f}", f"{row['pp_ratio']:.2f}x",
             f"{row['tg']:.1f}", f"{row['tg_ratio']:.2f}x"]
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join("| " + " | ".join(word.rjust(width) for word, width in zip(line, widths, strict=True)) + " |"
                     for line in lines)


def main():
    options = arguments()
    bench = Tool("llama-bench", options)
    schemes = [None, *options.schemes.split(",")]
    rows = []
    for depth in bench.depths(options.depths):
        found = each_in_turn(depth, schemes, options.rounds,
                             lambda scheme, depth=depth: run(bench, scheme, depth, options))
        middle = {
            scheme: {kind: statistics.median(one[kind] for one in runs) for kind in ("pp", "tg")}
            for scheme, runs in found.items()
        }
        for scheme, speeds in middle.items():
            ratios = {f"{kind}_ratio": speeds[kind] / middle[None][kind] for kind in ("pp", "tg")}
            rows.append({"depth": depth, "scheme": scheme or "stock f16", **speeds, **ratios, "rounds": found[scheme]})
    print(table(rows, options))
    print(f"\n{options.threads} threads, medians of {options.rounds} interleaved rounds, {Path(bench.model).name}")
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
