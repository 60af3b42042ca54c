#!/usr/bin/env python3
"""Retrieval and copying: what can still be read out of a packed cache, beside the exact one?

    eval/retrieval.py                                        after `make package`; goes on where it was stopped
    eval/retrieval.py --tasks codes --schemes exact,lowkv2 --contexts 2
    eval/retrieval.py -m gemma.gguf --out build/retrieval    another model
    eval/retrieval.py --redraw                               the table again, nothing measured

A context (eval/retrieval_tasks.py) is read once, 128 tokens at a time, into a lowkv cache in transformers, float32.
Each question goes to a fork of it, many of them as one batch. A token of the answer is right where it is the
likeliest one after the right ones before it, and an answer is right where all its tokens are: that is what greedy
decoding would say. The share of right answers is set beside that of the exact cache, question by question: `kept` is
the share of what exact answers right that the scheme does too. Where exact fails, the model is the limit.

Writes OUT/retrieval.csv, a line for each context and scheme, with the fingerprint of the library that was measured."""

import math
import random
import sys
import time
from collections import defaultdict
from pathlib import Path

import paths
from retrieval_tasks import TASKS, Words
from sheet import RECOMMENDED, Sheet, again_with_torch, library, measuring_parser, schemes_of

SCHEMES = ["exact", *RECOMMENDED, "kivi4", "kivi2"]
KEY = ["model", "task", "length", "context", "scheme"]
COLUMNS = ["library", "tokens", "token_hits", "right"]  # right: a 1 or 0 for each question
CHUNK, BATCH = 128, 16


def parser(description, tasks, lengths):
    made = measuring_parser(description)
    made.add_argument("-m", "--model", help="a GGUF file; default: the set-up's SmolLM2")
    made.add_argument("--tasks", help=f"default: {','.join(tasks)}")
    made.add_argument("--lengths", default=lengths, help="tokens of a context (default: %(default)s)")
    made.add_argument("--schemes", default=",".join(SCHEMES), help="a scheme's own commas are written +")
    made.add_argument("--contexts", type=int, default=8, help="of each task and length (default: %(default)s)")
    made.add_argument("--redraw", action="store_true", help="print the table of what the CSV has")
    return made


# ---- results ----


def margin(share, count):
    """Twice the standard error of a share, in percent."""
    return 200 * math.sqrt(share * (1 - share) / count)


