"""Saved prefixes, and files that were made of them."""

import struct

import lowkv
import torch
from safetensors import safe_open
from safetensors.torch import save_file

SCHEME = "lowkv2.8,window=16"
TOKENS = torch.arange(3, 103)[None].repeat(2, 4)


@torch.no_grad()
def filled(model, tokens=TOKENS, scheme=SCHEME):
    cache = lowkv.Cache.from_model(model, scheme)
    model(tokens, past_key_values=cache)
    return cache


def rewritten(path, change):
    """The file with `change(metadata, tensors)` made to it."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    change(metadata, tensors)
    damaged = path.with_name("damaged")
    save_file(tensors, damaged, metadata)
    return damaged


def xxh64(data):
    """XXH64 with seed 0, after its specification."""
    p1, p2, p3, p4, p5 = (11400714785074694791, 14029467366897019727, 1609587929392839161, 9650029242287828579,
                          2870177450012600261)
    word = 2**64 - 1

    def rotated(x, by):
        return (x << by | x >> (64 - by)) & word

    def rounded(sum_, lane):
        return rotated((sum_ + lane * p2) & word, 31) * p1 & word

    sums, at = [(p1 + p2) & word, p2, 0, -p1 & word], 0
    while at + 32 <= len(data):
        sums = [rounded(s, lane) for s, lane in zip(sums, struct.unpack_from("<4Q", data, at), strict=True)]
        at += 32
    if at:
        digest = sum(rotated(s, by) for s, by in zip(sums, (1, 7, 12, 18), strict=True)) & word
        for s in sums:
            digest = ((digest ^ rounded(0, s)) * p1 + p4) & word
    else:
        digest = p5
    digest = (digest + len(data)) & word
    while at + 8 <= len(data):
        digest = (rotated(digest ^ rounded(0, struct.unpack_from("<Q", data, at)[0]), 27) * p1 + p4) & word
        at += 8
    assert at == len(data)  # images are multiples of 64 bytes, less the 32 that are not checked
    for shift, factor in ((33, p2), (29, p3)):
        digest = (digest ^ digest >> shift) * factor & word
    return digest ^ digest >> 32
