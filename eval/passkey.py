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
import csv
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from paths import ROOT, fingerprint, set_up_paths

SCHEMES = ["exact", "lowkv2.8", "lowkv2", "kivi2"]
LENGTHS = [1024, 2048]
DEPTHS = [25, 50, 75]
COLUMNS = ["scheme", "length", "depth", "trial", "plugin", "right", "answer"]
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


def ask(build, model, scheme, words, threads):
    command = [build / "bin/lowkv", "generate", "-m", model, "-f", "-", "--no-chat", "-q",
               "--scheme", scheme, "-n", "8", "--temp", "0", "--chunk", "128", "-t", threads]
    done = subprocess.run([str(word) for word in command], input=words, capture_output=True,
                          text=True)
    if done.returncode:
        sys.exit(f"{command} failed:\n{done.stderr[-2000:]}")
    return done.stdout.removeprefix(words).strip()


def read(path):
    if not path.exists():
        return {}
    with open(path, newline="") as file:
        return {tuple(row[c] for c in COLUMNS[:5]): row for row in csv.DictReader(file)}


def measure(build, model, text, path, plugin, threads, lengths=LENGTHS, schemes=SCHEMES, depths=DEPTHS,
            trials=3):
    """Adds to the CSV at `path` what it lacks."""
    text = Path(text).read_text()
    rows = read(path)
    cells = [(s, n, d, t) for t in range(trials) for n in lengths for s in schemes for d in depths]
    todo = [c for c in cells if (*map(str, c), plugin) not in rows]
    start, done, total = time.monotonic(), 0, sum(c[1] for c in todo)
    for scheme, length, depth, trial in todo:
        words, number = prompt(text, length, depth, trial)
        answer = ask(build, model, scheme, words, threads)
        right = number in answer
        row = dict(zip(COLUMNS, map(str, (scheme, length, depth, trial, plugin, int(right),
                                          " ".join(answer.split())))))
        rows[tuple(row[c] for c in COLUMNS[:5])] = row
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows.values())
        done += length
        left = (time.monotonic() - start) / done * (total - done)
        print(f"passkey: {scheme}, {length} tokens, depth {depth} %: "
              f"{'right' if right else 'wrong'} ({answer[:20]!r}), {left / 60:.0f} minutes left",
              file=sys.stderr)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=Path)
    parser.add_argument("--out", default=ROOT / "docs/quality", type=Path)
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--depths", default=",".join(map(str, DEPTHS)), help="in percent")
    parser.add_argument("--trials", default=3, type=int, help="of each length and depth")
    parser.add_argument("--threads", default=min(os.cpu_count() or 1, 2), type=int)
    args = parser.parse_args()
    args.build = args.build.resolve()
    paths = set_up_paths()
    measure(args.build, paths["LOWKV_MODEL"], paths["LOWKV_HANDBOOK_TEXT"], args.out / "passkey.csv",
            fingerprint(args.build / "lib/libggml-lowkv.so"), args.threads,
            [int(n) for n in args.lengths.split(",")], args.schemes.split(","),
            [int(d) for d in args.depths.split(",")], args.trials)
    draw(args.out)


def draw(out):
    """One heat map per scheme: length across, depth down; of the build that was asked last."""
    import quality_plots
    rows = list(read(out / "passkey.csv").values())
    if rows:
        quality_plots.passkey(out, [r for r in rows if r["plugin"] == rows[-1]["plugin"]], SCHEMES)


if __name__ == "__main__":
    main()