def table(rows):
    """Markdown, a table for each model and length."""
    parts = []
    for model, length in dict.fromkeys((row["model"], row["length"]) for row in rows):
        chosen = [row for row in rows if (row["model"], row["length"]) == (model, length)]
        tasks = list(dict.fromkeys(row["task"] for row in chosen))
        lines = [f"{model}, {length} tokens: answers right, % (of those that `exact` has right, %; digits right, %)",
                 "", "| scheme | " + " | ".join(tasks) + " |", "|---" * (len(tasks) + 1) + "|"]
        for scheme in dict.fromkeys(row["scheme"] for row in chosen):
            cells = [_cell(chosen, task, scheme) for task in tasks]
            lines.append(f"| {scheme} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _cell(rows, task, scheme):
    mine = {row["context"]: row for row in rows if (row["task"], row["scheme"]) == (task, scheme)}
    if not mine:
        return ""
    right = "".join(row["right"] for row in mine.values())
    share = right.count("1") / len(right)
    digits = sum(int(row["token_hits"]) for row in mine.values()) / sum(int(row["tokens"]) for row in mine.values())
    kept = ""
    if scheme != "exact":
        exact = {row["context"]: row["right"] for row in rows if (row["task"], row["scheme"]) == (task, "exact")}
        both = [b for context in mine if context in exact
                for a, b in zip(exact[context], mine[context]["right"], strict=True) if a == "1"]
        kept = f"{100 * both.count('1') / len(both):.0f}; " if both else "-; "
    return f"{100 * share:.0f} ± {margin(share, len(right)):.0f} ({kept}{100 * digits:.1f})"


# ---- measuring, in an environment with torch ----


class Reader:
    """A model that reads contexts into caches and answers from forks of them."""

    def __init__(self, path):
        import torch
        from lowkv import benchmark

        self.torch = torch
        self.model, self.tokenizer = benchmark.load(path)

    def ids(self, text, *, special=False):
        return self.tokenizer(text, add_special_tokens=special).input_ids

    def read(self, text, scheme):
        import lowkv

        torch, cache = self.torch, lowkv.Cache.from_model(self.model, scheme)
        with torch.inference_mode():
            for chunk in torch.tensor([self.ids(text, special=True)]).split(CHUNK, dim=1):
                self.model(chunk, past_key_values=cache, logits_to_keep=1)
        return cache

    def answers(self, cache, asked):
        """For each question: (tokens of the answer, those of them that are right)."""
        torch, found = self.torch, {}
        by_lengths = defaultdict(list)
        for index, (question, answer) in enumerate(asked):
            ids, right = self.ids(question), self.ids(answer)
            by_lengths[len(ids), len(right)].append((index, ids + right))
        for (_, length), alike in by_lengths.items():
            for start in range(0, len(alike), BATCH):
                part = alike[start : start + BATCH]
                fork = cache.fork()
                fork.batch_repeat_interleave(len(part))
                tokens = torch.tensor([ids for _, ids in part])
                with torch.inference_mode():
                    logits = self.model(tokens, past_key_values=fork, logits_to_keep=length + 1).logits
                hits = logits[:, -length - 1 : -1].argmax(-1) == tokens[:, -length:]
                for (index, _), row in zip(part, hits, strict=True):
                    found[index] = length, int(row.sum())
        return [found[index] for index in range(len(asked))]


def fitter(reader, budget):
    """The largest n for which what `build(n)` gives has at most `budget` tokens."""
    def fits(build):
        def short(n):
            return len(reader.ids(build(n))) <= budget

        low = 1
        while short(2 * low):
            low *= 2
        high = 2 * low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if short(middle) else (low, middle)
        return low

    return fits


def measure(args, sheet, todo, maker):
    reader = Reader(args.model)
    context_of = maker(reader)
    begun, done, total = time.monotonic(), 0, sum(length * len(schemes) for (_, length, _), schemes in todo.items())
    for (task, length, number), schemes in todo.items():
        context = context_of(task, length, number)
        for scheme in schemes:
            answers = reader.answers(reader.read(context.text, scheme), context.asked)
            right = [tokens == hits for tokens, hits in answers]
            sheet.add(model=Path(args.model).stem, task=task, length=length, context=number, scheme=scheme,
                      library=library(args.package), tokens=sum(tokens for tokens, _ in answers),
                      token_hits=sum(hits for _, hits in answers), right="".join("01"[one] for one in right))
            done += length
            left = (time.monotonic() - begun) / done * (total - done)
            print(f"{task}, {length} tokens, context {number}, {scheme}: {sum(right)} of {len(right)}, "
                  f"{left / 60:.0f} minutes left", file=sys.stderr, flush=True)


def run(made, name, tasks, legal, maker, beside=""):
    """A script of this kind: its parser, its CSV, the tasks that it measures unasked, all that it can, and what gives
    contexts: maker(reader)(task, length, number). `beside`: packages of the set-up that it needs, a variable's name."""
    args = made.parse_args()
    if not args.redraw and not args.measuring:
        return again_with_torch(args.package, beside)
    args.model = args.model or paths.set_up_paths()["LOWKV_MODEL"]
    sheet = Sheet(args.out / f"{name}.csv", KEY, COLUMNS)
    if args.measuring:
        tasks = args.tasks.split(",") if args.tasks else list(tasks)
        if unknown := [task for task in tasks if task not in legal()]:
            made.error(f"--tasks {','.join(unknown)}: they are {', '.join(legal())}")
        todo, now = {}, library(args.package)
        for number in range(args.contexts):
            for length in map(int, args.lengths.split(",")):
                for task in tasks:
                    lacking = [scheme for scheme in schemes_of(args.schemes) if sheet.get(
                        Path(args.model).stem, task, length, number, scheme).get("library") != now]
                    if lacking:
                        todo[task, length, number] = lacking
        measure(args, sheet, todo, maker)
    print(table(list(sheet.rows.values())))
    return 0


def haystacks(reader):
    prose = Path(paths.set_up_paths()["LOWKV_HANDBOOK_TEXT"]).read_text(encoding="utf-8")
    words = Words(prose, reader.tokenizer)

    def context_of(task, length, number):
        return TASKS[task](random.Random(f"{task} {length} {number}"), words, prose, fitter(reader, length - 64))

    return context_of


if __name__ == "__main__":
    sys.exit(run(parser(__doc__, TASKS, "2048"), "retrieval", TASKS, lambda: TASKS, haystacks))
