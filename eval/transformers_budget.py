#!/usr/bin/env python3
"""What a text loses by its length in transformers, with a budget of memory and without.

    eval/transformers_budget.py                          after `make package`: SmolLM2 in 32 MiB, some minutes
    eval/transformers_budget.py --budget 64MiB --tokens 1024,4096 -m model.gguf

A model in float32 reads the handbook through the exact cache and through the others side by side, --chunk tokens at a
time. For each length: how far the predictions of the newer half have moved from those of the exact cache (mean KLD,
nats), and what the cache holds then."""

import sys
from pathlib import Path

import paths
from sheet import again_with_torch, measuring_parser


def parser():
    made = measuring_parser(__doc__)
    made.add_argument("-m", "--model", help="a GGUF file; default: the set-up's SmolLM2")
    made.add_argument("--budget", default="32MiB", help="default: %(default)s")
    made.add_argument("--ends-at", default="lowkv2", help="the scheme that the budget ends at (default: %(default)s)")
    made.add_argument("--schemes", default="lowkv2.8,lowkv2", help="without a budget (default: %(default)s)")
    made.add_argument("--tokens", default="512,1024,2048", help="lengths (default: %(default)s)")
    made.add_argument("--chunk", default=128, type=int, help="default: %(default)s")
    return made


def measure(args, lengths):
    """{cache: (mean KLD, MiB held) at each length}"""
    import lowkv
    import torch
    from lowkv import benchmark

    model, tokenizer = benchmark.load(args.model or paths.set_up_paths()["LOWKV_MODEL"])
    text = Path(paths.set_up_paths()["LOWKV_HANDBOOK_TEXT"]).read_text(encoding="utf-8")
    ids = tokenizer(text[: 16 * lengths[-1]], return_tensors="pt").input_ids[:, : lengths[-1]]
    exact = lowkv.Cache.from_model(model, "exact")
    caches = {f"{args.ends_at} within {args.budget}": lowkv.Cache.from_model(model, args.ends_at, budget=args.budget)}
    caches |= {scheme: lowkv.Cache.from_model(model, scheme) for scheme in args.schemes.split(",")}
    klds, found = {name: [] for name in caches}, {name: [] for name in caches}
    with torch.inference_mode():
        for part in ids.split(args.chunk, dim=1):
            right = model(part, past_key_values=exact).logits[0].log_softmax(-1)
            for name, cache in caches.items():
                logits = model(part, past_key_values=cache).logits[0].log_softmax(-1)
                klds[name] += (right.exp() * (right - logits)).sum(-1).tolist()
                if len(klds[name]) in lengths:
                    newer = klds[name][len(klds[name]) // 2 :]
                    held = (cache.exact_bytes + cache.packed_bytes) / 2**20
                    found[name].append((sum(newer) / len(newer), held))
            print(f"{exact.get_seq_length():,} tokens", file=sys.stderr, flush=True)
    return found


def main():
    made = parser()
    args = made.parse_args()
    lengths = sorted(map(int, args.tokens.split(",")))
    if any(length % args.chunk for length in lengths):
        made.error(f"--tokens {args.tokens}: multiples of --chunk, {args.chunk}")
    if not args.measuring:
        return again_with_torch(args.package)
    found = measure(args, lengths)
    print("| tokens | " + " | ".join(f"{name} | MiB" for name in found) + " |")
    print("|--:|" + "--:|" * 2 * len(found))
    for i, length in enumerate(lengths):
        cells = [f"{kld:.4f} | {held:.1f}" for kld, held in (its[i] for its in found.values())]
        print(f"| {length:,} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
