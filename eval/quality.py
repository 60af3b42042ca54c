#!/usr/bin/env python3
"""What each scheme loses on a real model: the figures, tables and pictures of docs/quality.md.

    make quality                                   everything; goes on where it was stopped
    eval/quality.py --quick                        a few schemes in a minute, into build/quality-quick
    eval/quality.py --only table,fit --windows 4   some sections, more windows
    eval/quality.py --redraw                       tables and pictures from the CSV, nothing measured

Every figure comes from `lowkv compare`: the model reads the text through the real llama.cpp plug-in,
--chunk tokens at a time, once with the scheme `exact` and once with each other scheme, and at each
position after --skip the two predictions are set against each other.

  perplexity change   how much worse the right next token is predicted; it can fall by chance
  mean KLD            how far the whole prediction moved (Kullback-Leibler divergence, nats): the
                      figure to trust, since it can't cancel out
  99.9 % KLD          the same for the worst position in a thousand
  top-1               how often the likeliest token stays the same

A chunk of 32 is as near to decoding token by token as is affordable: a chunk sees itself exactly, so
chunks of 512, as in a real prefill, would hide most of the loss.

Results go to OUT/quality.csv, one line per scheme and setting, with the fingerprints of plug-in, model
and text. A line whose fingerprints and settings agree is not measured again.
"""

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import passkey
import quality_plots
import quality_schemes as schemes
from paths import ROOT, fingerprint, set_up_paths

CALIBRATION_BYTES = 400_000

KEY = ["scheme", "windows", "tokens", "chunk", "skip", "plugin", "model", "text"]
FIGURES = ["bits", "perplexity", "perplexity_change_percent", "mean_kld", "mean_kld_error",
           "kld_p999", "same_top1", "kv_bytes"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=Path)
    parser.add_argument("--out", type=Path, help="default: docs/quality")
    parser.add_argument("-m", "--model", help="default: the model of the set-up")
    parser.add_argument("-f", "--file", help="the text; default: the set-up's handbook")
    parser.add_argument("--only", default=",".join([*schemes.SECTIONS, "passkey"]),
                        help="sections, default %(default)s")
    parser.add_argument("--schemes", help="measure these instead of the sections' schemes")
    parser.add_argument("--windows", default=2, type=int)
    parser.add_argument("--table-windows", type=int,
                        help="windows of the main table; default: as many as --windows")
    parser.add_argument("--tokens", default=2048, type=int)
    parser.add_argument("--chunk", default=32, type=int)
    parser.add_argument("--skip", default=256, type=int)
    parser.add_argument("--batch", default=8, type=int,
                        help="schemes of one run; each run repeats `exact` (default %(default)s)")
    parser.add_argument("--threads", default=min(os.cpu_count() or 1, 2), type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--redraw", action="store_true")
    args = parser.parse_args()
    args.only = args.only.split(",")
    unknown = set(args.only) - set(schemes.SECTIONS) - {"passkey"}
    if unknown:
        parser.error(f"--only {','.join(sorted(unknown))}: the sections are "
                     f"{', '.join(schemes.SECTIONS)}, passkey")
    if args.quick:
        args.windows, args.tokens, args.only = 1, 1024, ["table"]
        args.schemes = args.schemes or ",".join(schemes.QUICK)
    args.table_windows = args.table_windows or args.windows
    args.build = args.build.resolve()
    args.out = args.out or ROOT / ("build/quality-quick" if args.quick else "docs/quality")
    paths = set_up_paths()
    args.model = args.model or paths["LOWKV_MODEL"]
    args.file = args.file or paths["LOWKV_HANDBOOK_TEXT"]
    return args


class Results:
    """The CSV: read once, written whole after each run."""

    def __init__(self, path):
        self.path = path
        self.rows = {}
        if path.exists():
            with open(path, newline="") as file:
                for row in csv.DictReader(file):
                    self.rows[tuple(row[k] for k in KEY)] = row

    def add(self, row):
        self.rows[tuple(str(row[k]) for k in KEY)] = {k: str(v) for k, v in row.items()}

    def ignore_plugin(self, plugin):
        latest = {}
        for row in self.rows.values():
            latest[tuple(plugin if k == "plugin" else row[k] for k in KEY)] = row
        self.rows = latest

    def save(self):
        unfinished = self.path.with_suffix(".part")
        with open(unfinished, "w", newline="") as file:
            writer = csv.DictWriter(file, KEY + FIGURES, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows.values())
        unfinished.replace(self.path)

    def find(self, scheme, setting):
        """The figures as numbers, or None where this was not measured."""
        row = self.rows.get((scheme, *(str(setting[k]) for k in KEY[1:])))
        return row and {"scheme": scheme} | {k: float(row[k]) for k in FIGURES}


def bits(args, scheme):
    """Bits per element at head_dim 64, all metadata counted: `lowkv schemes` says them."""
    if scheme in schemes.STOCK_BITS:
        return schemes.STOCK_BITS[scheme]
    text = subprocess.check_output(
        [args.build / "bin/lowkv", "schemes", scheme.replace("+", ",")], text=True)
    # With per-layer overrides this is the base: the override's layers are counted in kv_bytes only.
    return float(re.search(r"^\| 64 .*\| +([\d.]+) \|$", text, re.M)[1])


def calibration(args, preset):
    """The file of a preset that needs one, made on the end of the text, which no window reaches."""
    folder = ROOT / "build/quality"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{preset}-{fingerprint(args.model)}.safetensors"
    if path.exists():
        return path
    text = folder / "calibration.txt"
    text.write_bytes(Path(args.file).read_bytes()[-CALIBRATION_BYTES:])
    print(f"calibrating {preset}", file=sys.stderr)
    subprocess.run([str(word) for word in (
        args.build / "bin/lowkv", "calibrate", "-m", args.model, "--text", text, "--scheme", preset,
        "--tokens", 4096, "-o", path)], check=True, stdout=subprocess.DEVNULL,
        env={"OMP_WAIT_POLICY": "passive"} | os.environ)
    return path


def compare(args, names, setting):
    """One `lowkv compare` over some schemes; its JSON."""
    stock = [n.removeprefix("stock ") for n in names if n in schemes.STOCK_BITS]
    own = [n for n in names if n not in schemes.STOCK_BITS and n != "exact"]
    presets = dict.fromkeys(n.split("+")[0] for n in own)
    calibrations = [str(calibration(args, p)) for p in presets if p in schemes.CALIBRATED]
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [args.build / "bin/lowkv", "compare", "-m", args.model, "-f", args.file,
                   "--schemes", ",".join(own) or "exact", "--stock", ",".join(stock) or "none",
                   "--windows", setting["windows"], "--tokens", setting["tokens"],
                   "--chunk", setting["chunk"], "--skip", setting["skip"],
                   "--threads", args.threads, "--no-speed", "--json", file.name]
        # A thread that waits for another lets go of its core: beside other work that is much faster.
        environment = {"OMP_WAIT_POLICY": "passive"} | os.environ | {
            "LOWKV_CALIBRATION": ":".join(calibrations)}
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL,
                       env=environment)
        rows = json.load(open(file.name))["rows"]
    # In the order asked for, `exact` first; compare spells schemes in its own way.
    return dict(zip(["exact", *own, *(f"stock {n}" for n in stock)], rows, strict=True))


