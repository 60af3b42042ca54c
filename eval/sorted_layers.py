#!/usr/bin/env python3
"""How far attention itself moves, layer by layer, in the simulation of eval/sorted_study.py.

    eval/sorted_layers.py -m gemma.gguf "" alpha=.5+scale=1 alpha=.5+scale=1+ranges=1      after `make package`

One forward pass over a window of prose. Of each layer's queries from 512 on, every 12th: the KL of the shares that they
give the tokens, exact keys against coded ones, mean over heads (nats); then the largest channel's part of the queries'
energy. Values don't matter here. A setting is sorted_study's; nothing is kept in a file."""

import math
import sys

import paths
from sheet import again_with_torch, measuring_parser
from sorted_study import BLOCK, Codec, Study, settings_of

FIRST, EACH = 512, 12


class Recorder:
    """Attention that remembers each layer's queries and keys."""

    def __init__(self, attention):
        self.attention, self.layers = attention, []

    def __call__(self, module, query, key, value, mask, scaling=None, **kwargs):
        window = getattr(module, "sliding_window", None) or 1 << 30
        self.layers.append((query[0].unflatten(0, (key.shape[1], -1)), key[0], scaling, window))
        return self.attention(module, query, key, value, mask, scaling=scaling, **kwargs)


def moved(torch, codec, query, key, scaling, window):
    """Mean KL of the tokens' shares: query [kv heads, heads each, tokens, channels],
    key [kv heads, tokens, channels]."""
    tokens = key.shape[1]
    end = BLOCK * (tokens // BLOCK - 1)
    coded = torch.cat([codec.keys(key[:, :end], query), key[:, end:]], 1)
    at = torch.arange(FIRST, tokens, EACH)[:, None]
    place = torch.arange(tokens)
    hidden = (place > at) | (at - place >= window)
    q = query[:, :, at[:, 0]]
    exact = q @ key.mT[:, None] * scaling
    mixed = torch.where(place < BLOCK * (at // BLOCK - 1), q @ coded.mT[:, None] * scaling, exact)
    exact, mixed = (scores.masked_fill(hidden, -math.inf).log_softmax(-1) for scores in (exact, mixed))
    return (exact.exp() * (exact - mixed).masked_fill(hidden, 0.)).sum(-1).mean().item()


def main():
    made = measuring_parser(__doc__)
    made.add_argument("settings", nargs="*", default=[""])
    made.add_argument("-m", "--model", help="a GGUF file; default: the set-up's SmolLM2")
    args = made.parse_args()
    if not args.measuring:
        return again_with_torch(args.package)
    study = Study(args.model or paths.set_up_paths()["LOWKV_MODEL"])
    torch = study.torch
    from transformers import AttentionInterface

    recorder = Recorder(study.attention)
    AttentionInterface.register("sorted_study", recorder)
    study.predictions(*study.text("prose", 0), None)
    print("layer  window ", *(f"{s or '-':>26}" for s in args.settings), " largest channel")
    for number, layer in enumerate(recorder.layers):
        row = [moved(torch, Codec(torch, settings_of(s)), *layer) for s in args.settings]
        energy = layer[0].square().mean((1, 2))
        share = (energy.amax(-1) / energy.sum(-1)).max().item()
        window = layer[3] if layer[3] < 1 << 30 else "all"
        print(f"{number:5} {window:>7} ", *(f"{x:26.5f}" for x in row), f"{share:12.0%}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
