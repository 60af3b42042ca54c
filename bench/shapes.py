#!/usr/bin/env python3
"""Decoding and prompts at depth in the shapes of real models: stock llama-server with its caches beside the plug-in.

    bench/shapes.py                                              what `make bench-shapes` runs (an hour, 20 GB of disk)
    bench/shapes.py --shapes llama-3.2-1b --depths 4096,16384    one shape, shorter

Speed and memory depend on a model's shape, not on its training. So the models have random Q4_0 weights (written once
into the set-up's cache), and the cache is filled by restoring a slot file: the rows of a prompt of 128 tokens,
repeated up to the depth with other low bits. Each cache has a llama-server of its own; at each depth they take turns.
`decode` is the rate of --tokens tokens, `prompt` that of --prompt more tokens behind what the cache holds, `memory` the
server's peak resident memory, weights included. `f16-off` is stock's f16 cache without flash attention (-fa off): on
many CPUs the faster of stock's two ways. ggml's flash attention has a faster path from 64 queries on, so a --prompt
below that flatters others. `ik-q8_0` and the like are ik_llama.cpp's types: --ik names its llama-server, which reads
a prompt of the whole depth, as its slot files differ."""

import argparse
import json
import os
import random
import re
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from llama_tools import turns

ROOT = Path(__file__).resolve().parent.parent
STOCK = {"f16": ("f16", "on"), "f16-off": ("f16", "off"), "q8_0": ("q8_0", "on"), "q4_0": ("q4_0", "on")}  # -ctk, -fa
PATIENCE = 3600  # seconds for one request: stock reads few tokens a second at depth
SEED = 128  # tokens of the prompt whose rows are repeated


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int


SHAPES = {
    "llama-3.2-1b": Shape(16, 2048, 32, 8, 64, 8192),
    "qwen3-4b": Shape(36, 2560, 32, 8, 128, 9728),
    "llama-3.1-8b": Shape(32, 4096, 32, 8, 128, 14336),
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", default=ROOT / "build/release", type=Path, help="default: %(default)s")
    parser.add_argument("-t", "--threads", type=int, default=min(os.cpu_count() or 1, 2), help="default: %(default)s")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="default: %(default)s")
    parser.add_argument("--caches", default="f16,f16-off,q8_0,lowkv2.8,lowkv4",
                        help="stock's caches and schemes (default: %(default)s)")
    parser.add_argument("--depths", default="4096,16384,32768", help="tokens in the cache (default: %(default)s)")
    parser.add_argument("-n", "--tokens", type=int, default=32, help="tokens to decode (default: %(default)s)")
    parser.add_argument("-p", "--prompt", type=int, default=512, help="prompt tokens at depth (default: %(default)s)")
    parser.add_argument("-r", "--rounds", type=int, default=1, help="rounds of turns (default: %(default)s)")
    parser.add_argument("--ik", type=Path, metavar="PROGRAM", help="ik_llama.cpp's llama-server, for ik-q8_0 and such")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--out", type=Path, help="write shapes.png and .csv into this folder")
    return parser.parse_args()


