#!/usr/bin/env python3
"""Speed, memory and agreement of caches on one model, with lowkv installed:

    bench/transformers_caches.py MODEL --tokens 200

Each cache runs in a process of its own, whose peak memory is the kernel's figure, reset after the model was loaded. The
prompt goes in in one piece, and only its last token's logits are computed: generate() does so. The reference is
transformers' DynamicCache, in float32 like the model; transformers' QuantizedCache is measured too where its back ends
(optimum-quanto, hqq) are installed."""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from lowkv._core import Error, parse_scheme

REFERENCE = "float32 DynamicCache"
QUANTIZED = {"QuantizedCache quanto, 2 bits": ("quanto", "optimum.quanto"),
             "QuantizedCache hqq, 2 bits": ("hqq", "hqq")}
MIB = 2**20


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.run:
        print(json.dumps(_measure(args, args.run)))
        return 0
    schemes = [f"k=channel-2-g{args.G},v=token-2-g{args.G},window={args.R},sinks=0", *(args.scheme or ["lowkv2.8"])]
    try:
        for scheme in schemes:
            parse_scheme(scheme)
    except Error as error:
        parser.error(str(error))
    if args.tokens < 2:
        parser.error("--tokens: 2 or more; the first comes from the prompt, and speed is that of the others")
    if args.json and not os.access(Path(args.json).resolve().parent, os.W_OK):
        parser.error(f"--json {args.json}: can't write there")
    results = {}
    for name in [REFERENCE, *schemes, *QUANTIZED]:
        module = QUANTIZED.get(name, (None, None))[1]
        if module and not installed(module):
            print(f"{name}: not measured, {module} is not installed", file=sys.stderr)
            continue
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        results[name] = _in_own_process(args, name)
    print(_table(results))
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name on the hub, a folder, or a .gguf file")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to generate, greedily")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--text", help="a file to take the prompt from; default: the source of Python's argparse")
    parser.add_argument("--G", type=int, default=32, help="elements that share a scale, in the KIVI row")
    parser.add_argument("--R", type=int, default=128, help="newest tokens kept exact, in the KIVI row")
    parser.add_argument("--scheme", action="append", help="measure this scheme beside KIVI's; may be given again "
                        "(default: lowkv2.8)")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's own choice")
    parser.add_argument("--json", help="also write the results there")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    return parser


def installed(module: str) -> bool:
    """Whether a module can be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _in_own_process(args, name: str) -> dict:
    command = [sys.executable, __file__, args.model, "--tokens", str(args.tokens),
               "--prompt-tokens", str(args.prompt_tokens), "--run", name]
    for option in ("text", "threads"):
        if getattr(args, option) is not None:
            command += [f"--{option}", str(getattr(args, option))]
    # Where a parent has us ignore SIGCHLD, Python takes every child's exit status for 0.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: failed, see above")
    return json.loads(done.stdout.splitlines()[-1])


def _measure(args, name: str) -> dict:
    """Runs in a process of its own."""
    import torch
    from lowkv.names import cache_argument
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        def __init__(self):
            self.times: list[float] = []

        def put(self, value):
            self.times.append(time.perf_counter())

        def end(self):
            pass

    if args.threads:
        torch.set_num_threads(args.threads)
    model, tokenizer = load(args.model)
    text = Path(args.text).read_text() if args.text else inspect.getsource(argparse)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.prompt_tokens]
    if ids.shape[1] < args.prompt_tokens:
        raise SystemExit(f"the text has only {ids.shape[1]} tokens; --prompt-tokens {args.prompt_tokens}")
    cache = _cache(name, model)
    with torch.inference_mode():
        model.generate(ids[:, :8], max_new_tokens=2, do_sample=False, pad_token_id=0)  # first calls are slower
        before = _reset_peak()
        clock = Clock()
        output = model.generate(ids, max_new_tokens=args.tokens, min_new_tokens=args.tokens, do_sample=False,
                                streamer=clock, pad_token_id=0, **{cache_argument(model): cache})
    steps = clock.times[1:]  # the first is the prompt
    return {"tokens": output[0, ids.shape[1] :].tolist(), "prefill_seconds": steps[0] - clock.times[0],
            "tokens_per_second": (len(steps) - 1) / (steps[-1] - steps[0]) if len(steps) > 1 else 0.0,
            "cache_bytes": _held(cache), "peak_bytes": _status("VmHWM") - before}


def load(model: str):
    """(model in float32, tokenizer) of a name on the hub, a folder, or a .gguf file."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(model)
    more = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    source = path.parent if more else model
    loaded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **more)
    return loaded.eval(), AutoTokenizer.from_pretrained(source, **more)


def _cache(name: str, model):
    import lowkv
    from transformers import DynamicCache, QuantizedCache

    if name == REFERENCE:
        return DynamicCache(config=model.config)
    if name in QUANTIZED:
        return QuantizedCache(QUANTIZED[name][0], model.config, nbits=2, axis_key=0, axis_value=0)
    return lowkv.Cache.from_model(model, name)


def _held(cache) -> int | None:
    import lowkv

    if isinstance(cache, lowkv.Cache):
        return cache.exact_bytes + cache.packed_bytes
    if type(cache).__name__ == "DynamicCache":
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers
                   if getattr(layer, "keys", None) is not None)
    return None  # spread over its back end's own objects; the peak tells


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _reset_peak() -> int:
    """Forgets the peak of loading; returns the bytes resident now. Linux only."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _table(results: dict[str, dict]) -> str:
    reference = results[REFERENCE]
    rows = [("cache", "prefill s", "tokens/s", "overhead", "cache MiB", "compression", "peak MiB", "token match")]
    for name, result in results.items():
        held, match = result["cache_bytes"], result["tokens"]
        same = sum(a == b for a, b in zip(match, reference["tokens"], strict=True)) / len(match)
        overhead = reference["tokens_per_second"] / result["tokens_per_second"] - 1
        rows.append((name, f"{result['prefill_seconds']:.2f}", f"{result['tokens_per_second']:.1f}",
                     f"{overhead:+.0%}", f"{held / MIB:.1f}" if held else "-",
                     f"{reference['cache_bytes'] / held:.2f}x" if held else "-",
                     f"{result['peak_bytes'] / MIB:.0f}", f"{same:.0%}"))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    notes = ("peak: growth of the process's memory from after loading, prompt included. overhead: against the "
             "reference's tokens/s; negative is faster.")
    return "\n".join(lines) + "\n\n" + notes


if __name__ == "__main__":
    sys.exit(main())
