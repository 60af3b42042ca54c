#!/usr/bin/env python3
"""Instructions that decoding executes for 16 more packed tokens, by kernel: for CPUs that aren't at hand.

    bench/instructions.py build/release:avx2 build/aarch64:neon build/aarch64:scalar
    bench/instructions.py build/release:avx2 --schemes lowkv2.8,kivi2 --head-dim 128 --rows 4

Each argument is a build folder and one of its implementations. bench/decode_step.cpp is linked with the folder's
library and run by qemu-user (on Debian: apt-get install qemu-user), which logs every instruction that it executes in
the implementation's functions. Counted are two lengths; printed is the difference, for 16 tokens of one kv head with
ROWS heads: codes, weights and all else that a token costs, but nothing that a step costs once. A count is no time: one
instruction of AVX2 does the work of two of NEON."""

import argparse
import bisect
import collections
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORT, LONG = 256, 512  # tokens
LEAST = 50  # instructions that are shown
EXECUTED = re.compile(rb"^Trace \d+: \S+ \[[0-9a-f]+/([0-9a-f]+)/", re.M)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="+", metavar="BUILD:IMPLEMENTATION")
    parser.add_argument("--schemes", default="lowkv2.8", help="default: %(default)s")
    parser.add_argument("--head-dim", default="128", help="default: %(default)s")
    parser.add_argument("--rows", default="4", help="heads of a kv head; default: %(default)s")
    return parser.parse_args()


def link(build, program):
    """Returns the CPU that the build is for."""
    command = json.loads((build / "compile_commands.json").read_text())[0]["command"].split()
    compiler = next(word for word, option in itertools.pairwise(command) if option.startswith("-"))  # after a launcher
    subprocess.run([compiler, "-std=c++20", "-O1", "-static", "-no-pie", "-I", ROOT / "include",
                    ROOT / "bench/decode_step.cpp", build / "lib/liblowkv.a", "-o", program], check=True)
    machine = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True, check=True)
    return machine.stdout.split("-")[0]


def functions(program, implementation):
    """First address, last address and name of each of the implementation's functions, in order."""
    listed = subprocess.run(["nm", "-C", "-S", program], capture_output=True, text=True, check=True).stdout
    found = []
    for line in listed.splitlines():
        match = re.match(r"(\w+) (\w+) [tTwW] (?:void )?lowkv::kernels::" + implementation + r"::(.*)\(lowkv::", line)
        if match:
            first = int(match.group(1), 16)
            name = re.sub(r"lowkv::(kernels::\w+::)?|<&.*", "", match.group(3))
            name = re.sub(r"\((\w+)\)(\d+)", r"\1 \2", name).replace("u>", ">")
            found.append((first, first + int(match.group(2), 16) - 1, name))
    return sorted(set(found))


def count(cpu, program, implementation, places, options, scheme, tokens):
    """Instructions executed, by function."""
    with tempfile.NamedTemporaryFile() as log:
        ranges = ",".join(f"{first:#x}..{last:#x}" for first, last, _ in places)
        command = [f"qemu-{cpu}", "-cpu", "max", "-singlestep", "-d", "exec,nochain", "-D", log.name, "-dfilter",
                   ranges, program, scheme, options.head_dim, str(tokens), options.rows]
        ran = subprocess.run(command, capture_output=True, text=True,
                             env={**os.environ, "LOWKV_IMPLEMENTATION": implementation})
        if ran.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))}: {ran.stderr.strip()}")
        executed = EXECUTED.findall(Path(log.name).read_bytes())
    starts = [first for first, _, _ in places]
    names = collections.Counter()
    for address in executed:
        names[places[bisect.bisect(starts, int(address, 16)) - 1][2]] += 1
    return names


def main():
    options = arguments()
    print("| implementation | scheme | kernel | instructions |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for argument in options.builds:
            build, _, implementation = argument.rpartition(":")
            program = Path(folder) / "decode_step"
            cpu = link(Path(build), program)
            places = [place for place in functions(program, implementation)
                      if not re.search(r"encode_|decode_sorted|SortedEncoder|fit_group|to_f16", place[2])]
            for scheme in options.schemes.split(","):
                short, long = (count(cpu, program, implementation, places, options, f"{scheme},window=0", tokens)
                               for tokens in (SHORT, LONG))
                for name, instructions in (long - short).most_common():
                    per_16 = instructions * 16 / (LONG - SHORT)
                    if per_16 >= LEAST:
                        print(f"| {implementation} | {scheme} | `{name}` | {per_16:.0f} |", flush=True)


main()
