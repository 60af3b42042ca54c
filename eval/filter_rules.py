#!/usr/bin/env python3
"""How much attention a filter rule throws away on a real model, at equal memory.

The model (dequantized, float32, exact cache) says what every query attends to; the filter is played
through on those weights as FilteredSequence does it: window 128, 5 sinks, blocks of 32 tokens, half of
what leaves the window evicted. Printed: the share of attention that later queries paid to evicted
tokens, mean over layers, heads and queries. "mean" is the heavy rule, "sum" is H2O's rank, "oracle"
ranks by what later queries really attend to. A first look: what is lost downstream is not in it.

Run it with the python of the `torch` part of deps/setup.py, as eval/float32_reference.py.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from paths import set_up_paths

WINDOW, BLOCK, SINKS = 128, 32, 5
RULES = ("mean", "sum", "random", "oracle")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=1536, type=int)
    parser.add_argument("--evict", default=50, type=int, help="percent (default: %(default)s)")
    return parser.parse_args()


def attention_weights(tokens):
    """One [queries, tokens] array a layer: mean over heads."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    paths = set_up_paths()
    model_file = Path(paths["LOWKV_MODEL"])
    where = {"pretrained_model_name_or_path": model_file.parent, "gguf_file": model_file.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, attn_implementation="eager", dtype=torch.float32)
    text = Path(paths["LOWKV_HANDBOOK_TEXT"]).read_text(errors="ignore")[20000:20000 + 20 * tokens]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :tokens]
    with torch.no_grad():
        return [layer[0].mean(0).numpy() for layer in model(ids, output_attentions=True).attentions]


def rank(rule, weights, end, positions, random):
    if rule == "random":
        return random.random(len(positions))
    if rule == "oracle":
        return weights[end:, positions].sum(0)
    mass = weights[:end, positions].sum(0)
    return mass / (end - positions) if rule == "mean" else mass


def lost(rule, weights, step, evict, random):
    """Mean share of a query's attention that went to tokens evicted before it."""
    tokens = len(weights)
    evicted = np.zeros(tokens, bool)
    decided, total = SINKS, 0.0
    for end in range(step, tokens + 1, step):
        total += weights[end - step:end, evicted].sum()
        boundary = max(0, end - WINDOW) // BLOCK * BLOCK
        if boundary <= decided:
            continue
        positions = np.arange(decided, boundary)
        order = np.argsort(rank(rule, weights, end, positions, random), kind="stable")
        evicted[positions[order[:len(positions) * evict // 100]]] = True
        decided = boundary
    return total / (tokens // step * step)


def main():
    args = arguments()
    layers = attention_weights(args.tokens)
    for step, name in ((1, "token by token"), (512, "prompt in batches of 512")):
        for rule in RULES:
            random = np.random.default_rng(0)
            shares = [lost(rule, layer, step, args.evict, random) for layer in layers]
            print(f"{name}, {rule}: {100 * np.mean(shares):.2f} % of attention lost")


main()
