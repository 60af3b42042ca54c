#!/usr/bin/env python3
"""The attention of two builds of lowkv, taking turns: what a change to the core costs.

    bench/compare_builds.py OLD/build/release build/release
    bench/compare_builds.py OLD/build/release build/release --schemes lowkv2.8,kivi2 --rounds 9 --json out.json

Each round runs `lowkv-bench attention` (older builds: `lowkv bench attention`) of the old build and of the new one, for
each scheme, one right after the other; who is first changes from round to round. Printed are medians, the median of
each round's ratio new/old with the quarter of the rounds below and above, and the ratio of the best rounds, which a
noisy machine moves least. Schemes that one of the builds does not know are named and left out."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# What needs no calibration, one of each kernel.
SCHEMES = (
    "exact,int8,int4,int4h,kivi2,kivi4,lowkv1.5,lowkv2,lowkv2.8,lowkv3,lowkv4,"
    "turboquant2,turboquant3-qr,skvq-k2v1.5,skvq-k2v2,skvq-k4v4,kvquant2,kvquant3,kvquant4-1%"
)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="the build folder to compare with")
    parser.add_argument("new", type=Path)
    parser.add_argument("--schemes", default=SCHEMES, help="default: %(default)s")
    parser.add_argument("--head-dim", default="128")
    parser.add_argument("--heads", default="32/8")
    parser.add_argument("--tokens", default="4096")
    parser.add_argument("-t", "--threads", type=int, default=min(os.cpu_count() or 1, 2), help="default: %(default)s")
    parser.add_argument("--op", default="decode,prefill", help="default: %(default)s")
    parser.add_argument("-r", "--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser.parse_args()


def bench(build):
    """The program that measures. It was a command of lowkv itself once."""
    own = build / "bin/lowkv-bench"
    return [own] if own.exists() else [build / "bin/lowkv", "bench"]


def milliseconds(build, scheme, options, folder):
    """Of each operation; or the message of a build that cannot run the scheme."""
    file = folder / "figures.json"
    command = [*bench(build), "attention", "--peers", "none", "--schemes", scheme, "--json", file]
    for option in ("head_dim", "heads", "tokens", "op"):
        command += ["--" + option.replace("_", "-"), getattr(options, option)]
    ran = subprocess.run([*command, "-t", str(options.threads)], capture_output=True, text=True)
    if ran.returncode != 0:
        return ran.stderr.strip().splitlines()[-1]
    return {row["op"]: row["ms"] for row in json.loads(file.read_text()) if row["scheme"] == scheme}


def compare(scheme, options, folder):
    """A row for each operation; a text if a build cannot run the scheme."""
    rounds = []
    for number in range(options.rounds):
        order = [options.old, options.new] if number % 2 == 0 else [options.new, options.old]
        taken = {build: milliseconds(build, scheme, options, folder) for build in order}
        for build, figures in taken.items():
            if isinstance(figures, str):
                return f"{scheme}: left out, {build} says: {figures}"
        rounds.append((taken[options.old], taken[options.new]))
    rows = []
    for op in rounds[0][0]:
        ratios = [new[op] / old[op] for old, new in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "scheme": scheme,
                "op": op,
                "old_ms": statistics.median(old[op] for old, _ in rounds),
                "new_ms": statistics.median(new[op] for _, new in rounds),
                "ratio": middle,
                "ratio_quarters": [low, high],
                "best_ratio": min(new[op] for _, new in rounds) / min(old[op] for old, _ in rounds),
                "rounds": len(rounds),
            }
        )
    return rows


def main():
    options = arguments()
    for build in (options.old, options.new):
        if not bench(build)[0].exists():
            sys.exit(f"There is no {bench(build)[0]}: give two build folders.")
    if options.rounds < 2:
        sys.exit("--rounds must be 2 or more: a quarter of one round says nothing.")
    all_rows = []
    print(f"{'scheme':16} {'op':8} {'old ms':>9} {'new ms':>9} {'new/old':>8}  {'quarters':14}  best")
    with tempfile.TemporaryDirectory() as folder:
        for scheme in options.schemes.split(","):
            rows = compare(scheme, options, Path(folder))
            if isinstance(rows, str):
                print(rows, flush=True)
                continue
            for row in rows:
                low, high = row["ratio_quarters"]
                print(
                    f"{row['scheme']:16} {row['op']:8} {row['old_ms']:9.3f} {row['new_ms']:9.3f} {row['ratio']:8.3f}"
                    f"  {low:.3f} to {high:.3f}  {row['best_ratio']:.3f}",
                    flush=True,
                )
            all_rows += rows
    for op in dict.fromkeys(row["op"] for row in all_rows):
        rows = [row for row in all_rows if row["op"] == op]
        ratio, best = (statistics.median(row[name] for row in rows) for name in ("ratio", "best_ratio"))
        print(f"{op}, median of {len(rows)} schemes: {ratio:.3f}, of the best rounds {best:.3f}")
    if options.json:
        options.json.write_text(json.dumps(all_rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