def record(args, results, rows, setting):
    for scheme, row in rows.items():
        figures = {k: row[k] for k in FIGURES if k != "bits"}
        results.add({"scheme": scheme, **setting, "bits": bits(args, scheme), **figures})
    results.save()


def measure(args, results, plan):
    """Runs what the plan names and the CSV lacks, in batches."""
    todo = [(n, setting) for names, setting in plan for n in names
            if not results.find(n, setting)]
    todo = list({(n, setting["windows"]): (n, setting) for n, setting in todo}.values())
    total = sum(setting["windows"] for _, setting in todo)
    done, start = 0, time.monotonic()
    print(f"{len(todo)} schemes to measure", file=sys.stderr)
    while todo:
        setting = todo[0][1]
        batch = [n for n, s in todo if s == setting][:args.batch]
        record(args, results, compare(args, batch, setting), setting)
        todo = [(n, s) for n, s in todo if n not in batch or s != setting]
        done += len(batch) * setting["windows"]
        left = (time.monotonic() - start) / done * (total - done)
        print(f"{len(todo)} schemes to go, about {left / 60:.0f} minutes", file=sys.stderr)


def main():
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out / "quality.csv")
    setting = {"windows": args.windows, "tokens": args.tokens, "chunk": args.chunk,
               "skip": args.skip, "plugin": fingerprint(args.build / "lib/libggml-lowkv.so"),
               "model": fingerprint(args.model), "text": fingerprint(args.file)}
    if args.redraw and results.rows:
        # What was measured last of each scheme, whatever was built then and is built now.
        results.ignore_plugin(setting["plugin"])
    table_setting = setting | {"windows": args.table_windows}
    sections = {name: schemes.SECTIONS[name] for name in args.only if name != "passkey"}
    if args.schemes:
        sections = {"table": args.schemes.split(",")}
    if not args.redraw:
        measure(args, results, [(names, table_setting if section == "table" else setting)
                                for section, names in sections.items()])
        if "passkey" in args.only:
            passkey.measure(args.build, args.model, args.file, args.out / "passkey.csv",
                            setting["plugin"], args.threads)
    quality_plots.draw(args.out, sections, results, setting, table_setting)
    if "passkey" in args.only:
        passkey.draw(args.out)


if __name__ == "__main__":
    main()
