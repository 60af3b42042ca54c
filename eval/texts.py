#!/usr/bin/env python3
"""Does a scheme that is good on one text, one length and one model stay good on others?

    eval/texts.py                                     goes on where it was stopped
    eval/texts.py --schemes lowkv2,kivi2 --models smollm2 --texts code --contexts 2048
    eval/texts.py --only chunks                       the second section alone
    eval/texts.py --models my.gguf --out build/texts  a model of your own
    eval/texts.py --redraw                            tables and picture again, nothing measured

The set-up parts that it reads: python3 deps/setup.py text bible dialogue gemma

    prose      the Debian handbook                     code      llama.cpp's src/llama-sampler.cpp
    bible      the King James Bible                    dialogue  short exchanges (PyPI's chatterbot-corpus)

Like eval/quality.py it lets `lowkv compare` do the work: mean KLD, the worst position in a thousand and the same
likeliest token, against the scheme `exact`, one window of each text, weights in f16, 32 tokens at a time. Of a window
of 2,048 tokens positions from 256 on are counted, of a longer one its last 2,048: what a long past costs, without the
time that logits of all positions take. One scheme takes about 13 s at 2,048 tokens and 42 s at 8,192 on two cores, and
so does `exact` beside each --batch; with 8,192 tokens of two texts only (--long) five schemes take under half an hour.
The section `chunks` reads prose one token at a time instead, for the schemes of --chunk-1: a chunk sees itself exactly,
so chunks of 32 hide a part of what one-by-one decoding loses.

Writes OUT/texts.csv, a line for each measurement, and the tables of docs/quality/texts.md."""

import argparse
import sys
from itertools import product
from pathlib import Path

import measuring
import quality_plots
from paths import ROOT, fingerprint
from quality_tables import fill_documents, shown
from sheet import RECOMMENDED

TEXTS = {"prose": ("LOWKV_HANDBOOK_TEXT", ""), "code": ("LOWKV_LLAMA_SOURCE", "src/llama-sampler.cpp"),
         "bible": ("LOWKV_BIBLE_TEXT", ""), "dialogue": ("LOWKV_DIALOGUE_TEXT", "")}
SECTIONS = ["texts", "chunks"]
COUNTED = 2048  # the last positions of a longer window


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measuring.add_options(parser, jobs=1)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/quality")
    parser.add_argument("--schemes", default=",".join(RECOMMENDED),
                        help="a scheme's own commas are written + (default: %(default)s)")
    parser.add_argument("--chunk-1", default=",".join(RECOMMENDED[1:4]),
                        help="schemes that are read one token at a time too (default: %(default)s)")
    parser.add_argument("--models", default=",".join(measuring.MODELS),
                        help="of the set-up, or GGUF files (default: %(default)s)")
    parser.add_argument("--texts", default=",".join(TEXTS), help="default: %(default)s")
    parser.add_argument("--contexts", default="2048,8192", help="tokens of a window (default: %(default)s)")
    parser.add_argument("--long", default="prose,code",
                        help=f"of these texts, those that are read at contexts over {COUNTED} too "
                             "(default: %(default)s)")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections (default: %(default)s)")
    args = parser.parse_args()
    for name in ("schemes", "chunk_1", "models", "texts", "long", "only"):
        setattr(args, name, getattr(args, name).split(","))
    args.contexts = [int(n) for n in args.contexts.split(",")]
    for name, legal in (("texts", TEXTS), ("long", TEXTS), ("only", SECTIONS)):
        if unknown := set(getattr(args, name)) - set(legal):
            parser.error(f"--{name} {','.join(sorted(unknown))}: they are {', '.join(legal)}")
    return args


