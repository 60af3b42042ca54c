"""Decode attention to packed caches on a GPU beside torch's own to f16 rows, in turns.

A row each scheme, tokens and batch: medians in ms, how much faster than scaled_dot_product_attention with f16 keys and
values, the share of the memory's bandwidth at which the cache is read (measured: a copy of 1 GiB, both ways), and the
distance from torch's result, which is large for any scheme but `exact`: the rows are random numbers. Needs torch with
CUDA, and the packages lowkv and lowkv-cuda (docs/devices.md). --device cpu tries the script where there is no GPU: its
figures mean nothing."""

import argparse
import json
import statistics
import time

import torch
from lowkv._core import Batch, Plan, RowType, Store, parse_scheme

CHUNK = 4096  # tokens that are made, appended and packed at a time


class Clock:
    """Times what a device does, in ms."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"

    def __call__(self, work) -> float:
        if not self.cuda:
            begin = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - begin)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def bandwidth(clock: Clock, device: torch.device, size: int = 1 << 30) -> float:
    """Bytes per ms."""
    a, b = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / min(clock(lambda: b.copy_(a)) for _ in range(5))


def filled(scheme: str, store: Store, keys: torch.Tensor, values: torch.Tensor) -> Batch:
    """A batch of the rows `[batch, kv_heads, tokens, head_dim]`."""
    parsed = parse_scheme(scheme)
    batch, kv_heads, tokens, head_dim = keys.shape
    plan = Plan(parsed, 0, kv_heads, head_dim, RowType.float16)
    rows = Batch(store, plan, parsed.retention(0, False), batch)
    for first in range(0, tokens, CHUNK):
        rows.append(keys[:, :, first : first + CHUNK], values[:, :, first : first + CHUNK])
        rows.pack(0, 1)
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="torch's name of it (default: cuda:0)")
    parser.add_argument("--schemes", default="lowkv2.8,kivi2,exact", help="of lowkv schemes, in a row by commas")
    parser.add_argument("--tokens", default="4096,32768,131072")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="query heads and kv heads (default: 32 8)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--json", help="a file for the rows")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    clock = Clock(device)
    heads, kv_heads = arguments.heads
    per_ms = bandwidth(clock, device, 1 << 30 if clock.cuda else 1 << 26)
    name = torch.cuda.get_device_name(device) if clock.cuda else "no GPU"
    print(f"{name}, {per_ms / 1e6:.0f} GB/s; lowkv on {Store(arguments.device).device}")
    print(f"{'scheme':10} {'tokens':>8} {'batch':>5} {'ms':>9} {'sdpa ms':>9} {'faster':>7} {'bandwidth':>9} "
          f"{'error':>8}")
    found = []
    for tokens in map(int, arguments.tokens.split(",")):
        for batch in map(int, arguments.batches.split(",")):
            torch.manual_seed(tokens + batch)
            keys, values = (torch.randn(batch, kv_heads, tokens, arguments.head_dim, dtype=torch.float16,
                                        device=device) for _ in range(2))
            query = torch.randn(batch, heads, 1, arguments.head_dim, device=device)
            half = query.half()
            for scheme in arguments.schemes.split(","):
                store = Store(arguments.device)
                if clock.cuda:
                    store.use_stream(torch.cuda.current_stream(device).cuda_stream)
                rows, out = filled(scheme, store, keys, values), torch.empty_like(query)
                scale = arguments.head_dim**-0.5

                def ours(rows=rows, out=out, query=query, scale=scale):
                    rows.attend(query, out, 0, None, True, 0, scale, 0.0, None, 1)

                def stock(half=half, keys=keys, values=values):
                    return torch.nn.functional.scaled_dot_product_attention(half, keys, values, enable_gqa=True)

                ours(), stock()
                times = [(clock(ours), clock(stock)) for _ in range(arguments.repetitions)]
                ms, sdpa = (statistics.median(column) for column in zip(*times, strict=True))
                row = {"scheme": scheme, "tokens": tokens, "batch": batch, "ms": ms, "sdpa_ms": sdpa,
                       "share": sum(rows.bytes) / per_ms / ms,
                       "error": ((out - stock()).norm() / stock().norm()).item(), "device": name}
                found.append(row)
                del store, rows, out, ours  # before the next one's
                print(f"{scheme:10} {tokens:8} {batch:5} {ms:9.3f} {sdpa:9.3f} {sdpa / ms:6.2f}x {row['share']:8.0%} "
                      f"{row['error']:8.4f}", flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
