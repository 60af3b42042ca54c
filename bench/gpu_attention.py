"""Decode attention to packed caches on a GPU beside torch's own to f16 rows, in turns.

A row each scheme, tokens and batch. `call`: the median of a call in a stream of calls, whichever is slower, the host or
the GPU; `host`: what the host alone takes for it; `GPU`: what its kernels take, by torch's profiler; `faster`: how much
faster than scaled_dot_product_attention with f16 keys and values (the faster one of FlashAttention and cuDNN), kernels
against kernels; the share of the memory's bandwidth at which the cache is read (measured: a copy of 1 GiB, both ways);
and the distance from torch's result, which is large for any scheme but `exact`: the rows are random numbers. Caches
take turns, so that the GPU's own cache holds none of them. Needs torch with CUDA, and the packages lowkv and lowkv-cuda
(docs/devices/cuda.md). --device cpu tries the script where there is no GPU: its figures mean nothing."""

import argparse
import functools
import itertools
import json
import statistics
import time

import torch
from lowkv._core import Batch, Plan, RowType, Store, parse_scheme
from torch.nn.attention import SDPBackend, sdpa_kernel

CHUNK = 4096  # tokens that are made, appended and packed at a time
L2_BYTES = 150 << 20  # more than the largest GPU's, so many bytes take turns


class Clock:
    """Times what a device does, in ms."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"

    def __call__(self, work, count: int = 1) -> float:
        """Of one of `count` calls, one after the other."""
        if not self.cuda:
            begin = time.perf_counter()
            for _ in range(count):
                work()
            return 1e3 * (time.perf_counter() - begin) / count
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    def host(self, work, count: int) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            work()
        taken = 1e3 * (time.perf_counter() - begin) / count
        if self.cuda:
            torch.cuda.synchronize()
        return taken

    def kernels(self, work, count: int) -> float:
        """What the GPU's kernels of one call take."""
        if not self.cuda:
            return self(work, count)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(count):
                work()
            torch.cuda.synchronize()
        device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        return sum(event.time_range.elapsed_us() for event in device) / 1e3 / count


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


def in_turns(works):
    """One of them a call."""
    turn = itertools.cycle(works)
    return lambda: next(turn)()


@torch.no_grad()
def measure(arguments, device: torch.device, clock: Clock, per_ms: float, tokens: int, batch: int) -> list[dict]:
    heads, kv_heads = arguments.heads
    torch.manual_seed(tokens + batch)
    shape = (batch, kv_heads, tokens, arguments.head_dim)
    row_bytes = 4 * batch * kv_heads * tokens * arguments.head_dim
    rows = [
        [torch.randn(shape, dtype=torch.float16, device=device) for _ in range(2)]
        for _ in range(max(1, min(4, L2_BYTES // row_bytes)))
    ]
    query = torch.randn(batch, heads, 1, arguments.head_dim, device=device)
    half = query.half()

    def stock(keys, values):
        return torch.nn.functional.scaled_dot_product_attention(half, keys, values, enable_gqa=True)

    right = stock(*rows[0])
    stocks = in_turns([lambda kv=kv: stock(*kv) for kv in rows])
    sdpa = float("inf")
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if clock.cuda else (SDPBackend.MATH,):
        with sdpa_kernel([backend]):
            stocks()
            sdpa = min(sdpa, clock.kernels(stocks, arguments.repetitions))
    found = []
    for scheme in arguments.schemes.split(","):
        store = Store(arguments.device)
        if clock.cuda:
            store.use_stream(torch.cuda.current_stream(device).cuda_stream)
        began = time.perf_counter()
        caches = [filled(scheme, store, *rows[0])]
        encode = time.perf_counter() - began
        while len(caches) * sum(caches[0].bytes) < L2_BYTES and len(caches) < arguments.sets:
            caches.append(filled(scheme, store, *rows[0]))
        out, scale = torch.empty_like(query), arguments.head_dim**-0.5

        def attend(cache, out=out, scale=scale):
            cache.attend(query, out, 0, None, True, 0, scale, 0.0, None, 1)

        ours = in_turns([functools.partial(attend, cache) for cache in caches])
        for _ in caches:
            ours()
        count = arguments.repetitions
        kernels = clock.kernels(ours, count)
        row = {
            "scheme": scheme,
            "tokens": tokens,
            "batch": batch,
            "call_ms": statistics.median(clock(ours, count) for _ in range(5)),
            "host_ms": clock.host(ours, count),
            "gpu_ms": kernels,
            "sdpa_ms": sdpa,
            "share": sum(caches[0].bytes) / per_ms / kernels,
            "error": ((out - right).norm() / right.norm()).item(),
            "encode_ns": 1e9 * encode / (row_bytes / 2),
        }
        found.append(row)
        print(
            f"{scheme:12} {tokens:8} {batch:5} {row['call_ms']:8.3f} {row['host_ms']:8.3f} {kernels:8.3f} {sdpa:8.3f} "
            f"{sdpa / kernels:6.2f}x {row['share']:8.0%} {row['error']:8.4f} {row['encode_ns']:9.3f}",
            flush=True,
        )
        del store, caches, ours, out  # before the next one's
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="torch's name of it (default: cuda:0)")
    parser.add_argument("--schemes", default="lowkv2.8,kivi2,kivi4,turboquant4,exact", help="by commas")
    parser.add_argument("--tokens", default="4096,32768,131072")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), help="query heads and kv heads (default: 32 8)")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--sets", type=int, default=8, help="caches that take turns, at most (default: 8)")
    parser.add_argument("--json", help="a file for the rows")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    clock = Clock(device)
    per_ms = bandwidth(clock, device, 1 << 30 if clock.cuda else 1 << 26)
    name = torch.cuda.get_device_name(device) if clock.cuda else "no GPU"
    print(
        f"{name}, {per_ms / 1e6:.0f} GB/s; lowkv on {Store(arguments.device).device}; ms, encoding in ns a number"
    )
    print(
        f"{'scheme':12} {'tokens':>8} {'batch':>5} {'call':>8} {'host':>8} {'GPU':>8} {'SDPA':>8} {'faster':>7} "
        f"{'bandwidth':>9} {'error':>8} {'encoding':>9}"
    )
    found = []
    for tokens in map(int, arguments.tokens.split(",")):
        for batch in map(int, arguments.batches.split(",")):
            found += [{**row, "device": name} for row in measure(arguments, device, clock, per_ms, tokens, batch)]
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
