#!/usr/bin/env python3
"""Runs the fuzz targets, so many seconds each, and says what each did. The corpus of a target stays in the cache, and
the next run starts from it. Input that made a target fail is saved in the folder `findings` there; `TARGET FILE` runs
the target on it again."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
# More of a file is more of the same; more of time or memory is out of proportion to it.
LIMITS = ("-max_len=98304", "-timeout=20", "-rss_limit_mb=3000", "-malloc_limit_mb=256")


class Target(NamedTuple):
    name: str
    command: list


class Result(NamedTuple):
    executions: int
    edges: tuple  # reached before and after the run
    files: tuple  # in the corpus before and after the run
    finding: str  # the file with the input that failed; empty if none did


def targets(build, python):
    """Those in C++, and those in Python where an environment for them is given."""
    for source in sorted(HERE.glob("*.cpp")):
        yield Target(source.stem, [str(build / "bin" / f"fuzz_{source.stem}")])
    for source in sorted((HERE / "python").glob("*.py")) if python else ():
        if source.stem != "target":
            yield Target(source.stem, [python, str(source)])


def environment():
    """The tests' own settings: leaks are findings, and nothing of the caller's decides what a target does."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOWKV_", "LLAMA_"))}
    return {**kept, "ASAN_OPTIONS": "detect_leaks=1:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1", "OMP_NUM_THREADS": "1"}


def number(pattern, text, which):
    found = re.findall(pattern, text)
    return int(found[which]) if found else 0


def run(target, seconds, cache):
    corpus, findings = cache / target.name, cache / "findings" / target.name
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    before = len(list(corpus.iterdir()))
    with tempfile.TemporaryDirectory() as seeds, tempfile.TemporaryFile("w+", errors="replace") as log:
        subprocess.run([*target.command, "--seeds", seeds], env=environment(), check=True)
        done = subprocess.run([*target.command, str(corpus), seeds, *LIMITS, f"-max_total_time={seconds}",
                               f"-artifact_prefix={findings}/", "-print_final_stats=1"],
                              env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
        log.seek(0)
        text = log.read()
    finding = ""
    if done.returncode != 0:
        print(text[-6000:], flush=True)
        finding = (re.findall(r"Test unit written to (\S+)", text) or [f"exit status {done.returncode}"])[-1]
    return Result(number(r"stat::number_of_executed_units: (\d+)", text, -1) or number(r"#(\d+)\s", text, -1),
                  (number(r"INITED cov: (\d+)", text, 0), number(r" cov: (\d+)", text, -1)),
                  (before, len(list(corpus.iterdir()))), finding)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="*", help="only these")
    parser.add_argument("--build", type=Path, required=True, help="the build folder of the preset fuzz")
    parser.add_argument("--python", help="an interpreter with atheris and the package, for the targets in Python")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--corpus", type=Path, help="default: ~/.cache/lowkv/fuzz-corpus",
                        default=Path(os.environ.get("LOWKV_CACHE_DIR", Path.home() / ".cache/lowkv")) / "fuzz-corpus")
    arguments = parser.parse_args()
    known = list(targets(arguments.build.resolve(), arguments.python))
    unknown = set(arguments.target) - {target.name for target in known}
    if unknown:
        parser.error(f"no target {', '.join(sorted(unknown))}; there are: {', '.join(t.name for t in known)}")
    results = {}
    for target in known:
        if arguments.target and target.name not in arguments.target:
            continue
        print(f"==== {target.name}, {arguments.seconds} s", flush=True)
        results[target.name] = run(target, arguments.seconds, arguments.corpus)
    print(f"{'target':14} {'executions':>11} {'edges':>15} {'corpus':>13}  finding")
    for name, result in results.items():
        edges, files = (" -> ".join(map(str, pair)) for pair in (result.edges, result.files))
        print(f"{name:14} {result.executions:11,} {edges:>15} {files:>13}  {result.finding or 'none'}")
    return any(result.finding for result in results.values())


if __name__ == "__main__":
    sys.exit(main())
