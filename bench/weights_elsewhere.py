#!/usr/bin/env python3
"""When a GPU's weights and a packed cache in RAM are worth it: tokens a second by depth, reckoned.

    bench/weights_elsewhere.py                              the table of docs/weights-on-a-gpu.md
    bench/weights_elsewhere.py --gpu-gbs 960 --cores 16     another machine

Measured here, by `lowkv-bench attention` (2 threads): how long attention to the cache takes on this CPU, lowkv's and
ggml's to f16 rows. Reckoned from that: other core counts (in proportion, and never below the time that the bytes take
at --ram-gbs), a GPU that reads its weights and a cache of its own at --gpu-gbs, and what crosses the bus for each layer
and token (q, k and v there, the output back, f32) at its rate and --latency-us each way. With a packed cache in the
GPU's own memory (--cache-on) there are twice as many crossings, and attention takes --attention-us for 32,768 tokens:
lowkv2.8 took 22 of an H100 in a batch of 16, and 28 of its 132 multiprocessors would take five times as long. Nothing
here ran on the GPU that the table is of."""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Of the model: layers, query heads, kv heads, channels of a head, GB of Q4_K_M weights.
SHAPES = {"qwen3-4b": (36, 32, 8, 128, 2.5), "llama-3.1-8b": (32, 32, 8, 128, 4.9), "qwen3-14b": (40, 40, 8, 128, 9.0)}
BUSES = {"PCIe 3": 12, "PCIe 4": 24, "PCIe 5": 48}  # GB/s of 16 lanes, in practice


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b", help="default: %(default)s")
    parser.add_argument("--scheme", default="lowkv2.8", help="default: %(default)s")
    parser.add_argument("--depths", default="4096,16384,32768,131072", help="tokens held (default: %(default)s)")
    parser.add_argument("--gpu-gbs", type=float, default=360, help="GB/s of its memory (default: %(default)s)")
    parser.add_argument("--gpu-gb", type=float, default=12, help="its memory (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=8, help="of the CPU (default: %(default)s)")
    parser.add_argument("--ram-gbs", type=float, default=60, help="of RAM (default: %(default)s)")
    parser.add_argument("--latency-us", type=float, default=20, help="of a crossing (default: %(default)s)")
    parser.add_argument("--attention-us", type=float, default=110,
                        help="of the GPU for a layer and 32,768 packed tokens (default: %(default)s)")
    parser.add_argument("--build", type=Path, default=ROOT / "build/release", help="default: %(default)s")
    return parser.parse_args()


def attention(options, heads, kv_heads, head_dim, depth):
    """A layer's attention for one token on this machine, two threads: milliseconds and bytes, by scheme."""
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [options.build / "bin/lowkv-bench", "attention", "--op", "decode", "--peers", "f16", "-t", 2,
                   "--heads", f"{heads}/{kv_heads}", "--head-dim", head_dim, "--tokens", depth,
                   "--schemes", options.scheme, "--json", out.name]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
        return {row["scheme"]: row for row in json.load(open(out.name))}


def main():
    options = arguments()
    layers, heads, kv_heads, head_dim, weights = SHAPES[options.shape]
    crossing = 4 * head_dim * (2 * heads + 2 * kv_heads)
    f16_bytes = 4 * kv_heads * head_dim  # of a token and layer
    on_gpu = weights / options.gpu_gbs
    print(f"{crossing:,} bytes cross the bus for a layer and token\n")
    print(f"| tokens | f16 in GPU memory | `{options.scheme}` in GPU memory | `-nkvo`: f16 in RAM | " +
          " | ".join(f"`{options.scheme}` in RAM, {bus}" for bus in BUSES) + " |")
    print("|--:|" + "--:|" * (3 + len(BUSES)))
    for depth in map(int, options.depths.split(",")):
        found = attention(options, heads, kv_heads, head_dim, depth)
        cache = 1e-9 * f16_bytes * layers * depth
        fits = weights + cache + 1 <= options.gpu_gb

        def in_ram(ms, bytes_of_layer, bus):
            computed = 1e-3 * ms * 2 / options.cores
            layer = max(computed, 1e-9 * bytes_of_layer / options.ram_gbs) + 2e-6 * options.latency_us
            return 1 / (on_gpu + layers * (layer + 1e-9 * crossing / bus))

        ours, stock = found[options.scheme], found["ggml-f16"]
        packed = 1e-6 * (options.attention_us * depth / 32768 + 4 * options.latency_us)
        packed_fits = weights + 1e-9 * ours["bytes"] * layers * 1.5 + 1 <= options.gpu_gb
        cells = [f"{1 / (on_gpu + cache / options.gpu_gbs):.0f}" if fits else "does not fit",
                 f"{1 / (on_gpu + layers * packed):.0f}" if packed_fits else "does not fit",
                 f"{in_ram(stock['ms'], f16_bytes * depth, BUSES['PCIe 4']):.1f}"]
        cells += [f"{in_ram(ours['ms'], ours['bytes'], rate):.1f}" for rate in BUSES.values()]
        print(f"| {depth:,} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
