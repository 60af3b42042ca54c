#!/usr/bin/env python3
"""Which lines and branches of the product `make test` runs, by room: a table, and what never ran in a folder.

    make coverage                     builds, tests, prints the table (an hour)
    tests/covered.py --missing src/cache plugins/llama.cpp      the lines and branches there that never ran

build/coverage/report.html shows all of them. A line counts if the compiler made code of it, in a header once however
many programs include it. A branch is a way out of a condition, without those that only an exception takes; those of a
template count for each type that it is made for."""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "deps"))
from house import LINES, PRODUCT, room_of_product  # noqa: E402

BUILD = ROOT / "build/coverage"
CPP, PYTHON = BUILD / "cpp.json", BUILD / "python.json"


def collect():
    """Reads what the runs counted, C++ by gcovr, Python by coverage.py."""
    gcovr = [sys.executable, "-m", "gcovr", "--root", ROOT, "--merge-mode-functions=merge-use-line-min"]
    rooms = [word for name in PRODUCT if (ROOT / name).is_dir() for word in ("--filter", f"{name}/")]
    parts = []
    for build in (BUILD, ROOT / "build/python-coverage/cmake"):  # from where the compiler ran, as sources are named
        parts.append(BUILD / f"cpp-{build.name}.json")
        subprocess.run([*gcovr, "--exclude-throw-branches", "--exclude-unreachable-branches", *rooms, "--exclude",
                        ".*/tests/.*", "--exclude-directories", ".*/CompilerId.*", "--gcov-ignore-parse-errors=all",
                        "-j", "2", "--gcov-object-directory", build, "--json", parts[-1], build], cwd=ROOT, check=True)
    both = [word for part in parts for word in ("--add-tracefile", part)]
    subprocess.run([*gcovr, *both, "--json", CPP, "--html-details", BUILD / "report.html"], cwd=ROOT, check=True)
    subprocess.run([sys.executable, "-m", "coverage", "json", "--quiet", "--ignore-errors", "--data-file",
                    BUILD / ".coverage", "-o", PYTHON], cwd=BUILD, check=True)


class Counts:
    """What ran and what did not, of one file: lines, and branches by their line."""

    def __init__(self):
        self.lines, self.branches = {}, defaultdict(list)

    def missing(self):
        for line in sorted(set(self.lines) | set(self.branches)):
            if not self.lines.get(line, True):
                yield line, "never ran"
            elif not all(self.branches[line]):
                yield line, f"{self.branches[line].count(False)} of {len(self.branches[line])} branches"


def read():
    """Counts by path."""
    found = defaultdict(Counts)
    for file in json.loads(CPP.read_text())["files"]:
        counts = found[file["file"]]
        for line in file["lines"]:
            number = line["line_number"]
            counts.lines[number] = counts.lines.get(number, False) or line["count"] > 0
            counts.branches[number] += [branch["count"] > 0 for branch in line["branches"]]
    for name, file in json.loads(PYTHON.read_text())["files"].items():
        counts = found["python/lowkv/" + name.split("/lowkv/", 1)[1]]
        counts.lines = dict.fromkeys(file["executed_lines"], True) | dict.fromkeys(file["missing_lines"], False)
        for known, ran in (("executed_branches", True), ("missing_branches", False)):
            for line, _ in file[known]:
                counts.branches[line].append(ran)
    return found


def table(found):
    rooms = defaultdict(lambda: [0, 0, 0, 0])
    for path, counts in found.items():
        branches = [ran for line in counts.branches.values() for ran in line]
        for name in (room_of_product(path), "all"):
            room = rooms[name]
            for at, number in enumerate((sum(counts.lines.values()), len(counts.lines), sum(branches), len(branches))):
                room[at] += number
    yield "| room | lines | of them run | branches | of them run |\n|---|--:|--:|--:|--:|"
    for name in [*LINES, "all"]:
        if name in rooms:
            ran, lines, taken, branches = rooms[name]
            yield f"| {name} | {lines:,} | {ran / lines:.1%} | {branches:,} | {taken / max(branches, 1):.1%} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collect", action="store_true", help="read what the runs of `make coverage` counted")
    parser.add_argument("--missing", nargs="+", metavar="FOLDER", help="print what never ran there, not the table")
    options = parser.parse_args()
    if options.collect:
        collect()
    if not (CPP.exists() and PYTHON.exists()):
        parser.error("nothing is counted yet: run `make coverage`")
    found = read()
    if not options.missing:
        print(*table(found), sep="\n")
    for path in sorted(found) if options.missing else ():
        if path.startswith(tuple(options.missing)):
            text = (ROOT / path).read_text().splitlines()
            for line, what in found[path].missing():
                print(f"{path}:{line}: {what}: {text[line - 1].strip()}")


if __name__ == "__main__":
    main()
