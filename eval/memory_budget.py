#!/usr/bin/env python3
"""What a conversation loses by its length, with a budget of memory and without.

    eval/memory_budget.py                          SmolLM2 in 24 MiB, 1,024 to 4,096 tokens: a quarter of an hour
    eval/memory_budget.py --budget 40MiB --tokens 8192 -m model.gguf

Stock llama-perplexity reads windows of a text of each length with an f16 cache, then with each other cache, --chunk
tokens at a time, and says how far the predictions of a window's second half have moved (mean KLD, nats). Weights are
f16 (see eval/weights.py why). The budget is LOWKV_BUDGET; stock q8_0 is there to compare: its rows need more than the
budget from some length on. Writes OUT/memory_budget.csv and a picture."""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import measuring
from paths import ROOT, set_up_paths
from weights import model_with

sys.path.append(str(ROOT / "bench"))
import pictures


def parser(doc):
    """With the options that eval/budget_chat.py has too."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--plugin", type=Path, default=ROOT / "build/release/lib/libggml-lowkv.so",
                      help="default: %(default)s")
    made.add_argument("-m", "--model", help="default: the set-up's SmolLM2")
    made.add_argument("--budget", default="24MiB", help="default: %(default)s")
    made.add_argument("--ends-at", default="lowkv2", help="the scheme that the budget ends at (default: %(default)s)")
    made.add_argument("--schemes", default="lowkv2.8,lowkv2", help="without a budget (default: %(default)s)")
    made.add_argument("--chunk", default=32, type=int, help="default: %(default)s")
    made.add_argument("--out", type=Path, default=ROOT / "docs/quality", help="default: %(default)s")
    return made


def perplexity(args, model, tokens, base, *words, windows=1, plugin=None, **variables):
    """llama-perplexity against the predictions in `base`, or writing them."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOWKV_") and k != "GGML_BACKEND_PATH"}
    device = []
    if plugin:
        environment |= {"GGML_BACKEND_PATH": str(plugin), **variables}
        device = ["-dev", "LOWKV"]
    command = [set_up_paths()["LOWKV_LLAMA_BUILD"] + "/llama-perplexity", "-m", model, "-f", args.file, "-c", tokens,
               "-b", args.chunk, "-ub", args.chunk, "--chunks", windows, "-fa", "on", "-t", os.cpu_count(),
               "--kl-divergence-base", base, *device, *words]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True)
    if done.returncode or (plugin and "lowkv: active" not in done.stderr):
        sys.exit(f"memory_budget.py: {' '.join(map(str, command))} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def caches(args):
    """(name, words for llama-perplexity, the rest for perplexity()) of each cache."""
    ours = {f"{args.ends_at} within {args.budget}": {"LOWKV_SCHEME": args.ends_at, "LOWKV_BUDGET": args.budget}}
    ours |= {scheme: {"LOWKV_SCHEME": scheme} for scheme in args.schemes.split(",")}
    found = [(name, (), {"plugin": args.plugin, **variables}) for name, variables in ours.items()]
    return [*found, ("stock q8_0", ("-ctk", "q8_0", "-ctv", "q8_0"), {})]


def measure(args, model, tokens):
    """{cache: mean KLD} at a length."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "predictions"
        perplexity(args, model, tokens, base, windows=args.windows)
        for name, words, how in caches(args):
            print(f"{tokens:,} tokens: {name}", file=sys.stderr, flush=True)
            out = perplexity(args, model, tokens, base, "--kl-divergence", *words, windows=args.windows, **how)
            found[name] = float(re.search(r"Mean +KLD: +(-?[\d.]+)", out)[1])
    return found


def draw(rows, out):
    figure, [axes] = pictures.side_by_side(1)
    names = [name for name in rows[0] if name != "tokens"]
    for name, colour, marker in zip(names, pictures.COLOURS[1:], pictures.MARKERS, strict=False):
        axes.plot([row["tokens"] for row in rows], [row[name] for row in rows], color=colour, marker=marker, label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["tokens"] for row in rows], [f"{row['tokens']:,}" for row in rows])
    axes.set_xlabel("tokens in the conversation")
    axes.set_ylabel("mean KLD of the newer half, nats")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    pictures.save(figure, rows, out, "memory_budget")


def main():
    made = parser(__doc__)
    made.add_argument("-f", "--file", help="the text; default: the set-up's handbook")
    made.add_argument("--tokens", default="1024,2048,4096", help="lengths (default: %(default)s)")
    made.add_argument("--windows", default=1, type=int, help="of each length (default: %(default)s)")
    args = made.parse_args()
    args.file = Path(args.file or measuring.of_set_up("LOWKV_HANDBOOK_TEXT")).resolve()
    model = model_with("f16", Path(args.model or measuring.of_set_up("LOWKV_MODEL")))
    rows = []
    for tokens in map(int, args.tokens.split(",")):
        rows.append({"tokens": tokens, **measure(args, model, tokens)})
    names = [name for name in rows[0] if name != "tokens"]
    print("| tokens | " + " | ".join(names) + " |")
    print("|--:|" + "--:|" * len(names))
    for row in rows:
        print(f"| {row['tokens']:,} | " + " | ".join(f"{row[name]:.4f}" for name in names) + " |")
    draw(rows, args.out)


if __name__ == "__main__":
    main()
