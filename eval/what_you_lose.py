#!/usr/bin/env python3
"""docs/what-you-lose.md: what each scheme costs in plain words, from the CSVs that the other scripts write.

    eval/what_you_lose.py                            fills the page; nothing is measured
    eval/what_you_lose.py --schemes lowkv3,lowkv2    these schemes alone

A cell's word follows from its figure alone, by the limits below, which the page shows too; a cell whose figure nobody
has measured says so. What measures what:

    prose, code      eval/texts.py (mean KLD, 8,192 tokens where both were measured, else 2,048)
    copying          eval/retrieval.py --tasks codes (of the codes that exact copies, the share kept)
    retrieval        eval/passkey.py (of the pass keys that exact finds, the share kept, all lengths)
    long answers     eval/drift.py (mean KLD in the last quarter of an answer)"""

import argparse
import json
import statistics
from pathlib import Path

import measuring
import passkey
import texts
from paths import ROOT
from quality_tables import fill, shown
from sheet import RECOMMENDED, Sheet, schemes_of

COLUMNS = ["prose", "code", "copying", "retrieval", "long answers"]
ENOUGH = 40  # pass keys asked for
# Up to this figure, this word: a divergence (the less the better) and a share that is lost.
DIVERGENCE = [(.001, "nothing"), (.005, "hardly anything"), (.02, "a little"), (.06, "something"),
              (float("inf"), "much")]
LOST = [(.01, "nothing"), (.05, "hardly anything"), (.15, "a little"), (.4, "a part"), (1, "much")]


def word(figure, limits):
    return next(said for limit, said in limits if figure <= limit)


def divergence(figure):
    """A cell of the table."""
    return f"{word(figure, DIVERGENCE)} ({figure:.4f})" if figure is not None else "not measured"


def lost(share):
    return f"{word(share, LOST)} ({100 * share:.0f} %)" if share is not None else "not measured"


def codes_lost(rows, scheme):
    """Of the shuffled codes that exact copies, the share that the scheme gets wrong, over the contexts both have."""
    of = {(row["scheme"], row["length"], row["context"]): row["right"] for row in rows if row["task"] == "codes"}
    pairs = [pair for key, right in of.items() if key[0] == scheme and ("exact", *key[1:]) in of
             for pair in zip(right, of[("exact", *key[1:])], strict=True)]
    asked = [ours for ours, exact in pairs if exact == "1"]
    return asked.count("0") / len(asked) if asked else None


def keys_lost(rows, model, scheme):
    """Of the pass keys that exact finds, of all lengths. Where ENOUGH were asked: a word for five questions would
    mislead."""
    asked, both = passkey.beside_exact(passkey.answers(rows), model, scheme)
    return both.count(False) / len(both) if len(asked) >= ENOUGH and both else None


def last_quarter(rows, scheme):
    """Of the longest answers."""
    mine = [row for row in rows if (row["scheme"], row["mode"]) == (scheme, "forced")]
    if not mine:
        return None
    longest = max(mine, key=lambda row: int(row["answer"]))
    return statistics.mean(quarters[-1] for quarters in json.loads(longest["figures"])["kld"])


def table(schemes, figures):
    """Markdown; figures(scheme) has the bits and what COLUMNS has, None where it was not measured."""
    lines = ["| scheme | bits | " + " | ".join(COLUMNS) + " |", "|---" * (2 + len(COLUMNS)) + "|"]
    for scheme in schemes:
        got = figures(scheme)
        if any(got[column] is not None for column in COLUMNS):
            cells = [(lost if column in ("copying", "retrieval") else divergence)(got[column]) for column in COLUMNS]
            bits = f"{got['bits']:.2f}" if got["bits"] else "-"
            lines.append(f"| `{shown(scheme)}` | {bits} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def legend():
    return "\n".join(["| word | divergence up to | share lost up to |", "|---|---|---|"] + [
        f"| {a} / {b} | {limit:g} | {100 * share:g} % |" if a != b else f"| {a} | {limit:g} | {100 * share:g} % |"
        for (limit, a), (share, b) in zip(DIVERGENCE, LOST, strict=True)]).replace("| inf |", "| - |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/quality", help="where the CSVs are")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/what-you-lose.md")
    parser.add_argument("--schemes", default=",".join(RECOMMENDED), help="a scheme's own commas are written +")
    args = parser.parse_args()
    corpus = texts.Corpus(list(measuring.MODELS), list(texts.TEXTS))
    kld = measuring.Results(args.out / "texts.csv", "")
    keys = list(Sheet(args.out / "passkey.csv", passkey.KEY, passkey.COLUMNS).rows.values())
    of_key, parts = {"retrieval": ["model", "task", "length", "context", "scheme"],
                     "drift": ["model", "answer", "scheme", "mode"]}, []
    rows = {name: list(Sheet(args.out / f"{name}.csv", key, []).rows.values()) for name, key in of_key.items()}
    for model, path in corpus.models.items():
        mine = {name: [row for row in some if row["model"] == path.stem] for name, some in rows.items()}

        def figures(scheme, model=model, mine=mine):
            def on(context):
                return [kld.find(scheme, corpus.setting(32, 256, "f16", model, text, context))
                        for text in ("prose", "code")]

            spelled, (prose, code) = schemes_of(scheme)[0], on(8192) if all(on(8192)) else on(2048)
            return {"bits": prose and prose["bits"], "prose": prose and prose["mean_kld"],
                    "code": code and code["mean_kld"], "copying": codes_lost(mine["retrieval"], spelled),
                    "retrieval": keys_lost(keys, model, spelled), "long answers": last_quarter(mine["drift"], spelled)}

        parts.append(f"**{model}**\n\n" + table(args.schemes.split(","), figures))
    for mark, text in (("schemes", "\n\n".join(parts)), ("words", legend())):
        print(f"{text}\n")
        fill(args.page, f"<!-- {mark} -->", f"<!-- /{mark} -->", text)


if __name__ == "__main__":
    main()
