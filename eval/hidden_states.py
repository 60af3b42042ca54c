#!/usr/bin/env python3
"""How far a packed cache moves the hidden states of SmolLM2-135M, layer by layer.

    "$LOWKV_PYTHON" eval/hidden_states.py        after `make package`; a few minutes

A text runs through the model in chunks, as a long prompt does, once with the `exact` scheme and once with each
other one. Compared are the hidden states after each layer (the last one after the final norm): the cosine, its
mean and its minimum over the positions from FIRST on, where most of what a token attends to is packed.
Writes OUT/hidden_states.csv and .png."""

import csv
import sys
from pathlib import Path

import paths
from sheet import again_with_torch, measuring_parser

SCHEMES = ["turboquant4", "lowkv4", "kivi4", "lowkv2.8", "kivi2"]
TOKENS, CHUNK, FIRST = 2048, 32, 256
LINE = 0.9999  # what is asked of 4 bits


def parser():
    made = measuring_parser(__doc__)
    made.add_argument("--plot-only", action="store_true", help="draw what the CSV has")
    return made


def measure(file):
    import lowkv
    import torch
    from lowkv import benchmark

    found = paths.set_up_paths()
    model, tokenizer = benchmark.load(found["LOWKV_MODEL"])
    text = Path(found["LOWKV_HANDBOOK_TEXT"]).read_text(encoding="utf-8")
    ids = tokenizer(text[: 8 * TOKENS], return_tensors="pt").input_ids[:, :TOKENS]
    assert ids.shape[1] == TOKENS

    @torch.inference_mode()
    def states(scheme):
        """[layers, tokens, channels]; the embeddings, which come first, are left out."""
        cache, parts = lowkv.Cache.from_model(model, scheme), []
        for chunk in ids.split(CHUNK, dim=1):
            out = model.model(chunk, past_key_values=cache, output_hidden_states=True)
            parts.append(torch.cat(out.hidden_states[1:]))
        return torch.cat(parts, dim=1)

    exact = states("exact")
    with file.open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["scheme", "layer", "mean", "min"])
        for scheme in SCHEMES:
            cosine = torch.nn.functional.cosine_similarity(states(scheme).double(), exact.double(), dim=2)[:, FIRST:]
            for layer, row in enumerate(cosine):
                writer.writerow([scheme, layer, f"{row.mean():.8f}", f"{row.min():.8f}"])
            print(f"{scheme}: mean of all layers {cosine.mean():.6f}, worst layer {cosine.mean(1).min():.6f}, "
                  f"last {cosine[-1].mean():.6f}; minimum {cosine.min():.6f}", flush=True)


def plot(rows, out):
    import quality_plots as quality
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(11, 4.8), sharey=True)
    for axes, column, title in zip(both, ("mean", "min"), ("mean of all positions", "worst position"), strict=True):
        for scheme in SCHEMES:
            chosen = [row for row in rows if row["scheme"] == scheme]
            _, _, colour, marker = quality.family(scheme)
            low = not scheme.endswith("4")
            axes.plot([int(row["layer"]) for row in chosen], [1 - float(row[column]) for row in chosen], color=colour,
                      marker=marker, markersize=5, linestyle="--" if low else "-", label=scheme,
                      markerfacecolor="white" if low else colour)
        axes.axhline(1 - LINE, color="#c0392b", linewidth=1, linestyle=":")
        axes.set_yscale("log")
        axes.set_xlabel("layer")
        axes.set_title(title, fontsize=11)
        axes.grid(True, which="major", color=quality.GRID)
    both[0].set_ylabel("1 - cosine to exact (log; lower is better)")
    both[0].annotate(f"cosine {LINE}", (10, 1 - LINE), xytext=(0, 4), textcoords="offset points", fontsize=9,
                     color="#c0392b")
    both[1].legend(frameon=False, fontsize=9.5, loc="lower right")
    quality.save(figure, out, "hidden_states")


def main():
    args = parser().parse_args()
    file = args.out / "hidden_states.csv"
    if args.measuring:
        return measure(file)
    if not args.plot_only and (status := again_with_torch(args.package)) != 0:
        return status
    with file.open(newline="") as opened:
        plot(list(csv.DictReader(opened)), args.out)
    return None


if __name__ == "__main__":
    sys.exit(main())
