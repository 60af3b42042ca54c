"""A serde for LMCache: chunks of a KV cache go to its storage as packed blocks.

Import this module (it registers itself), then name it in the configuration of an L2 adapter:

    {"type": "fs", "base_path": "/cache", "serde": {"type": "lowkv", "scheme": "lowkv4", "head_dim": 128}}

LMCache's chunks carry no head_dim, so it must be told. Tokens that fill no whole block, and every token of a
layer that the scheme keeps exact, are stored as they are. Reading gives decoded rows in the chunk's dtype."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from lmcache.v1.distributed.serde.async_processor import AsyncSerdeProcessor
from lmcache.v1.distributed.serde.base import Deserializer, Serializer
from lmcache.v1.distributed.serde.factory import register_serde_factory
from lmcache.v1.memory_management import MemoryFormat

from lowkv import blocks
from lowkv._core import BlockMemory, Error, LayerBlocks, Plan, default_scheme, parse_scheme

# Permutations to [2, layers, tokens, channels], and what is missing in the chunk's own shape.
_LAYERS, _TOKENS_FIRST, _ONE_LAYER = MemoryFormat.KV_2LTD, MemoryFormat.KV_T2D, MemoryFormat.KV_2TD
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Before a chunk's bytes: a hash of what they mean, and their checksum. Stored chunks outlive a configuration.
_MEANING, _HEADER = 28, 32


class Codec:
    """What both directions share. scheme: its text form; head_dim: channels of one head."""

    def __init__(self, scheme: str, head_dim: int):
        if head_dim < 16 or head_dim > 576 or head_dim % 16:
            raise Error(f"head_dim {head_dim}; legal: a multiple of 16 from 16 to 576")
        self.scheme, self.head_dim = parse_scheme(scheme), head_dim
        self._plans: dict[tuple[int, int], Plan | None] = {}

    def plan(self, layer: int, channels: int) -> Plan | None:
        """None for a layer that is kept exact."""
        if channels % self.head_dim:
            raise Error(f"chunks of {channels} channels are not whole heads of head_dim {self.head_dim}")
        if self.scheme.is_exact(layer):
            return None
        key = layer, channels
        if key not in self._plans:
            self._plans[key] = Plan(str(self.scheme), layer, channels // self.head_dim, self.head_dim)
        return self._plans[key]

    def packed_blocks(self, layer: int, tokens: int, channels: int) -> int:
        """How many blocks the tokens of one layer fill."""
        plan = self.plan(layer, channels)
        return tokens // plan.block_tokens if plan is not None else 0

    def size(self, layer: int, tokens: int, channels: int, itemsize: int) -> int:
        """Bytes that one layer of a chunk takes."""
        plan, count = self.plan(layer, channels), self.packed_blocks(layer, tokens, channels)
        packed = count * plan.packed_bytes if count else 0
        rest = tokens - count * plan.block_tokens if count else tokens
        return packed + 2 * rest * channels * itemsize

    def meaning(self, chunk: torch.Tensor) -> bytes:
        """Tells apart chunks, `[2, layers, tokens, channels]`, whose bytes mean something else."""
        if chunk.dtype not in _DTYPES:
            raise Error(f"a chunk of {chunk.dtype}; lowkv takes float32, float16 and bfloat16")
        about = ["lowkv-lmcache-1", str(self.scheme), self.head_dim, str(chunk.dtype), list(chunk.shape)]
        return hashlib.sha256(json.dumps(about).encode()).digest()[:_MEANING]

    def heads(self, rows: torch.Tensor) -> torch.Tensor:
        """`[tokens, channels]` to `[1, heads, tokens, head_dim]`."""
        return rows.unflatten(1, (-1, self.head_dim)).transpose(0, 1)[None]


def _layered(tensor: torch.Tensor, layout: MemoryFormat) -> torch.Tensor:
    """A view of a chunk as `[2, layers, tokens, channels]`."""
    if layout == _LAYERS and tensor.ndim == 4 and tensor.shape[0] == 2:
        return tensor
    if layout == _TOKENS_FIRST and tensor.ndim == 3 and tensor.shape[1] == 2:
        return tensor.transpose(0, 1)[:, None]
    if layout == _ONE_LAYER and tensor.ndim == 3 and tensor.shape[0] == 2:
        return tensor[:, None]
    raise Error(f"a chunk of layout {layout.name} and shape {tuple(tensor.shape)}; lowkv takes KV_2LTD, KV_T2D and "
                "KV_2TD")


@dataclass
class _Part:
    """One layer of a chunk, and where its bytes lie: its blocks first, then the rows that fill no block."""

    keys: torch.Tensor  # [tokens, channels], a view of the chunk
    values: torch.Tensor
    plan: Plan | None
    count: int  # of packed blocks
    packed: torch.Tensor  # bytes
    rest: torch.Tensor  # bytes

    @property
    def packed_tokens(self) -> int:
        return self.count * self.plan.block_tokens if self.count else 0


def _parts(codec: Codec, chunk: torch.Tensor, data: torch.Tensor) -> Iterator[_Part]:
    """The layers of a chunk, `[2, layers, tokens, channels]`, and their shares of `data`, which is made of bytes."""
    at = 0
    for layer in range(chunk.shape[1]):
        keys, values = chunk[0, layer], chunk[1, layer]
        plan, count = codec.plan(layer, keys.shape[1]), codec.packed_blocks(layer, *keys.shape)
        end = at + codec.size(layer, *keys.shape, keys.element_size())
        if end > data.numel():
            raise Error(f"{data.numel()} bytes, but the chunk's layers need {end} or more: another scheme?")
        middle = at + (count * plan.packed_bytes if count else 0)
        yield _Part(keys, values, plan, count, data[at:middle], data[middle:end])
        at = end


class LowKVSerializer(Serializer):
    """Chunks to packed blocks."""

    def __init__(self, codec: Codec):
        self.codec = codec

    def serialize(self, src, dst, key) -> int:
        """Packs the chunk `src` into the bytes `dst`; returns how many."""
        chunk = _layered(src.tensor, src.meta.fmt)
        data = dst.tensor.flatten().view(torch.uint8)
        meaning, written = self.codec.meaning(chunk), _HEADER
        for part in _parts(self.codec, chunk, data[_HEADER:]):
            whole = part.packed_tokens
            if part.count:
                held = LayerBlocks(part.plan, 1, BlockMemory())
                rows = [self.codec.heads(x[:whole]).contiguous() for x in (part.keys, part.values)]
                held.append(blocks.from_rows(*rows, part.plan.block_tokens), 1)
                packed = bytearray(b"".join(held.packed(0, block) for block in range(part.count)))
                part.packed.copy_(torch.frombuffer(packed, dtype=torch.uint8))
            rest = torch.stack([part.keys[whole:], part.values[whole:]])
            part.rest.copy_(rest.flatten().view(torch.uint8))
            written += part.packed.numel() + part.rest.numel()
        header = meaning + zlib.crc32(data[_HEADER:written].numpy()).to_bytes(_HEADER - _MEANING, "little")
        data[:_HEADER] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        return written

    def estimate_serialized_size(self, layout_desc) -> int:
        """Bytes of a packed chunk of these shapes and dtypes; exact, not an estimate."""
        total = _HEADER
        for shape, dtype in zip(layout_desc.shapes, layout_desc.dtypes, strict=True):
            # Without the layout's name: a chunk of all layers has 4 dimensions, one layer's has 3.
            layers = shape[1] if len(shape) == 4 else 1
            tokens = shape[2] if len(shape) == 4 else shape[0] if shape[1] == 2 else shape[1]
            total += sum(self.codec.size(layer, tokens, shape[-1], dtype.itemsize) for layer in range(layers))
        return total


class LowKVDeserializer(Deserializer):
    """Packed blocks to decoded chunks."""

    def __init__(self, codec: Codec):
        self.codec = codec

    def deserialize(self, src, dst, key) -> None:
        """Decodes what serialize() wrote into the chunk `dst`. Raises Error for what is damaged, too short, or
        was written with another scheme or head_dim, or for a chunk of another shape or dtype."""
        chunk = _layered(dst.tensor, dst.meta.fmt)
        data = src.tensor.flatten().view(torch.uint8)
        header = data[:_HEADER].numpy().tobytes()
        if header[:_MEANING] != self.codec.meaning(chunk):
            raise Error(f"a stored chunk that was not written by lowkv as {self.codec.scheme}, head_dim "
                        f"{self.codec.head_dim}, for {chunk.dtype} {tuple(chunk.shape)}: clear the storage after a "
                        "change of the configuration")
        parts = list(_parts(self.codec, chunk, data[_HEADER:]))
        end = _HEADER + sum(part.packed.numel() + part.rest.numel() for part in parts)
        if zlib.crc32(data[_HEADER:end].numpy()) != int.from_bytes(header[_MEANING:], "little"):
            raise Error("a stored chunk is damaged: its bytes do not match their checksum")
        for part in parts:
            whole, channels = part.packed_tokens, part.keys.shape[1]
            if part.count:
                held = LayerBlocks(part.plan, 1, BlockMemory())
                for block in part.packed.split(part.plan.packed_bytes):
                    held.append_packed(0, block.numpy().tobytes())
                halves = torch.empty(1, part.count, part.plan.exact_bytes // 2, dtype=torch.uint16)
                held.decode(0, halves, 1)
                rows = blocks.to_rows(halves, channels // self.codec.head_dim, part.plan.block_tokens)
                for decoded, to in zip(rows, (part.keys, part.values), strict=True):
                    to[:whole].copy_(decoded[0].transpose(0, 1).flatten(1))
            rest = part.rest.clone().view(chunk.dtype).view(2, -1, channels)
            part.keys[whole:], part.values[whole:] = rest[0], rest[1]


def create(arguments: dict[str, object]) -> AsyncSerdeProcessor:
    """LMCache's factory: `scheme` (default: the package's), `head_dim` (needed), `max_workers` (1)."""
    unknown = sorted(set(arguments) - {"type", "scheme", "head_dim", "max_workers"})
    if unknown:
        raise Error(f"the lowkv serde has no {unknown[0]!r}; it takes scheme, head_dim and max_workers")
    if "head_dim" not in arguments:
        raise Error("the lowkv serde needs head_dim, e.g. {'type': 'lowkv', 'head_dim': 128}")
    codec = Codec(str(arguments.get("scheme", default_scheme)), int(arguments["head_dim"]))
    return AsyncSerdeProcessor(LowKVSerializer(codec), LowKVDeserializer(codec),
                               max_workers=int(arguments.get("max_workers", 1)))


register_serde_factory("lowkv", create)
