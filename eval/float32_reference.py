#!/usr/bin/env python3
"""How far llama.cpp is from a float32 model: stock f16 cache against lowkv's `exact` scheme.

Both run stock llama-perplexity on the same text and save all logits; transformers then computes the
same tokens in float32 from the same (dequantized) weights. Prints the mean KLD of each from float32
over the second half of every window. Run it with the python of this part of the set-up:

    python3 deps/setup.py venv-transformers llama model text
    make build
    $(python3 deps/setup.py --paths |
        python3 -c 'import json,sys; print(json.load(sys.stdin)["LOWKV_TRANSFORMERS_PYTHON"])') \\
        eval/float32_reference.py
"""

import argparse
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from paths import ROOT, set_up_paths


def arguments():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=Path)
    parser.add_argument("--tokens", default=1024, type=int, help="tokens of a window")
    parser.add_argument("--windows", default=2, type=int)
    parser.add_argument("--threads", default=2, type=int)
    return parser.parse_args()


def save_logits(args, paths, plugin, file):
    command = [f"{paths['LOWKV_LLAMA_BUILD']}/llama-perplexity", "-m", paths["LOWKV_MODEL"],
               "-f", paths["LOWKV_HANDBOOK_TEXT"], "-c", str(args.tokens), "-b", str(args.tokens),
               "--chunks", str(args.windows), "-t", str(args.threads), "-fa", "on",
               "--save-all-logits", file]
    environment = dict(os.environ)
    if plugin:
        command += ["-dev", "LOWKV"]
        environment |= {"GGML_BACKEND_PATH": str(args.build / "lib/libggml-lowkv.so"),
                        "LOWKV_SCHEME": "exact"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode or ("lowkv: active" in run.stderr + run.stdout) != plugin:
        sys.exit(f"{' '.join(command)} failed:\n{run.stderr[-2000:]}")


def read_logits(file):
    """Tokens [windows, n_ctx] and log-probabilities [windows, positions, vocab] as saved."""
    import numpy as np
    data = Path(file).read_bytes()
    assert data[:8] == b"_logits_"
    n_ctx, n_vocab, windows = struct.unpack_from("<iii", data, 8)
    tokens = np.frombuffer(data, "<i4", n_ctx * windows, 20).reshape(windows, n_ctx)
    positions = n_ctx - 1 - n_ctx // 2
    width = 2 * ((n_vocab + 1) // 2) + 4
    rows = np.frombuffer(data, "<u2", windows * positions * width, 20 + 4 * n_ctx * windows)
    rows = rows.reshape(windows, positions, width)
    scale = rows[..., :4].copy().view("<f4")
    return tokens, rows[..., 4:4 + n_vocab], scale


def kld(reference, rows, scale):
    """Mean KL divergence of saved log-probabilities from float32 ones, both [positions, vocab]."""
    import numpy as np
    import torch
    saved = torch.from_numpy(rows.astype(np.float32) * scale[:, :1] + scale[:, 1:])
    saved = torch.log_softmax(saved.double(), -1)
    return (reference.exp() * (reference - saved)).sum(-1).mean().item()


def main():
    args = arguments()
    paths = set_up_paths()
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        results = {}
        for name, plugin in (("stock f16", False), ("lowkv exact", True)):
            print(f"llama-perplexity, {name} ...", file=sys.stderr)
            file = f"{folder}/{'exact' if plugin else 'stock'}"
            save_logits(args, paths, plugin, file)
            results[name] = read_logits(file)

        print("transformers, float32 ...", file=sys.stderr)
        gguf = Path(paths["LOWKV_MODEL"])
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name,
                                                     dtype=torch.float32)
        tokens = results["stock f16"][0]
        first = args.tokens // 2
        sums = dict.fromkeys(results, 0.0)
        for window in range(args.windows):
            with torch.inference_mode():
                logits = model(torch.tensor(tokens[window:window + 1].astype("int64"))).logits
            reference = torch.log_softmax(logits[0, first:args.tokens - 1].double(), -1)
            for name, (_, rows, scale) in results.items():
                sums[name] += kld(reference, rows[window], scale[window]) / args.windows
    for name, value in sums.items():
        print(f"{name}: mean KLD from float32 {value:.5f}")
    return 0 if sums["lowkv exact"] < sums["stock f16"] else 1


if __name__ == "__main__":
    sys.exit(main())
