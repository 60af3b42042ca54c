"""Chunks that LMCache's storage brings (lowkv/lmcache.py): the images of their layers, one behind the other."""

import atheris

with atheris.instrument_imports(include=["lowkv"]):
    import lowkv
    import lowkv.lmcache
import target
import torch
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from saved import xxh64

LAYERS, TOKENS, HEAD_DIM = 2, 80, 64
SHAPES = [("KV_2LTD", (2, LAYERS, TOKENS, HEAD_DIM)), ("KV_MLA_FMT", (LAYERS, TOKENS, 2 * HEAD_DIM))]
DTYPES = [torch.float16, torch.bfloat16]
SEALING = 128  # in the first byte: make checksums right
CODECS = [lowkv.lmcache.Codec(scheme, HEAD_DIM) for scheme in ("kivi2", "lowkv2.8,sinks=4,window=8", "exact")]


def memory(shape, dtype, layout):
    raw = torch.zeros(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
    meta = MemoryObjMetadata(torch.Size(shape), dtype, 0, raw.numel(), 1, fmt=MemoryFormat[layout],
                             shapes=[torch.Size(shape)], dtypes=[dtype])
    return TensorMemoryObj(raw, meta, None)


def chunk(number):
    """An empty chunk, and its codec: the numbers 0 to 11 are all there are."""
    layout, shape = SHAPES[number % 2]
    return memory(shape, DTYPES[number // 2 % 2], layout), CODECS[number // 4 % len(CODECS)]


def stored(source, codec):
    target_bytes = memory((1 << 17,), torch.uint8, "BINARY")
    size = lowkv.lmcache.LowKVSerializer(codec).serialize(source, target_bytes, None)
    return target_bytes.tensor[:size].numpy().tobytes()


def seeds():
    for number in range(12):
        source, codec = chunk(number)
        source.tensor.normal_(generator=torch.Generator().manual_seed(number))
        for sealing in (0, SEALING):
            yield bytes([number + sealing]) + stored(source, codec)


def sealed(data):
    """With the right checksum in each image (docs/images.md)."""
    data, at = bytearray(data), 0
    while (at := data.find(b"LOWKVIMG", at)) >= 0:
        size = int.from_bytes(data[at + 16 : at + 24], "little")
        if 88 <= size <= len(data) - at and size % 64 == 0:
            data[at + 24 : at + 32] = xxh64(bytes(data[at + 32 : at + size])).to_bytes(8, "little")
        at += 8
    return bytes(data)


def try_bytes(data):
    into, codec = chunk(data[0] if data else 0)
    if data and data[0] & SEALING:
        data = sealed(data)
    src = memory((max(1, len(data) - 1),), torch.uint8, "BINARY")
    if len(data) > 1:
        src.tensor.copy_(torch.frombuffer(bytearray(data[1:]), dtype=torch.uint8))
    read = lowkv.lmcache.LowKVDeserializer(codec)
    try:
        read.deserialize(src, into, None)
    except lowkv.Error:
        return
    again = memory((1 << 17,), torch.uint8, "BINARY")
    lowkv.lmcache.LowKVSerializer(codec).serialize(into, again, None)
    read.deserialize(again, chunk(data[0] if data else 0)[0], None)


target.run(seeds, try_bytes)
