#!/usr/bin/env python3
"""The house's bars: what includes what, and how much of the product there is, by room. CI runs it.

A folder of src/ includes those before it in ROOMS only; the core includes no guest, and devices nothing of src/;
src/isa and src/kernels reach the cache by no path of includes. A room has at most so many lines (LINES) and tokens: a
bar in lines alone is met by a wider page. A room's bar rises only in a change that lowers another by as much: their
sum may not exceed that of the commit in .ci/landed. Whoever needs less writes the new number here."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("", "scheme", "codec", "isa", "quantizers", "kernels", "plan", "attention", "cpu", "cache", "c")
# Rooms of the product: where the longest of these paths that a file's begins with is.
PRODUCT = {
    "include": "core", "platform": "core", "src": "core",
    "guests": "guests", "cli/calibrate": "guests",
    "devices": "devices", "include/lowkv/cuda.h": "devices", "include/lowkv/opencl.h": "devices",
    "python/cuda": "devices",
    "plugins": "llama.cpp", "python/lowkv/llama_cpp.py": "llama.cpp",
    "python": "transformers",
    "python/lowkv/vllm": "vLLM", "python/src/paged.cpp": "vLLM", "python/src/openmp.cpp": "vLLM",
    "python/extras": "extras",
    "cli": "command",
    "bench/kernels": "benchmarks",
}
GUESTS_INCLUDE = sorted(path.relative_to(ROOT) for path in (ROOT / "guests").glob("*/include"))
LINES = {"core": 13195, "devices": 6155, "llama.cpp": 5480, "transformers": 2396, "vLLM": 673,
         "command": 5368, "guests": 3469, "extras": 132, "benchmarks": 490}
TOKENS = 463844
BARS = {"files of the product under 30 lines": 45, "files of the product over 400 lines": 0,
        "public headers of the core": 24, "includes of what comes after": 0,
        "parts of the plug-in in a circle of includes": 0}
CORE = ("include", "platform", "src", "devices")  # whose includes are checked
# What a folder's sources may not reach, not even through other headers.
CACHE = ("attention", "batch", "cache", "device", "kv_cache", "paged", "serial")
BEYOND = {f"src/{name}": {*(f"include/lowkv/{header}.h" for header in CACHE), "src/attention", "src/cpu", "src/cache"}
          for name in ("isa", "kernels")}


def product():
    """Its files: their paths and their lines."""
    listed = subprocess.run(["git", "ls-files", *PRODUCT], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        path = Path(name)
        is_test = path.parts[0] == "guests" and "tests" in path.parts
        if path.suffix in (".h", ".hpp", ".cpp", ".cu", ".py") and (ROOT / path).exists() and not is_test:
            yield path, (ROOT / path).read_text().splitlines()


def counts(line):
    """Whether it is more than a blank, a comment or a preprocessor's line."""
    return not (line.strip() or "#").startswith(("//", "#", "*"))


def room(path):
    return path.parts[1] if len(path.parts) > 2 else ""


def included(lines):
    """The files of ours that a source includes."""
    for line in lines:
        found = re.match(r'#include "([^"]+)"', line)
        for folder in (Path("include"), Path("src"), Path("guests"), *GUESTS_INCLUDE) if found else ():
            if (ROOT / folder / found[1]).is_file():
                yield folder / found[1]


def reached(path, known):
    """What a file includes, and what that includes."""
    if path not in known:
        known[path] = set()
        for other in included((ROOT / path).read_text().splitlines()):
            known[path] |= {other} | reached(other, known)
    return known[path]


def upward(path, lines, known):
    """A source's includes of what comes after it."""
    if path.parts[0] not in CORE:
        return
    if path.parts[0] == "src" and room(path) not in ROOMS:
        yield f"{path}: src/{room(path)} is not in ROOMS of deps/house.py"
        return
    for other in included(lines):
        if other.parts[0] == "guests":
            yield f"{path} includes {other}: guests include the core, not the other way round"
        elif path.parts[0] == "devices" and other.parts[0] == "src":
            yield f"{path} includes {other}, which a device from outside can't"
        elif other.parts[0] == path.parts[0] == "src" and ROOMS.index(room(other)) > ROOMS.index(room(path)):
            yield f"{path} includes {other}: src/{room(other)} comes after src/{room(path)}"
    for other in reached(path, known):
        folders = {str(other), *map(str, other.parents)}
        if folders & BEYOND.get(f"{path.parts[0]}/{room(path)}", set()):
            yield f"{path} reaches {other}, by its own includes or others'"


def circle(files):
    """The parts of plugins/llama.cpp, each a header and the source of its name, that include each other in a circle."""
    needs = {}
    for path, lines in files:
        if path.parts[:2] == ("plugins", "llama.cpp"):
            found = (re.match(r'#include "(\w+)\.h"', line) for line in lines)
            needs.setdefault(path.stem, set()).update(match[1] for match in found if match and match[1] != path.stem)
    while leaves := [part for part, others in needs.items() if not others & needs.keys()]:
        for part in leaves:
            del needs[part]
    while roots := [part for part in needs if not any(part in others for others in needs.values())]:
        for part in roots:
            del needs[part]
    return sorted(needs)


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
    known = {}
    wrong = [text for path, lines in files for text in upward(path, lines, known)]
    counted = [(path, [line for line in lines if counts(line)]) for path, lines in files]
    found = {f"lines of {name}": sum(len(lines) for path, lines in counted if room_of_product(path) == name)
             for name in LINES}
    found |= {
        "tokens": sum(len(re.findall(r"\w+|[^\w\s]", line.split(" // ")[0]))
                      for _, lines in counted for line in lines),
        "files of the product under 30 lines": sum(len(lines) < 30 for _, lines in files),
        "files of the product over 400 lines": sum(len(lines) > 400 for _, lines in files),
        "public headers of the core": sum(path.parts[:2] == ("include", "lowkv") for path, _ in files),
        "includes of what comes after": len(wrong),
        "parts of the plug-in in a circle of includes": len(circle(files)),
    }
    bars = {f"lines of {name}": bar for name, bar in LINES.items()} | {"tokens": TOKENS} | BARS
    landed = landed_lines()
    if landed is not None:
        found["lines of all rooms' bars"], bars["lines of all rooms' bars"] = sum(LINES.values()), landed
    print("\n".join([*wrong, *circle(files)]), end="\n" if wrong or circle(files) else "")
    for name, count in found.items():
        print(f"{'FAILED' if count > bars[name] else 'ok':6} {name}: {count:,} (at most {bars[name]:,})")
    print(f"lines of the product: {sum(len(lines) for _, lines in counted):,}")
    return any(count > bars[name] for name, count in found.items())


if __name__ == "__main__":
    sys.exit(main())
