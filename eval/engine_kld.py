#!/usr/bin/env python3
"""What each scheme loses in transformers or vLLM, beside what it loses in llama.cpp on the same windows of a text.

    eval/engine_kld.py                                 after `make package`: transformers, SmolLM2, ten minutes
    eval/engine_kld.py --engine vllm                   after `python3 deps/setup.py venv-vllm`
    eval/engine_kld.py --schemes lowkv2.8 --windows 1
    eval/engine_kld.py -m my.gguf -f book.txt          an architecture that transformers reads from GGUF

The engine reads each window --chunk tokens at a time, with the scheme `exact` and with each other one ("stock": its own
cache), and its whole predictions at each position after --skip are set against each other: mean Kullback-Leibler
divergence, in nats. `lowkv compare` does the same with the llama.cpp plug-in. All have the same f16 weights;
transformers and vLLM compute in float32, as llama.cpp does with f16 weights but for their products' rounding. That both
read the same tokens shows in the perplexity of `exact`, which must be the same within half a percent.

What stays different: a page of vLLM's (128 tokens) is packed when it is full and out of the window as a whole, so that
some more of the newest tokens are exact than in llama.cpp."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import measuring
from paths import ROOT, set_up_paths
from weights import model_with

ENGINES = {"transformers": "LOWKV_TRANSFORMERS_PYTHON", "vllm": "LOWKV_VLLM_PYTHON"}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=lambda path: Path(path).resolve())
    parser.add_argument("--package", type=Path, default=ROOT / "build/python/site", help="where lowkv is installed")
    parser.add_argument("--engine", choices=ENGINES, default="transformers", help="default: %(default)s")
    parser.add_argument("-m", "--model", help="default: the set-up's SmolLM2")
    parser.add_argument("-f", "--file", help="the text; default: the set-up's handbook")
    parser.add_argument("--schemes", default="stock,lowkv2.8,lowkv2,kivi2",
                        help="a scheme's own commas are written + (default: %(default)s)")
    parser.add_argument("--windows", default=2, type=int, help="default: %(default)s")
    parser.add_argument("--tokens", default=2048, type=int, help="of a window (default: %(default)s)")
    parser.add_argument("--chunk", default=32, type=int, help="tokens read at a time (default: %(default)s)")
    parser.add_argument("--skip", default=256, type=int,
                        help="first positions that are not counted (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    args.schemes = args.schemes.split(",")
    args.model = args.model or measuring.of_set_up("LOWKV_MODEL")
    args.file = Path(args.file or measuring.of_set_up("LOWKV_HANDBOOK_TEXT")).resolve()
    args.python = set_up_paths().get(ENGINES[args.engine])
    if not args.python:
        sys.exit(f"engine_kld.py: {args.engine} is missing: python3 deps/setup.py venv-{args.engine}")
    args.weights, args.threads = "f16", os.cpu_count()
    return args


def checkpoint(args, weights):
    """The model as the engine reads it."""
    if args.engine == "transformers":
        return weights
    folder = ROOT / "build/vllm" / weights.stem
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        measuring.run([args.python, ROOT / "deps/vllm_checkpoint.py", weights, folder, "--dtype", "float16"])
    return folder


def predictions(args, model, scheme, out):
    """What an engine with a scheme says: the reference's go to `out`, others are set against them."""
    environment = {"PYTHONPATH": f"{args.package}:{ROOT / 'eval'}", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                   "LOWKV_SCHEME": "" if scheme == "stock" else scheme.replace("+", ",")}
    asked = {"model": str(model), "text": str(args.file), "out": str(out), "reference": scheme == "exact",
             "windows_count": args.windows, "tokens": args.tokens, "chunk": args.chunk, "skip": args.skip}
    print(f"{args.engine}, {scheme}", file=sys.stderr, flush=True)
    told = measuring.run([args.python, ROOT / f"eval/{args.engine}_predictions.py"], json.dumps(asked), **environment)
    return json.loads(told.strip().splitlines()[-1])


def in_engine(args, model):
    """{scheme: figures}."""
    found = {}
    with tempfile.NamedTemporaryFile(dir=ROOT / "build", suffix=".f32") as out:
        exact = predictions(args, model, "exact", out.name)
        for scheme in args.schemes:
            said = predictions(args, model, scheme, out.name)
            positions = args.windows * (args.tokens - 1 - args.skip)
            if len(said["kld"]) != positions:
                sys.exit(f"engine_kld.py: {args.engine} told {len(said['kld'])} of {positions} predictions")
            found[scheme] = {"mean_kld": sum(said["kld"]) / positions, "same_top1": said["same"] / positions,
                             "perplexity": said["perplexity"]}
    return {"exact": {"mean_kld": 0.0, "same_top1": 1.0, "perplexity": exact["perplexity"]}, **found}


def in_llama(args):
    print("llama.cpp", file=sys.stderr, flush=True)
    setting = {name: getattr(args, name) for name in ("windows", "tokens", "chunk", "skip", "weights")}
    return measuring.compare(args, [scheme for scheme in args.schemes if scheme != "stock"], setting)


def table(engine, found, llama):
    lines = [f"| scheme | mean KLD in {engine} | in llama.cpp | ratio | same top-1 in {engine} | in llama.cpp |",
             "|" + "---|" * 6]
    for scheme, ours in found.items():
        theirs = llama.get(scheme)
        if scheme == "exact":
            continue
        cells = [f"{ours['mean_kld']:.3g}", "", "", f"{100 * ours['same_top1']:.2f} %", ""]
        if theirs:
            cells[1:3] = [f"{theirs['mean_kld']:.3g}", f"{ours['mean_kld'] / theirs['mean_kld']:.2f}"]
            cells[4] = f"{100 * theirs['same_top1']:.2f} %"
        lines.append(f"| {scheme} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    args = arguments()
    llama = in_llama(args)
    found = in_engine(args, checkpoint(args, model_with(args.weights, args.model)))
    if args.json:
        args.json.write_text(json.dumps({args.engine: found, "llama": llama}, indent=1))
    ours, theirs = found["exact"]["perplexity"], llama["exact"]["perplexity"]
    print(f"perplexity of exact: {ours:.4f} in {args.engine}, {theirs:.4f} in llama.cpp")
    if abs(ours / theirs - 1) > .005:
        sys.exit("engine_kld.py: they have not read the same tokens")
    print(table(args.engine, found, llama))


if __name__ == "__main__":
    main()
