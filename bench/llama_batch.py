#!/usr/bin/env python3
"""Stock llama-batched-bench with and without the plug-in, at equal memory for the cache: how many sequences fit, and
how many tokens a second they get together (KIVI's Figure 5).

    bench/llama_batch.py                                       SmolLM2, as much memory as four f16 sequences: 15 minutes
    bench/llama_batch.py --prompt 992 --answer 32 --fits 8     shorter sequences
    bench/llama_batch.py --schemes lowkv2,kivi2 --out build/batch

Each sequence is a prompt of its own and an answer. The memory is that of --fits sequences in stock f16, by its "KV
buffer size"; of ours it is the most that the cache really held (lowkv_cache_peak_bytes), exact rows included. Each
scheme gets as many sequences as one's memory says will fit. Measured are one sequence, as many as f16 holds, and as
many as fit, each in a process of its own; caches take turns, --rounds times; figures are medians. Writes batch.csv,
batch.png into --out."""

import argparse
import json
import re
import statistics
import sys
import tempfile
from pathlib import Path

import pictures
from llama_tools import ROOT, Tool, add_options, turns

MIB = 1 << 20
COLUMNS = ["cache", "sequences", "cache MiB", "prompt tokens/s", "answer tokens/s", "of f16's most"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "llama-batched-bench")
    parser.add_argument("--schemes", default="lowkv2.8,lowkv2",
                        help="a scheme's own commas are written + (default: %(default)s)")
    parser.add_argument("-p", "--prompt", type=int, default=4032,
                        help="prompt tokens of a sequence (default: %(default)s)")
    parser.add_argument("-n", "--answer", type=int, default=64, help="answer tokens of one (default: %(default)s)")
    parser.add_argument("--fits", type=int, default=4, help="f16 sequences that fit the memory (default: %(default)s)")
    parser.add_argument("-r", "--rounds", type=int, default=1, help="rounds of turns (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/performance", help="default: %(default)s")
    return parser.parse_args()


def bench(tool, scheme, options, count):
    """{"pp", "tg": tokens/s of all sequences, "bytes": of the cache}"""
    with tempfile.TemporaryDirectory() as folder:
        stats = Path(folder) / "stats.prom"
        out, err = tool.run(
            scheme, *(["-dev", "LOWKV"] if scheme else []), "-fa", "on",
            "-c", count * (options.prompt + options.answer), "-b", 2048, "-ub", 512, "-npp", options.prompt,
            "-ntg", options.answer, "-npl", count, "-lv", 4, "--output-format", "jsonl", LOWKV_STATS=str(stats))
        held = re.findall(r"^lowkv_cache_peak_bytes\S* (\d+)", stats.read_text(), re.M) if scheme else [
            float(size) * MIB for size in re.findall(r"KV buffer size = +([\d.]+) MiB", out + err)]
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    if not held or len(rows) != 1:
        tool.fail(f"llama-batched-bench's output was not understood:\n{out}{err}")
    return {"pp": rows[0]["speed_pp"], "tg": rows[0]["speed_tg"], "bytes": sum(map(float, held))}


def plot(rows, memory, out):
    figure, (left, right) = pictures.side_by_side(2)
    for cache, colour, marker in zip(dict.fromkeys(row["cache"] for row in rows), pictures.COLOURS, pictures.MARKERS,
                                     strict=False):
        mine = [row for row in rows if row["cache"] == cache]
        for axis, column in ((left, "cache MiB"), (right, "answer tokens/s")):
            axis.plot([row["sequences"] for row in mine], [row[column] for row in mine], color=colour, marker=marker,
                      label=cache)
    left.axhline(memory / MIB, color=pictures.RED, linestyle="--", linewidth=1)
    left.set_ylabel("cache, MiB (dashed: the memory given)")
    right.set_ylabel("answer tokens/s, all sequences")
    for axis in (left, right):
        axis.set_xlabel("sequences at once")
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False)
    pictures.save(figure, rows, out, "batch")


def main():
    options = arguments()
    tool = Tool("llama-batched-bench", options)
    caches = {"stock f16": None, **{scheme.replace("+", ", "): scheme.replace("+", ",")
                                    for scheme in options.schemes.split(",")}}
    found = {}  # {(cache, sequences): its rounds}
    counts = {}
    for cache, scheme in caches.items():
        found[cache, 1] = [bench(tool, scheme, options, 1)]
        one = found[cache, 1][0]["bytes"]
        if scheme is None:
            memory = one * options.fits
        counts[cache] = sorted({1, options.fits, max(1, int(memory / one))})
        print(f"{cache}: {one / MIB:.1f} MiB a sequence, so {counts[cache][-1]} should fit into {memory / MIB:.0f} MiB",
              file=sys.stderr)
    for turn in range(options.rounds):
        for cache in turns([*caches], turn):
            for count in counts[cache][1 if turn == 0 else 0:]:
                print(f"round {turn + 1}/{options.rounds}: {cache}, {count} sequences", file=sys.stderr)
                found.setdefault((cache, count), []).append(bench(tool, caches[cache], options, count))
    rows = []
    for cache in caches:
        for count in counts[cache]:
            middle = {key: statistics.median(one[key] for one in found[cache, count]) for key in ("pp", "tg", "bytes")}
            rows.append({"cache": cache, "sequences": count, "cache MiB": round(middle["bytes"] / MIB, 1),
                         "prompt tokens/s": round(middle["pp"], 1), "answer tokens/s": round(middle["tg"], 1)})
    best = next(row for row in reversed(rows) if row["cache"] == "stock f16")["answer tokens/s"]
    for row in rows:
        row["of f16's most"] = f"{row['answer tokens/s'] / best:.2f}x"
    plot(rows, memory, options.out)
    print("| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for row in rows:
        print("| " + " | ".join(str(row[column]) for column in COLUMNS) + " |")
    print(f"\n{options.prompt} + {options.answer} tokens a sequence, {memory / MIB:.0f} MiB, "
          f"{options.threads} threads, medians of {options.rounds} rounds, {Path(tool.model).name}")


if __name__ == "__main__":
    main()
