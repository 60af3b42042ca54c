#!/usr/bin/env python3
"""The house's bars: what includes what in src/, and how much of the product there is. CI runs it.

A folder of src/ includes those before it in ROOMS only. The other bars are numbers that may fall but not rise: whoever
lowers one writes the new number here."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("", "scheme", "codec", "isa", "quantizers", "kernels", "plan", "attention", "cpu", "cache", "filters",
         "calibration", "c")
PRODUCT = ("include", "platform", "src", "python", "plugins", "cli", "devices")
# Of the lines 2,000 are attention on tensor cores (devices/tensor/, with its host's side), 360 a trellis' search in 16
# bits and encoding by instruction set, 170 weights on other devices (cli/common/program_weights.cpp), 220 shifts of
# packed keys (plugins/llama.cpp/layer_shift.cpp), 440 a budget of memory (buffer_budget.cpp, tiers of packed rows), 280
# the same in transformers (src/cache/batch_budget.cpp, attention to several plans, python/lowkv/budget.py), 180
# hybrid models in transformers (states.py), 620 codes in saved states and files with holes (layer_codes.cpp,
# cli/common/saved_states.h), 470 Windows (platform/, cli/platform/), 250 advice on schemes (cli/common/advice.cpp), 290
# a program's weights and cache proved layer by layer, and shares of devices (cli/doctor/program_check.cpp), 130 a
# prompt's later chunks by torch on GPUs (python/lowkv/rows_attention.py) and blocks' addresses found by segment, 190
# rows that are key and value at once (Shape::value_dim), 100 attention's shares on a GPU (devices/host/tensor.cpp), 75
# rows of many blocks in a launch (devices/host/row_runs.h), 165 caches of llama.cpp on devices
# (plugins/llama.cpp/devices.cpp) and what made them practical there: sixteen buffers, masks that begin with zeros; and
# 180 what reviews found missing: the plug-in's own mark in a program's log (cli/run/watcher.cpp), cores by
# affinity, orders of channels looked at before they are loaded, keys and values written as one, more models served.
BARS = {"product lines": 39902, "files of the product under 30 lines": 49, "files of the product over 400 lines": 0,
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


def main():
    files = list(product())
    wrong = [text for path, lines in files for text in upward(path, lines)]
    folders = {name: sum(counts(line) for path, lines in files if path.parts[0] == name for line in lines)
               for name in PRODUCT}
    found = {
        "product lines": sum(folders.values()),
        "files of the product under 30 lines": sum(len(lines) < 30 for _, lines in files),
        "files of the product over 400 lines": sum(len(lines) > 400 for _, lines in files),
        "public headers": sum(path.parts[:2] == ("include", "lowkv") for path, _ in files),
        "upward includes": len(wrong),
    }
    print(", ".join(f"{name} {count:,}" for name, count in folders.items()))
    print("\n".join(wrong), end="\n" if wrong else "")
    for name, count in found.items():
        print(f"{'FAILED' if count > BARS[name] else 'ok':6} {name}: {count:,} (at most {BARS[name]:,})")
    return any(count > BARS[name] for name, count in found.items())


if __name__ == "__main__":
    sys.exit(main())
