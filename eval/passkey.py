#!/usr/bin/env python3
"""Pass keys: can a model still say a number that it read long ago?

    eval/passkey.py                                           goes on where it was stopped
    eval/passkey.py --lengths 8192 --schemes exact,lowkv2 --trials 2
    eval/passkey.py --models my.gguf --out build/passkey      a model of your own
    eval/passkey.py --redraw                                  table and picture again, nothing measured

Five five-digit numbers, a pass key, a telephone number and the like, stand in handbook text of a given length, at 17 %
to 83 % of it, in another order in each text. (Five pass keys, one per door, small models mix up even in the exact
cache.) A stock llama-server with the plug-in reads the text once, 128 tokens at a time, and is asked for each of them
at temperature 0; it keeps the text in its cache from question to question, as it does for a chat. Right
means that the number is in the first 8 tokens. `kept` is the share of what the exact cache finds that a scheme finds
too: where exact fails, the model is the limit. The length counts question and answer: 8192 fits a model of that length.

Weights are f16 (eval/weights.py says why). Nearly all of the time is reading: questions that share a text cost little.
Writes OUT/passkey.csv, a line for each question and scheme."""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import measuring
import quality_plots
from paths import ROOT, fingerprint, set_up_paths
from quality_tables import fill_documents
from retrieval import fitter, margin
from retrieval_tasks import number, spread
from sheet import RECOMMENDED, Sheet, schemes_of
from weights import model_with

SCHEMES = ["exact", *RECOMMENDED]
FACTS = [  # what stands in the text, with a number for {}, and what is asked
    ("The pass key is {}. Remember it. {} is the pass key.", "What is the pass key? The pass key is"),
    ("The telephone number of Anna is {}. Call Anna: {}.", "What is the telephone number of Anna? It is"),
    ("The lighthouse has {} steps. I counted all {} steps of the lighthouse.",
     "How many steps has the lighthouse? The lighthouse has"),
    ("The ship to Lisbon carried {} oranges. There were {} oranges on the ship.",
     "How many oranges were on the ship to Lisbon? The ship carried"),
    ("The postal code of the island is {}. Letters to the island need the code {}.",
     "What is the postal code of the island? The postal code is"),
]
DEPTHS = [round(100 * (i + 1) / (len(FACTS) + 1)) for i in range(len(FACTS))]
KEY = ["model", "scheme", "length", "trial", "depth"]
COLUMNS = ["plugin", "right", "answer"]
CHUNK, ANSWER = 128, 8
ROOM = 64  # tokens of a question and its answer, and some
PATIENCE = 3600  # seconds for one text


def parser():
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--build", default=ROOT / "build/release", type=lambda path: Path(path).resolve())
    made.add_argument("--out", default=ROOT / "docs/quality", type=Path)
    made.add_argument("--models", default=",".join(measuring.MODELS),
                      help="of the set-up, or GGUF files (default: %(default)s)")
    made.add_argument("--lengths", default="2048,8192", help="tokens (default: %(default)s)")
    made.add_argument("--schemes", default=",".join(SCHEMES), help="a scheme's own commas are written +")
    made.add_argument("--trials", default=8, type=int,
                      help="texts of each length, five questions each (default: %(default)s)")
    made.add_argument("--threads", default=min(2, os.cpu_count() or 1), type=int)
    made.add_argument("--redraw", action="store_true", help="print the table of what the CSV has, draw the picture")
    return made


def context(prose, fits, draw):
    """The text, and each fact's question and number, from the first to the last in the text."""
    facts = [(fact, number(draw, 5), question) for fact, question in draw.sample(FACTS, len(FACTS))]
    text = spread(draw, prose, fits, [fact.format(key, key) for fact, key, _ in facts])
    return text, [(question, key) for _, key, question in facts]


class Asked:
    """A llama-server as what fitter() counts tokens with, and what answers."""

    def __init__(self, server):
        self.server = server

    def post(self, path, **body):
        status, answer = self.server.request("POST", path, body, timeout=PATIENCE)
        if status != 200:
            sys.exit(f"llama-server: {answer}")
        return answer

    def ids(self, text):
        return self.post("/tokenize", content=text, add_special=True)["tokens"]

    def say(self, words):
        return self.post("/completion", prompt=words, n_predict=ANSWER, temperature=0, cache_prompt=True)["content"]


