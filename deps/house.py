#!/usr/bin/env python3
"""The house's bars: what includes what in src/, and how much of the product there is, by room. CI runs it.

A folder of src/ includes those before it in ROOMS only. A room has at most so many lines (LINES) and tokens: a bar in
lines alone is met by a wider page. A room's bar rises only in a change that lowers another by as much: their sum may
not exceed that of the commit in .ci/landed. Whoever needs less writes the new number here."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("", "scheme", "codec", "isa", "quantizers", "kernels", "plan", "attention", "cpu", "cache", "filters",
         "calibration", "c")
# Rooms of the product: where the longest of these paths that a file's begins with is.
PRODUCT = {
    "include": "core", "platform": "core", "src": "core",
    "include/lowkv/filter.h": "guests", "include/lowkv/calibrate.h": "guests", "include/lowkv/calibration.h": "guests",
    "include/lowkv/calibration_file.h": "guests", "src/quantizers/row/": "guests", "src/kernels/body/row_": "guests",
    "src/filters": "guests", "src/calibration": "guests", "cli/calibrate": "guests",
    "devices": "devices", "include/lowkv/cuda.h": "devices", "include/lowkv/opencl.h": "devices",
    "python/cuda": "devices",
    "plugins": "llama.cpp", "python/lowkv/llama_cpp.py": "llama.cpp",
    "python": "transformers",
    "python/lowkv/vllm": "vLLM and LMCache", "python/src/paged.cpp": "vLLM and LMCache",
    "python/src/openmp.cpp": "vLLM and LMCache", "python/lowkv/lmcache.py": "vLLM and LMCache",
    "cli": "command",
    "bench/kernels": "benchmarks",
}
LINES = {"core": 13630, "devices": 6181, "llama.cpp": 5258, "transformers": 2664, "vLLM and LMCache": 853,
         "command": 5826, "guests": 3712, "benchmarks": 716}
TOKENS = 482424
BARS = {"files of the product under 30 lines": 48, "files of the product over 400 lines": 0,
        "public headers": 25, "upward includes": 0}


def product():
    """Its files: their paths and their lines."""
    listed = subprocess.run(["git", "ls-files", *PRODUCT], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        path = Path(name)
        if path.suffix in (".h", ".hpp", ".cpp", ".cu", ".py") and (ROOT / path).exists():
            yield path, (ROOT / path).read_text().splitlines()


def counts(line):
    """Whether it is more than a blank, a comment or a preprocessor's line."""
    return not (line.strip() or "#").startswith(("//", "#", "*"))


def room(path):
    return path.parts[1] if len(path.parts) > 2 else ""


def upward(path, lines):
    """A source's includes of rooms that come after its own."""
    if path.parts[0] != "src":
        return
    if room(path) not in ROOMS:
        yield f"{path}: src/{room(path)} is not in ROOMS of deps/house.py"
        return
    for line in lines:
        found = re.match(r'#include "([^"]+)"', line)
        if found and (ROOT / "src" / found[1]).is_file():
            other = room(Path("src") / found[1])
            if ROOMS.index(other) > ROOMS.index(room(path)):
                yield f"{path} includes {found[1]}: src/{other} comes after src/{room(path)}"


def room_of_product(path):
    return PRODUCT[max((name for name in PRODUCT if str(path).startswith(name)), key=len)]


def landed_lines():
    """The sum of LINES in the commit in .ci/landed; None where this clone lacks it, or the commit has no LINES."""
    commit = (ROOT / ".ci/landed").read_text().strip()
    shown = subprocess.run(["git", "show", f"{commit}:deps/house.py"], cwd=ROOT, capture_output=True, text=True,
                           check=False)
    for statement in ast.parse(shown.stdout).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "LINES":
            return sum(ast.literal_eval(statement.value).values())
    return None


def main():
    files = list(product())
    wrong = [text for path, lines in files for text in upward(path, lines)]
    counted = [(path, [line for line in lines if counts(line)]) for path, lines in files]
    found = {f"lines of {name}": sum(len(lines) for path, lines in counted if room_of_product(path) == name)
             for name in LINES}
    found |= {
        "tokens": sum(len(re.findall(r"\w+|[^\w\s]", line.split(" // ")[0]))
                      for _, lines in counted for line in lines),
        "files of the product under 30 lines": sum(len(lines) < 30 for _, lines in files),
        "files of the product over 400 lines": sum(len(lines) > 400 for _, lines in files),
        "public headers": sum(path.parts[:2] == ("include", "lowkv") for path, _ in files),
        "upward includes": len(wrong),
    }
    bars = {f"lines of {name}": bar for name, bar in LINES.items()} | {"tokens": TOKENS} | BARS
    landed = landed_lines()
    if landed is not None:
        found["lines of all rooms' bars"], bars["lines of all rooms' bars"] = sum(LINES.values()), landed
    print("\n".join(wrong), end="\n" if wrong else "")
    for name, count in found.items():
        print(f"{'FAILED' if count > bars[name] else 'ok':6} {name}: {count:,} (at most {bars[name]:,})")
    print(f"lines of the product: {sum(len(lines) for _, lines in counted):,}")
    return any(count > bars[name] for name, count in found.items())


if __name__ == "__main__":
    sys.exit(main())
