#!/usr/bin/env python3
"""What each scheme loses on a real model: the figures, tables and pictures of docs/quality.

    make quality                                   everything; goes on where it was stopped
    eval/quality.py --quick                        a few schemes in a minute, into build/quality-quick
    eval/quality.py --only table,fit               some sections
    eval/quality.py --schemes lowkv2,kivi2         these of the table's, and the table drawn with them
    eval/quality.py --redraw                       tables and pictures from the CSV, nothing measured

Every figure comes from `lowkv compare`: the model reads the text through the real llama.cpp plug-in,
--chunk tokens at a time, once with the scheme `exact` and once with each other scheme, and at each
position after --skip the two predictions are set against each other.

  perplexity change   how much worse the right next token is predicted; it can fall by chance
  mean KLD            how far the whole prediction moved (Kullback-Leibler divergence, nats): the
                      figure to trust, since it can't cancel out
  99.9 % KLD          the same for the worst position in a thousand
  top-1               how often the likeliest token stays the same

The model's weights are dequantized to f16 first (eval/weights.py says why). A chunk of 32 is as near to
decoding token by token as is affordable: a chunk sees itself exactly, so chunks of 512, as in a real
prefill, would hide most of the loss.

Results go to OUT/quality.csv, one line per scheme and setting, with the fingerprints of plug-in, model
and text. A line whose fingerprints and settings agree is not measured again; the tables read the line of
a scheme from whichever build measured it last.
"""

import argparse
from pathlib import Path

import measuring
import quality_plots
import quality_schemes as schemes
import quality_tables
from paths import ROOT, fingerprint, set_up_paths

OTHERS = ["layers"]  # sections that no `lowkv compare` measures


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    measuring.add_options(parser, jobs=2)
    parser.add_argument("--out", type=Path, help="default: docs/quality")
    parser.add_argument("-m", "--model", help="default: the model of the set-up")
    parser.add_argument("-f", "--file", help="the text; default: the set-up's handbook")
    parser.add_argument("--only", default=",".join([*schemes.SECTIONS, *OTHERS]),
                        help="sections, default %(default)s")
    parser.add_argument("--schemes", help="measure these alone, for the table")
    parser.add_argument("--windows", default=2, type=int)
    parser.add_argument("--tokens", default=2048, type=int)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    args.only = args.only.split(",")
    unknown = set(args.only) - set(schemes.SECTIONS) - set(OTHERS)
    if unknown:
        parser.error(f"--only {','.join(sorted(unknown))}: the sections are "
                     f"{', '.join([*schemes.SECTIONS, *OTHERS])}")
    if args.quick:
        args.windows, args.tokens = 1, 1024
        args.schemes = args.schemes or ",".join(schemes.QUICK)
    if args.schemes:
        args.only = ["table"]
    args.out = args.out or ROOT / ("build/quality-quick" if args.quick else "docs/quality")
    paths = set_up_paths()
    args.model = args.model or paths["LOWKV_MODEL"]
    args.file = args.file or paths["LOWKV_HANDBOOK_TEXT"]
    args.bible = paths.get("LOWKV_BIBLE_TEXT")
    return args


def main():
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    plugin = fingerprint(args.build / "lib/libggml-lowkv.so")
    results = measuring.Results(args.out / "quality.csv", plugin)
    usual = measuring.usual(args)
    sections = [name for name in args.only if name not in OTHERS]
    if not args.redraw:
        plan = [pair for name in sections for pair in schemes.SECTIONS[name]]
        if args.schemes:
            plan = schemes.plain(args.schemes.split(","))
        measuring.measure(args, results, [(scheme, usual | changed) for scheme, changed in plan])
        if "layers" in args.only:
            measuring.measure_layers(args, args.out / "layers.json")

    def find(scheme, **changed):
        return results.find(scheme, usual | changed)

    if "table" in sections:
        more = args.schemes.split(",") if args.schemes else []
        quality_tables.main_table(args.out, find, more)
        if args.out == ROOT / "docs/quality":
            quality_tables.fill_command(find)
    quality_tables.draw(args.out, sections, find)
    quality_plots.draw(args.out, sections, find)
    if "layers" in args.only:
        quality_plots.layers(args.out)


if __name__ == "__main__":
    main()