def write_model(source, shape, name, path):
    """A GGUF of random Q4_0 weights in a shape, with the vocabulary of `source`."""
    import gguf
    import numpy as np

    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(path, "llama")
    fields = {"block_count": shape.layers, "embedding_length": shape.width, "attention.head_count": shape.heads,
              "attention.head_count_kv": shape.kv_heads, "feed_forward_length": shape.inner, "context_length": 131072,
              "rope.dimension_count": shape.head_dim, "attention.key_length": shape.head_dim,
              "attention.value_length": shape.head_dim}
    fields = {f"llama.{key}": value for key, value in fields.items()}
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in (*fields, "general.architecture", "general.name"):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    writer.add_name(f"{name}, random weights")
    for key, value in fields.items():
        writer.add_uint32(key, value)
    codes = np.random.default_rng(0).integers(0, 256, size=(1 << 20, 16), dtype=np.uint8)

    def matrix(tensor, rows, columns):
        blocks = np.empty((rows * columns // 32, 18), np.uint8)
        blocks[:, :2] = np.frombuffer(np.float16(1 / (4.6 * columns**0.5)).tobytes(), np.uint8)  # variance 1 / columns
        for at in range(0, len(blocks), len(codes)):
            blocks[at:at + len(codes), 2:] = codes[:len(blocks) - at]
        writer.add_tensor(f"{tensor}.weight", blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def norm(tensor):
        writer.add_tensor(f"{tensor}.weight", np.ones(shape.width, np.float32))

    matrix("token_embd", len(reader.fields["tokenizer.ggml.tokens"].data), shape.width)
    norm("output_norm")
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        norm(block + "attn_norm")
        norm(block + "ffn_norm")
        matrix(block + "attn_q", shape.heads * shape.head_dim, shape.width)
        for part in ("attn_k", "attn_v"):
            matrix(block + part, shape.kv_heads * shape.head_dim, shape.width)
        matrix(block + "attn_output", shape.width, shape.heads * shape.head_dim)
        for part in ("ffn_gate", "ffn_up"):
            matrix(block + part, shape.inner, shape.width)
        matrix(block + "ffn_down", shape.width, shape.inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model(tools, name):
    """The shape's model in the set-up's cache, made if it is not there."""
    path = Path(tools.PATHS["LOWKV_CACHE_DIR"]) / "shapes" / f"{name}.gguf"
    if not path.exists():
        print(f"making {path}", file=sys.stderr)
        path.parent.mkdir(exist_ok=True)
        draft = path.with_suffix(".new")
        write_model(tools.MODEL, SHAPES[name], name, draft)
        draft.replace(path)
    return path


def grow(seed, out, depth, shape):
    """A slot file of `depth` tokens out of one of SEED tokens (llama_kv_cache::state_write). Returns the tokens."""
    import numpy as np

    data, chance = seed.read_bytes(), np.random.default_rng(1)
    magic, version, count = struct.unpack_from("<3I", data)
    at = 12 + 4 * count
    streams, cells = struct.unpack_from("<2I", data, at)
    at += 8 + 12 * cells  # position, number of sequences (1), sequence
    transposed, layers = struct.unpack_from("<I", data, at)[0], 0
    end = data.index(struct.pack("<iQ", *row_type(data, at, shape)), at)  # after the flags, which differ by version
    tokens = chance.integers(100, 40000, depth, dtype=np.int32)
    meta = np.zeros((depth, 3), np.int32)
    meta[:, 0], meta[:, 1] = np.arange(depth), 1
    with open(out, "wb") as file:
        file.write(struct.pack("<3I", magic, version, depth) + tokens.tobytes())
        file.write(struct.pack("<2I", streams, depth) + meta.tobytes() + data[at:end])
        at = end
        while at < len(data):
            kind, size = struct.unpack_from("<iQ", data, at)
            rows = np.frombuffer(data, np.uint8, size * cells, at + 12).reshape(cells, size)
            grown = rows[chance.integers(0, cells, depth)]
            if kind == 1:  # f16: other low bits, so that rows differ
                grown[:, ::2] ^= chance.integers(0, 8, size=(depth, size // 2), dtype=np.uint8)
            file.write(data[at:at + 12] + grown.tobytes())
            at += 12 + size * cells
            layers += 1
            if transposed and layers == shape.layers:
                break
        while at < len(data):  # values without flash attention: by channel
            kind, size, channels = struct.unpack_from("<iII", data, at)
            columns = np.frombuffer(data, np.uint8, size * channels * cells, at + 12).reshape(channels, cells, size)
            grown = columns[:, chance.integers(0, cells, depth)]
            grown[:, :, 0] ^= chance.integers(0, 8, size=(channels, depth), dtype=np.uint8)
            file.write(data[at:at + 12] + grown.tobytes())
            at += 12 + size * channels * cells
    return tokens.tolist()


def row_type(data, at, shape):
    """The type and bytes of the first row that is described after `at`."""
    for start in range(at, at + 64, 4):
        kind, size = struct.unpack_from("<iQ", data, start)
        width = shape.kv_heads * shape.head_dim
        if (kind, size) in ((1, 2 * width), (8, 34 * width // 32), (2, 18 * width // 32)):  # f16, q8_0, q4_0
            return kind, size
    raise SystemExit("shapes.py: this llama-server's slot files have a form that the script does not know")


def fill(folder, depth, shape, complete, post):
    """Restores a slot file of `depth` tokens, and returns them."""
    chance = random.Random(2)
    complete([chance.randrange(100, 40000) for _ in range(SEED + 1)], 1)
    post("/slots/0?action=save", {"filename": "seed.bin"})
    tokens = grow(folder / "seed.bin", folder / "deep.bin", depth, shape)
    post("/slots/0?action=restore", {"filename": "deep.bin"})
    (folder / "deep.bin").unlink()
    return tokens


def restore(post):
    """Seconds that the slot's own state takes to come back."""
    post("/slots/0?action=save", {"filename": "own.bin"})
    post("/slots/0?action=erase", None)
    start = time.monotonic()
    post("/slots/0?action=restore", {"filename": "own.bin"})
    return time.monotonic() - start


def measure(tools, options, name, cache, depth):
    stock, ik = cache in STOCK, cache.startswith("ik-")
    kind, flash = STOCK.get(cache, (cache.removeprefix("ik-"), "on"))
    words = ["-t", options.threads, "-np", 1, "-fa", flash, "-b", 512, "-cram", 0, "-c", depth + 1024,
             *(["-ctk", kind, "-ctv", kind] if stock or ik else [])]
    with tempfile.TemporaryDirectory(dir=tools.PATHS["LOWKV_CACHE_DIR"]) as temporary:
        folder = Path(temporary)
        with tools.server(folder, *words, "--slot-save-path", folder, scheme=None if stock or ik else cache,
                          model=model(tools, name), program=options.ik if ik else None) as server:

            def post(path, body):
                status, answer = server.request("POST", path, body, timeout=PATIENCE)
                if status != 200:
                    raise SystemExit(f"shapes.py: llama-server's answer to {path} is {status}: {answer}")
                return answer

            def complete(tokens, answer):
                return post("/completion", {"prompt": tokens, "n_predict": answer, "ignore_eos": True,
                                            "temperature": 0, "id_slot": 0, "cache_prompt": True})["timings"]

            chance = random.Random(3)
            if ik:
                tokens = [chance.randrange(100, 40000) for _ in range(depth)]
                complete(tokens, 1)
            else:
                tokens = fill(folder, depth, SHAPES[name], complete, post)
            decode = complete([*tokens, 1000], options.tokens + 1)
            more = [chance.randrange(100, 40000) for _ in range(options.prompt)]
            prompt = complete([*tokens, *more], 1)
            if decode["prompt_n"] > 2 or prompt["prompt_n"] > options.prompt + 1:
                raise SystemExit(f"shapes.py: {cache} did not take the restored tokens (prompt_n {decode['prompt_n']})")
            if not (stock or ik) and "lowkv: active" not in server.log_text():
                raise SystemExit(f"shapes.py: {cache} did not become active")
            return {"decode": decode["predicted_per_second"], "prompt": prompt["prompt_per_second"],
                    "memory": peak(server), "restore": float("nan") if ik else restore(post)}


def peak(server):
    """The largest resident memory so far, in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def draw(rows, shapes, caches, out):
    """Decoding speed by depth, one picture for each shape."""
    import pictures

    figure, axes = pictures.side_by_side(len(shapes))
    for axis, shape in zip(axes, shapes, strict=True):
        for cache, colour, marker in zip(caches, pictures.COLOURS, pictures.MARKERS, strict=False):
            points = [(row["depth"], row["decode"]) for row in rows if (row["shape"], row["cache"]) == (shape, cache)]
            whose = "stock " if cache in STOCK else "" if cache.startswith("ik-") else "lowkv: "
            axis.plot(*zip(*points, strict=True), marker=marker, color=colour, label=whose + cache)
        axis.set(title=f"shape of {shape}", xlabel="tokens in the cache", ylabel="decoded tokens per second",
                 xscale="log", yscale="log")
        depths = sorted({row["depth"] for row in rows})
        axis.set_xticks(depths, [f"{depth // 1024}k" for depth in depths], minor=False)
        axis.minorticks_off()
        least, most = axis.get_ylim()
        ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if least <= tick <= most]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes[0].legend(frameon=False)
    flat = [{key: value for key, value in row.items() if key != "rounds"} for row in rows]
    pictures.save(figure, flat, out, "shapes")


def main():
    options = arguments()
    os.environ["LOWKV_BUILD_DIR"] = str(options.build)
    sys.path.insert(0, str(ROOT / "tests/e2e"))
    import plugin_tools as tools

    for name in options.shapes.split(","):
        if name not in SHAPES:
            sys.exit(f"shapes.py: no shape {name}; there are: {', '.join(SHAPES)}")
    caches, rows = options.caches.split(","), []
    print("| shape | depth | cache | decode tokens/s | of the first | prompt tokens/s | of the first | peak GiB | "
          "restore, s |\n|---|--:|---|--:|--:|--:|--:|--:|--:|", flush=True)
    for name in options.shapes.split(","):
        for depth in map(int, options.depths.split(",")):
            found = {cache: [] for cache in caches}
            for turn in range(options.rounds):
                for cache in turns(caches, turn):
                    print(f"{name}, {depth:,} tokens, round {turn + 1}/{options.rounds}: {cache}", file=sys.stderr)
                    found[cache].append(measure(tools, options, name, cache, depth))
            middle = {cache: {key: statistics.median(one[key] for one in runs) for key in runs[0]}
                      for cache, runs in found.items()}
            for cache, row in middle.items():
                of = {key: row[key] / middle[caches[0]][key] for key in ("decode", "prompt")}
                rows.append({"shape": name, "depth": depth, "cache": cache, **row, "rounds": found[cache]})
                print(f"| {name} | {depth:,} | {cache} | {row['decode']:.2f} | {of['decode']:.1f}x | "
                      f"{row['prompt']:.1f} | {of['prompt']:.1f}x | {row['memory'] / 2**30:.2f} | "
                      f"{row['restore']:.0f} |", flush=True)
    if options.out:
        draw(rows, options.shapes.split(","), caches, options.out)
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
