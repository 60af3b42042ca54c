#!/usr/bin/env python3
"""What each turn of a chat of 60 turns loses, with a budget of memory and without.

    eval/budget_chat.py                     SmolLM2 in 24 MiB: a quarter of an hour; goes on where it was stopped
    eval/budget_chat.py --chunk 128         128 tokens at a time, which is quicker

The turns are 60 exchanges of the set-up's dialogue (python3 deps/setup.py dialogue), the longest but for ten. Stock
llama-perplexity reads them with an f16 cache and with each other cache, --chunk tokens at a time, and writes its
predictions; these are set against each other token by token (mean KLD of a turn, nats). It keeps those of a window's
second half only, so each cache reads the chat from its first token to 256, 512, 1,024, 2,048 and 4,096. Weights are f16
(see eval/weights.py why). Writes OUT/budget_chat.csv and a picture, with the tokens that stock caches hold within the
budget."""

import struct
from pathlib import Path

import gguf
import measuring
import memory_budget
import numpy as np
import pictures
from weights import model_with

LENGTHS = 256, 512, 1024, 2048, 4096
TURNS, LONGER = 60, 10  # 4,029 tokens of SmolLM2's; with the longest exchanges they would be more than 4,096
STOCK_BITS = {"f16": 16, "q8_0": 8.5}


def chat():
    """The turns, and text behind them: llama-perplexity wants twice as many tokens as it reads."""
    exchanges = measuring.of_set_up("LOWKV_DIALOGUE_TEXT").read_text(encoding="utf-8").strip().split("\n\n")
    chosen = sorted(range(len(exchanges)), key=lambda i: -len(exchanges[i]))[LONGER : LONGER + TURNS]
    return [exchanges[i] for i in sorted(chosen)], [e for i, e in enumerate(exchanges) if i not in chosen]


class Predictions:
    """A file of llama-perplexity: `tokens`, and the log probabilities of those in the second half."""

    def __init__(self, path):
        with open(path, "rb") as file:
            magic, context, self.vocabulary, _ = struct.unpack("<8s3i", file.read(20))
            assert magic == b"_logits_"
            self.tokens = np.fromfile(file, "<i4", context)
            self.first = context // 2 + 1  # the first token that is predicted
            width = 2 * ((self.vocabulary + 1) // 2) + 4
            self.rows = np.fromfile(file, "<u2").reshape(context - self.first, width)

    def row(self, i):
        scale, least = self.rows[i, :4].view("<f4")
        logs = self.rows[i, 4 : 4 + self.vocabulary] * scale + least
        return logs - np.float32(np.log(np.exp(logs).sum(dtype=np.float64)))  # unlikely tokens were raised to the least


def divergences(exact, other):
    """KLD at each token that both predict."""
    found = []
    for i in range(len(exact.rows)):
        p, q = exact.row(i), other.row(i)
        found.append(float((np.exp(p) * (p - q)).sum(dtype=np.float64)))
    return found


def turn_of_tokens(model, tokens, turns):
    """The number of each token's turn. A token's text has a character for each byte of it."""
    pieces = gguf.GGUFReader(model).fields["tokenizer.ggml.tokens"].contents()
    begins = np.cumsum([0] + [len((turn + "\n\n").encode()) for turn in turns])
    ends = np.cumsum([len(pieces[token]) for token in tokens])
    return np.searchsorted(begins, ends, side="left") - 1


def predictions(args, model, tokens, name, words=(), how=None):
    """Of one cache; they are kept: a run that was stopped goes on."""
    path = args.kept / f"{args.chunk}-{name}-{tokens}"
    if not path.exists():
        print(f"{name}: {tokens} tokens", flush=True)
        unfinished = path.with_suffix(".unfinished")
        memory_budget.perplexity(args, model, tokens, unfinished, *words, **how or {})
        unfinished.replace(path)
    return Predictions(path)


def measure(args, model, turns, name, words, how):
    """{turn: mean KLD}"""
    found = {}
    for tokens in LENGTHS:
        exact = predictions(args, model, tokens, "stock f16")
        other = predictions(args, model, tokens, name, words, how)
        assert (exact.tokens == other.tokens).all()
        numbers = turn_of_tokens(model, exact.tokens, turns)[exact.first :]
        for turn, kld in zip(numbers, divergences(exact, other), strict=True):
            found.setdefault(int(turn), []).append(kld)
    return {turn: float(np.mean(klds)) for turn, klds in found.items()}


def limits(args, model):
    """{stock type: how many tokens of it the budget holds}"""
    fields = gguf.GGUFReader(model).fields
    of = {key.partition(".")[2]: field.contents() for key, field in fields.items() if "." in key}
    heads, width = of["attention.head_count_kv"], of["embedding_length"] // of["attention.head_count"]
    size = float(args.budget.removesuffix("MiB")) * 2**20
    return {name: int(size / (2 * of["block_count"] * heads * width * bits / 8)) for name, bits in STOCK_BITS.items()}


def draw(args, rows, held):
    figure, [axes] = pictures.side_by_side(1)
    names = [name for name in rows[0] if name not in ("turn", "tokens")]
    for name, colour, marker in zip(names, pictures.COLOURS[1:], pictures.MARKERS, strict=False):
        axes.plot([row["tokens"] for row in rows], [row[name] for row in rows], color=colour, marker=marker,
                  markersize=3, linewidth=1, label=name)
    for name, tokens in held.items():
        axes.axvline(tokens, color="#7f7f7f", linestyle="--", linewidth=1)
        axes.annotate(f"{name}: {args.budget}", (tokens, 1), xycoords=("data", "axes fraction"), rotation=90,
                      ha="right", va="top", fontsize=8)
    axes.set_xlabel("tokens in the chat at the end of a turn")
    axes.set_ylabel("mean KLD of the turn, nats")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    pictures.save(figure, rows, args.out, "budget_chat")


def main():
    args = memory_budget.parser(__doc__).parse_args()
    model = model_with("f16", Path(args.model or measuring.of_set_up("LOWKV_MODEL")))
    turns, rest = chat()
    args.kept = model.parent / "budget_chat"
    args.kept.mkdir(exist_ok=True)
    args.file = args.kept / "chat.txt"
    args.file.write_text("\n\n".join([*turns, *rest]), encoding="utf-8")
    caches = memory_budget.caches(args)
    found = {name: measure(args, model, turns, name, words, how) for name, words, how in caches}
    numbers = turn_of_tokens(model, predictions(args, model, LENGTHS[-1], "stock f16").tokens, turns)
    scored = [turn for turn in sorted(found[caches[0][0]]) if turn < TURNS]
    rows = [{"turn": turn + 1, "tokens": int((numbers <= turn).sum()),
             **{name: round(its[turn], 5) for name, its in found.items()}} for turn in scored]
    held = limits(args, model)
    print(f"in {args.budget}: " + ", ".join(f"{tokens:,} tokens of {name}" for name, tokens in held.items()))
    draw(args, rows, held)


if __name__ == "__main__":
    main()