def ask(args, tools, model, scheme, length, trial, prose):
    """For each question: (right or not, what was said)."""
    with tempfile.TemporaryDirectory() as folder, tools.server(
            Path(folder), "-c", length, "-np", 1, "-fa", "on", "-t", args.threads, "-ub", CHUNK, scheme=scheme,
            model=model) as server:
        asked = Asked(server)
        text, questions = context(prose, fitter(asked, length - ROOM), random.Random(f"{length} {trial}"))
        said = [asked.say(text + question) for question, _ in questions]
        if "lowkv: active: scheme" not in server.log_text():
            sys.exit(f"passkey.py: {scheme} was not active:\n{server.log_text()[-2000:]}")
    return [(key in words, " ".join(words.split())) for words, (_, key) in zip(said, questions, strict=True)]


def measure(args, sheet, models):
    """Adds to the CSV what this build lacks."""
    os.environ["LOWKV_BUILD_DIR"] = str(args.build)
    sys.path.insert(0, str(ROOT / "tests/e2e"))
    import plugin_tools as tools
    plugin = fingerprint(args.build / "lib/libggml-lowkv.so")
    prose = Path(set_up_paths()["LOWKV_HANDBOOK_TEXT"]).read_text(encoding="utf-8")
    cells = [(m, s, n, t) for t in range(args.trials) for n in map(int, args.lengths.split(","))
             for m in models for s in schemes_of(args.schemes)]
    todo = [c for c in cells if sheet.get(*c, DEPTHS[-1]).get("plugin") != plugin]
    start, done, total = time.monotonic(), 0, sum(length for _, _, length, _ in todo)
    for model, scheme, length, trial in todo:
        answers = ask(args, tools, model_with("f16", models[model]), scheme, length, trial, prose)
        for depth, (right, said) in zip(DEPTHS, answers, strict=True):
            sheet.add(model=model, scheme=scheme, length=length, trial=trial, depth=depth, plugin=plugin,
                      right=int(right), answer=said)
        done += length
        left = (time.monotonic() - start) / done * (total - done)
        print(f"{model}, {scheme}, {length} tokens, text {trial}: {sum(right for right, _ in answers)} of "
              f"{len(answers)}, {left / 60:.0f} minutes left", file=sys.stderr, flush=True)


def answers(rows):
    """{a question's KEY: whether it was answered rightly}"""
    return {tuple(row[k] for k in KEY): row["right"] == "1" for row in rows}


def beside_exact(right, model, scheme, length=None):
    """Of answers(): the scheme's, and those of them where exact is right; of all lengths or of one."""
    mine = {key: one for key, one in right.items() if key[:2] == (model, scheme) and length in (None, key[2])}
    return list(mine.values()), [one for key, one in mine.items() if right.get((model, "exact", *key[2:]))]


def shares(rows):
    """{(model, length, scheme): (share right, how many were asked, share of exact's right ones that are kept)}."""
    right, found = answers(rows), {}
    for model, length, scheme in dict.fromkeys((row["model"], row["length"], row["scheme"]) for row in rows):
        mine, both = beside_exact(right, model, scheme, length)
        found[model, int(length), scheme] = sum(mine) / len(mine), len(mine), sum(both) / len(both) if both else None
    return found


def table(found):
    """Markdown: a line for each model and scheme."""
    lengths = sorted({length for _, length, _ in found})
    lines = ["| model, scheme | " + " | ".join(f"{n:,} tokens" for n in lengths) + " |",
             "|---" * (1 + len(lengths)) + "|"]
    for model, scheme in dict.fromkeys((model, scheme) for model, _, scheme in found):
        cells = []
        for length in lengths:
            share, count, kept = found.get((model, length, scheme), (0, 0, None))
            more = f"; kept {100 * kept:.0f} %" if kept is not None and scheme != "exact" else ""
            cells.append(f"{100 * share:.0f} % ± {margin(share, count):.0f} of {count}{more}" if count else "-")
        lines.append(f"| {model}, {scheme} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    args = parser().parse_args()
    sheet = Sheet(args.out / "passkey.csv", KEY, COLUMNS)
    if not args.redraw:
        measure(args, sheet, measuring.models(args.models.split(",")))
    found = shares(list(sheet.rows.values()))
    print(table(found))
    fill_documents(args.out, "passkey", table(found))
    quality_plots.passkey(args.out, found)


if __name__ == "__main__":
    main()
