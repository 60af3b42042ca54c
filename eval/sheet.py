"""What several scripts of eval/ need: a CSV that remembers what was measured, and another environment to measure in."""

import argparse
import csv
import os
import subprocess
import sys
from pathlib import Path

import paths

csv.field_size_limit(1 << 24)  # answers of thousands of tokens


class Sheet:
    """Rows of a CSV, each under its values of `key`: read once, written whole after each measurement."""

    def __init__(self, path: Path, key: list[str], columns: list[str]):
        self.path, self.key, self.columns = path, key, [*key, *columns]
        self.rows = {}
        if path.exists():
            with path.open(newline="") as file:
                self.rows = {tuple(row[k] for k in key): row for row in csv.DictReader(file)}

    def get(self, *key) -> dict:
        """The row, or an empty one."""
        return self.rows.get(tuple(map(str, key)), {})

    def add(self, **row) -> None:
        row = {name: str(value) for name, value in row.items()}
        self.rows[tuple(row[k] for k in self.key)] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".part")
        with unfinished.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows.values())
        unfinished.replace(self.path)

    def select(self, **values) -> list[dict]:
        return [row for row in self.rows.values() if all(row[k] == str(v) for k, v in values.items())]


RECOMMENDED = ["lowkv4", "lowkv3", "lowkv2.8", "lowkv2", "lowkv1.5"]  # what `lowkv schemes` lists first, less lowkv2.6


def schemes_of(text: str) -> list[str]:
    """Schemes separated by commas, whose own commas are written +, as the command has it."""
    return [scheme.replace("+", ",") for scheme in text.split(",")]


def measuring_parser(description: str) -> argparse.ArgumentParser:
    """With the options of a script that measures through the Python package."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--package", type=Path, default=paths.ROOT / "build/python/site", help="where lowkv is installed")
    made.add_argument("--out", type=Path, default=paths.ROOT / "docs/quality")
    made.add_argument("--measuring", action="store_true", help=argparse.SUPPRESS)  # in an environment with torch
    return made


def again_with_torch(package: Path, beside: str = "") -> int:
    """Runs this script once more, with --measuring, where torch, transformers and the package are, and the set-up's
    packages that the variable `beside` names. Its status."""
    if not list(package.glob("lowkv/_core*.so")):
        sys.exit(f"there is no Python package in {package}: `make package` builds it")
    found = paths.set_up_paths()
    if beside and beside not in found:
        part = beside.removeprefix("LOWKV_").lower().replace("_", "-")
        sys.exit(f"python3 deps/setup.py {part} fetches what is missing")
    path = os.pathsep.join([str(package.resolve()), *([found[beside]] if beside else [])])
    python = found["LOWKV_TRANSFORMERS_PYTHON"]
    return subprocess.run([python, sys.argv[0], "--measuring", *sys.argv[1:]],
                          env=os.environ | {"PYTHONPATH": path}, check=False).returncode


def library(package: Path) -> str:
    """The fingerprint of the package's own code."""
    return paths.fingerprint(next(package.glob("lowkv/_core*.so")))