class Corpus:
    """Models and texts by name: their files and, as the CSV has them, fingerprints."""

    def __init__(self, models, names):
        self.models = measuring.models(models)
        self.texts = {name: measuring.of_set_up(TEXTS[name][0]) / TEXTS[name][1] for name in names}
        self.marks = {path: fingerprint(path) for path in [*self.models.values(), *self.texts.values()]}

    def setting(self, chunk, skip, weights, model, text, context):
        return {"windows": 1, "tokens": context, "chunk": chunk, "skip": max(skip, context - COUNTED),
                "weights": weights, "calibration": measuring.schemes.CALIBRATION,
                "model": self.marks[self.models[model]], "text": self.marks[self.texts[text]]}


def plan(args, corpus, model, text):
    """Pairs of scheme and setting."""
    def setting(context, chunk=args.chunk):
        return corpus.setting(chunk, args.skip, args.weights, model, text, context)

    settings = [setting(context) for context in args.contexts if context <= COUNTED or text in args.long]
    pairs = [(s, setting) for setting in settings for s in args.schemes] if "texts" in args.only else []
    if "chunks" in args.only and text == "prose":
        both = [setting(min(args.contexts), chunk) for chunk in (1, args.chunk)]
        pairs += [(s, setting) for setting in both for s in args.chunk_1]
    return pairs


def measure(args, corpus, results):
    cases = list(product(corpus.models, corpus.texts))
    for place, (model, text) in enumerate(cases, 1):
        print(f"{model}, {text} ({place} of {len(cases)})", file=sys.stderr)
        args.model, args.file = corpus.models[model], corpus.texts[text]
        measuring.measure(args, results, plan(args, corpus, model, text))


# ---- what is shown ----


def cell(row):
    if not row:
        return "-"
    return f"{row['mean_kld']:.4f} ± {row['mean_kld_error']:.4f}, {row['kld_p999']:.2f}, {100 * row['same_top1']:.1f}"


def texts_table(args, corpus, find):
    """A table for each model and context; a line of it for each scheme."""
    parts = []
    for model, context in product(corpus.models, args.contexts):
        lines = [f"{model}, {context:,} tokens: mean KLD, worst 0.1 %, same top-1 %", "",
                 "| scheme | bits | KV MiB | " + " | ".join(corpus.texts) + " |",
                 "|---" * (3 + len(corpus.texts)) + "|"]
        for scheme in args.schemes:
            rows = [find(model, scheme, text, context) for text in corpus.texts]
            if known := [row for row in rows if row]:
                lines.append(f"| {shown(scheme)} | {known[0]['bits']:.2f} | {known[0]['kv_bytes'] / 2**20:.1f} | "
                             + " | ".join(map(cell, rows)) + " |")
        if len(lines) > 4:
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def chunks_table(args, corpus, find):
    lines = [f"| model, scheme | 1 token at a time | {args.chunk} at a time | ratio of mean KLDs |",
             "|---|---|---|---|"]
    for model, scheme in product(corpus.models, args.chunk_1):
        one, many = (find(model, scheme, "prose", min(args.contexts), chunk) for chunk in (1, args.chunk))
        if one and many:
            lines.append(f"| {model}, {shown(scheme)} | {cell(one)} | {cell(many)} "
                         f"| {one['mean_kld'] / many['mean_kld']:.2f} |")
    return "\n".join(lines)


def main():
    args = arguments()
    corpus = Corpus(args.models, args.texts)
    plugin = "" if args.redraw else fingerprint(args.build / "lib/libggml-lowkv.so")
    results = measuring.Results(args.out / "texts.csv", plugin)
    if not args.redraw:
        measure(args, corpus, results)

    def find(model, scheme, text, context, chunk=args.chunk):
        return results.find(scheme, corpus.setting(chunk, args.skip, args.weights, model, text, context))

    for section, table in (("texts", texts_table), ("chunks", chunks_table)):
        if section in args.only and (section == "texts" or "prose" in corpus.texts):
            text = table(args, corpus, find)
            print(f"\n{text}")
            fill_documents(args.out, section, text)
    quality_plots.by_text(args.out, find, list(corpus.models), args.schemes, list(corpus.texts), args.contexts)


if __name__ == "__main__":
    main()
