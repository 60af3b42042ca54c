#!/usr/bin/env python3
"""Passkey retrieval: can the model still say a number that it read long ago?

A five-digit number is hidden in running text of a given length (in tokens, about), at a given depth
(0 %: at the start, 100 %: just before the question). `lowkv generate` reads it in chunks of 128 from a
packed cache and answers at temperature 0; right means that the number is in its first 8 tokens. The
exact cache runs first: where it fails too, the model is the limit, not the cache. (The first tokens,
as sinks, and the newest ones are exact in every scheme: depths 0 and 100 % test the model, those
between test the cache.) The filler is not the same text at every depth.

    eval/passkey.py --lengths 512,4096 --trials 1
"""

import argparse
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from measuring import run
from paths import ROOT, fingerprint, set_up_paths
from sheet import Sheet

SCHEMES = ["exact", "lowkv4", "lowkv3", "lowkv2.8", "lowkv2", "kivi4", "kivi2"]
LENGTHS = [1024, 2048]
DEPTHS = [25, 50, 75]
TRIALS = 2
KEY = ["scheme", "length", "depth", "trial"]
COLUMNS = ["plugin", "right", "answer"]
CHARACTERS = 4.4  # of a token of the handbook, about


def prompt(text, length, depth, trial):
    """The same for every scheme: trial, length and depth decide number and text."""
    draw = random.Random(f"{length} {depth} {trial}")
    number = str(draw.randrange(10000, 100000))
    need = int(length * CHARACTERS) - 160
    start = draw.randrange(len(text) - need)
    start = text.index(" ", start) + 1
    filler = text[start:start + need]
    at = filler.rfind("\n", 0, max(1, need * depth // 100)) + 1 if depth < 100 else need
    needle = f"\nThe pass key is {number}. Remember it. {number} is the pass key.\n"
    return (filler[:at] + needle + filler[at:]
            + "\n\nWhat is the pass key? The pass key is"), number


def ask(args, scheme, words):
    said = run([args.build / "bin/lowkv", "generate", "-m", args.model, "-f", "-", "--no-chat", "-q", "--scheme",
                scheme, "-n", "8", "--temp", "0", "--chunk", "128", "-t", args.threads], words)
    return said.removeprefix(words).strip()


def measure(args, plugin, lengths=LENGTHS, schemes=SCHEMES, depths=DEPTHS, trials=TRIALS):
    """Adds to the CSV what this build lacks. The model runs as it is, with quantized weights."""
    sheet = Sheet(args.out / "passkey.csv", KEY, COLUMNS)
    text = Path(args.file).read_text()
    cells = [(s, n, d, t) for t in range(trials) for n in lengths for s in schemes for d in depths]
    todo = [c for c in cells if sheet.get(*c).get("plugin") != plugin]
    start, done, total = time.monotonic(), 0, sum(c[1] for c in todo)

    def answer(cell):
        words, number = prompt(text, *cell[1:])
        said = ask(args, cell[0], words)
        return cell, number in said, " ".join(said.split())

    with ThreadPoolExecutor(args.jobs) as pool:
        for cell, right, said in pool.map(answer, todo):
            sheet.add(**dict(zip(KEY, cell)), plugin=plugin, right=int(right), answer=said)
            scheme, length, depth, _ = cell
            done += length
            left = (time.monotonic() - start) / done * (total - done)
            print(f"passkey: {scheme}, {length} tokens, depth {depth} %: {'right' if right else 'wrong'} "
                  f"({said[:20]!r}), {left / 60:.0f} minutes left", file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=Path)
    parser.add_argument("--out", default=ROOT / "docs/quality", type=Path)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)), help="in percent")
    parser.add_argument("--trials", default=TRIALS, type=int, help="of each length and depth")
    parser.add_argument("--jobs", default=min(os.cpu_count() or 1, 2), type=int, help="questions side by side")
    parser.add_argument("--threads", default=1, type=int, help="of each question")
    paths = set_up_paths()
    parser.set_defaults(model=paths["LOWKV_MODEL"], file=paths["LOWKV_HANDBOOK_TEXT"])
    args = parser.parse_args()
    args.build = args.build.resolve()
    measure(args, fingerprint(args.build / "lib/libggml-lowkv.so"),
            [int(n) for n in args.lengths.split(",")], args.schemes.split(","),
            [int(d) for d in args.depths.split(",")], args.trials)
    draw(args.out)


def draw(out):
    """One heat map per scheme: length across, depth down."""
    import quality_plots
    rows = list(Sheet(out / "passkey.csv", KEY, COLUMNS).rows.values())
    if rows:
        quality_plots.passkey(out, rows, SCHEMES)


if __name__ == "__main__":
    main()
