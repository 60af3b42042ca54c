"""Decoding on a GPU, whole models of random weights in a real shape: tokens a second with a packed cache beside
transformers' own caches (SDPA, bf16), in turns, a later chunk of the prompt, and the memory that each takes. `dynamic`
is what generate() takes by itself; `static` has its memory from the beginning, which is faster.

Needs torch with CUDA, transformers, and the packages lowkv and lowkv-cuda (docs/devices.md)."""

import argparse
import json
import statistics
import time

import lowkv
import torch
from lowkv import rows_attention
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache

STOCK = ("dynamic", "static")
CHUNKS = 4  # of which the first warms up
SHAPES = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="4b", help="of Qwen3 (default: 4b)")
    parser.add_argument("--layers", type=int, help="instead of the shape's own")
    parser.add_argument("--tokens", type=int, default=16384, help="of the prompt (default: 16384)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--schemes", default="lowkv2.8,kivi2", help="by commas")
    parser.add_argument("--steps", type=int, default=16, help="of each cache in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a later chunk of the prompt (default: 512)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", help="a file for the rows")
    arguments = parser.parse_args()
    shape = dict(SHAPES[arguments.shape])
    shape["num_hidden_layers"] = arguments.layers or shape["num_hidden_layers"]
    config = Qwen3Config(
        **shape,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=1 << 18,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = Qwen3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(config.vocab_size, (arguments.batch, arguments.tokens), device=arguments.device)

    def held(cache):
        """Bytes of its rows, or blocks."""
        if isinstance(cache, lowkv.Cache):
            return cache.exact_bytes + cache.packed_bytes
        return sum(rows.nbytes for layer in cache.layers for rows in (layer.keys, layer.values))

    def attend_with(name):
        model.config._attn_implementation = "sdpa" if name in STOCK else "lowkv"

    def fill(name):
        torch.cuda.synchronize()
        began = time.perf_counter()
        if name == "dynamic":
            cache = DynamicCache(config=config)
        elif name == "static":
            steps = (arguments.rounds + 1) * arguments.steps
            cache = StaticCache(config=config, max_cache_len=arguments.tokens + steps + 2 * CHUNKS * arguments.chunk)
        else:
            cache = lowkv.Cache.from_model(model, name)
        attend_with(name)
        model(ids, past_key_values=cache, logits_to_keep=1)
        torch.cuda.synchronize()
        prompt = time.perf_counter() - began
        return cache, prompt, held(cache)

    def decode(name, cache):
        attend_with(name)
        token = ids[:, -1:]
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(arguments.steps):
            token = model(token, past_key_values=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / arguments.steps

    def time_chunks(name, cache, many):
        """A later chunk; lowkv decodes the packed rows for chunks of `many` tokens or more."""
        attend_with(name)
        rows_attention._MANY = many
        taken = []
        for _ in range(CHUNKS):
            torch.cuda.synchronize()
            began = time.perf_counter()
            model(ids[:, : arguments.chunk], past_key_values=cache, logits_to_keep=1)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        return statistics.median(taken[1:])

    names = [*STOCK, *arguments.schemes.split(",")]
    fill("dynamic")  # warms up
    caches = {name: fill(name) for name in names}
    times = {name: [] for name in names}
    for turn in range(arguments.rounds + 1):
        for name in names:
            taken = decode(name, caches[name][0])
            if turn:  # the first round warms up
                times[name].append(taken)
    print(
        f"Qwen3-{arguments.shape} with {config.num_hidden_layers} layers, batch {arguments.batch}, after "
        f"{arguments.tokens} tokens; {torch.cuda.get_device_name(arguments.device)}"
    )
    rows = []
    for name in names:
        middle = statistics.median(times[name])
        decoded, packed = (1e3 * time_chunks(name, caches[name][0], many) for many in (1, arguments.chunk + 1))
        rows.append(
            {
                "cache": name,
                "ms": 1e3 * middle,
                "tokens_per_s": arguments.batch / middle,
                "prompt_s": caches[name][1],
                "memory_bytes": caches[name][2],
                "chunk_decoded_ms": decoded,
                "chunk_packed_ms": packed,
                **vars(arguments),
            }
        )
        print(
            f"{name:12} {1e3 * middle:8.2f} ms a step {arguments.batch / middle:8.1f} tokens/s; prompt "
            f"{caches[name][1]:6.2f} s; cache {caches[name][2] / 2**20:8.0f} MiB; a chunk of {arguments.chunk} "
            f"{decoded:8.1f} ms on decoded rows, {packed:8.1f} on packed ones",
            flush=True,
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
