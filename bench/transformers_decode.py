#!/usr/bin/env python3
"""Decode steps on one transformers model with several caches that hold the same prompt, taken in turn, so that other
work on the machine slows all of them alike: medians, and medians of each round's ratio to the first.

    PYTHONPATH=build/python/site python bench/transformers_decode.py MODEL.gguf --text FILE
"""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import lowkv
import torch
import transformers_caches
from transformers import DynamicCache, QuantizedCache


def parser():
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", help="a name on the hub, a folder, or a .gguf file")
    made.add_argument("--text", type=Path, required=True, help="where the prompt comes from")
    made.add_argument("--prompt-tokens", type=int, default=4096)
    made.add_argument("--rounds", type=int, default=15)
    made.add_argument("--steps", type=int, default=2, help="decode steps of each cache in a round")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--scheme", action="append", help="default: kivi2 and lowkv2.8")
    made.add_argument("--json", type=Path, help="also write the results there")
    return made


def filled(model, name, prompt):
    """(a cache with the prompt's rows, the attention that the model is to use with it)."""
    if name.startswith("float32"):
        return copy.deepcopy(prompt), name.split()[-1]
    rows = [(layer.keys, layer.values) for layer in prompt.layers]
    if name.startswith("quanto"):
        cache = QuantizedCache("quanto", model.config, nbits=2, axis_key=0, axis_value=0)
        for index, (keys, values) in enumerate(rows):
            cache.update(keys, values, index)
        return cache, "sdpa"
    cache = lowkv.Cache.from_model(model, name)
    for layer, (keys, values) in zip(cache.layers, rows, strict=True):
        layer.take_over(keys, values)
    return cache, "lowkv"


def seconds(model, cache, attention, token, steps):
    """Of one step."""
    model.config._attn_implementation = attention
    start = time.perf_counter()
    for _ in range(steps):
        model(token, past_key_values=cache, logits_to_keep=1)
    return (time.perf_counter() - start) / steps


@torch.inference_mode()
def main():
    args = parser().parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = transformers_caches.load(args.model)
    ids = tokenizer(args.text.read_text(), return_tensors="pt").input_ids[:, : args.prompt_tokens]
    prompt = DynamicCache(config=model.config)
    model(ids, past_key_values=prompt, logits_to_keep=1)
    names = ["float32 sdpa", "float32 eager", *(args.scheme or ["kivi2", "lowkv2.8"])]
    names += ["quanto 2 bits"] if transformers_caches.installed("optimum.quanto") else []
    caches = {name: filled(model, name, prompt) for name in names}
    caches["no cache to speak of"] = DynamicCache(config=model.config), "sdpa"
    token = ids[:, -1:]
    times = {name: [] for name in caches}
    for turn in range(args.rounds + 1):
        for name, (cache, attention) in caches.items():
            taken = seconds(model, cache, attention, token, args.steps)
            if turn:  # the first round warms up
                times[name].append(taken)
    print(f"{args.prompt_tokens} tokens, {args.threads} threads, {args.rounds} rounds of {args.steps} steps\n")
    print(f"| cache | ms per token | tokens/s | times {names[0]} |\n|---|---|---|---|")
    for name, taken in times.items():
        middle = statistics.median(taken)
        ratio = statistics.median(a / b for a, b in zip(times[names[0]], taken, strict=True))
        print(f"| {name} | {1e3 * middle:.1f} | {1 / middle:.1f} | {ratio:.2f} |")
    if args.json:
        args.json.write_text(json.dumps(times, indent=1) + "\n")


if __name__ == "__main__":
    main()
