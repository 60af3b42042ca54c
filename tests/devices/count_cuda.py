#!/usr/bin/env python3
"""Counts the machine instructions of attention on tensor cores, from what nvcc made for sm_90 (make count-cuda).

A warp takes 64 tokens of a kv head in one pass of its loop. Two passes are counted, each divided by four: warp
instructions for 16 tokens.
- least: the shortest pass that makes all matrix products;
- most: the longest pass without a call. It also prefetches blocks, looks the next ones up, meets a new largest
  score and, with lowkv2.8, takes a block's means, which 128 tokens share.
Neither has masks (a call) or what comes once: tables, queries, the join. Instructions whose predicate is off count,
since they are issued. Each count has a bar: today's."""

import argparse
import functools
import heapq
import math
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import NamedTuple

HEAD_DIM = 128
ARGUMENTS = "10memories_t12lowkv_tensorPKjS2_PKfPKhjPf"  # as C++ names them
ENDS = ("BRA", "BRX", "CALL", "EXIT", "RET")  # of a block
TOKENS = 64  # LOWKV_TENSOR_CELLS


class Kernel(NamedTuple):
    scheme: str
    symbol: str
    products: int  # of the shortest pass
    least: int  # bars: warp instructions for 16 tokens
    most: int


KERNELS = (
    Kernel("lowkv2.8", "_Z18tensor_lowkv28_128" + ARGUMENTS, 96, 365, 486),
    Kernel("kivi2", "_Z16tensor_kivi2_128" + ARGUMENTS, 148, 253, 282),
    Kernel("kivi4", "_Z16tensor_kivi4_128" + ARGUMENTS, 148, 261, 291),
    Kernel("turboquant4", "_Z17tensor_table4_128" + ARGUMENTS, 96, 250, 280),
)


class Block:
    """Instructions that run one after the other, and the addresses where it goes on."""

    def __init__(self, code, following):
        self.code, self.following = code, following


def operation(text):
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0]


def is_product(text):
    return operation(text).startswith("HMMA.16816")


def functions(listing):
    """Of cuobjdump -sass: a function's instructions by address."""
    found, code = {}, {}
    for line in listing.splitlines():
        if "Function : " in line:
            code = found[line.split("Function : ")[1].strip()] = {}
        elif match := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line):
            code[int(match[1], 16)] = match[2]
    return found


def target(text):
    """Where a branch leads."""
    return int(re.search(r"(0x[0-9a-f]+)$", text)[1], 16)


def following_of(text, after):
    """Where the code goes on behind an instruction. Lanes do not part, and calls are left out: both are rare."""
    name = operation(text)
    if name.startswith("BRA") and name != "BRA.DIV":
        conditional = text.startswith("@") or not re.fullmatch(r"\S+ 0x[0-9a-f]+", text)
        return [target(text), after] if conditional else [target(text)]
    if name.startswith("CALL"):
        return []
    return [] if name.split(".")[0] in ("BRX", "EXIT", "RET") and not text.startswith("@") else [after]


def blocks_of(code):
    starts = {min(code)}
    for at, text in code.items():
        name = operation(text).split(".")[0]
        starts |= {at + 16} if name in ENDS else set()
        starts |= {target(text)} if name == "BRA" else set()
    blocks, last = {}, max(code)
    for start in starts & code.keys():
        end = start
        while end < last and end + 16 not in starts:
            end += 16
        following = [to for to in following_of(code[end], end + 16) if to in code]
        blocks[start] = Block([code[at] for at in range(start, end + 16, 16)], following)
    return blocks


def shortest_pass(blocks, products):
    """The blocks of the shortest way from one with products back to it that makes so many of them."""
    made = {at: sum(map(is_product, block.code)) for at, block in blocks.items()}
    found = []
    for first in (at for at in blocks if made[at]):
        ways = [(0, 0, first, ())]  # instructions, products, the next block, those before it
        seen = set()
        while ways:
            length, done, at, before = heapq.heappop(ways)
            if at == first and before and done == products:
                found.append((length, before))
                break
            if (done, at) in seen or (at == first and before) or done > products:
                continue
            seen.add((done, at))
            for following in blocks[at].following:
                heapq.heappush(ways, (length + len(blocks[at].code), done + made[at], following, (*before, at)))
    return min(found)[1] if found else None


def longest_pass(blocks, head):
    """The blocks of the longest way from the loop's head back to it. Loops within it are passed once."""
    @functools.cache
    def way(at):
        ways = [way(to) for to in blocks[at].following if to > at]
        ways += [(0, ())] if head in blocks[at].following else []
        length, rest = max((found for found in ways if found), default=(0, None))
        return None if rest is None else (length + len(blocks[at].code), (at, *rest))
    return way(head)[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("object", type=Path, help="tensor_128.o, or a cubin")
    parser.add_argument("--operations", action="store_true", help="print how often each one is executed, too")
    arguments = parser.parse_args()
    tools = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin"  # deps/requirements-sass.txt
    done = subprocess.run(
        [tools / "cuobjdump", "-arch", "sm_90", "-sass", "-fun", ",".join(kernel.symbol for kernel in KERNELS),
         arguments.object],
        env={"PATH": str(tools)}, capture_output=True, text=True, check=False)
    found = functions(done.stdout)
    failed = False
    for kernel in KERNELS:
        if kernel.symbol not in found:
            sys.exit(f"{arguments.object} has no {kernel.symbol} for sm_90\n{done.stderr}")
        blocks = blocks_of(found[kernel.symbol])
        shortest = shortest_pass(blocks, kernel.products)
        if shortest is None:
            sys.exit(f"{kernel.symbol}: no pass of its loop has {kernel.products} matrix products")
        said = []
        passes = (("least", shortest, kernel.least), ("most", longest_pass(blocks, min(shortest)), kernel.most))
        for word, way, bar in passes:
            operations = Counter(operation(text).split(".")[0] for at in way for text in blocks[at].code)
            count = math.ceil(operations.total() * 16 / TOKENS)
            spills = operations["LDL"] + operations["STL"]
            failed |= count > bar or (way is shortest and spills > 0)
            said.append(f"{word} {count} (bar {bar}; {count * 32 / (16 * 2 * HEAD_DIM):.2f} a number)"
                        + (f", {spills} spills" if spills else "") + (", TOO MANY" if count > bar else ""))
            if arguments.operations:
                listed = ", ".join(f"{name} {count}" for name, count in operations.most_common())
                said.append(f"\n    {listed}\n   ")
        print(f"{kernel.scheme:12}", *said)
    return failed


if __name__ == "__main__":
    sys.exit(main())
