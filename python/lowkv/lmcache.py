"""A serde for LMCache: chunks of a KV cache go to its storage as packed blocks.

Import this module (it registers itself), then name it in the configuration of an L2 adapter:

    {"type": "fs", "base_path": "/cache", "serde": {"type": "lowkv", "scheme": "lowkv4", "head_dim": 128}}

LMCache's chunks carry no head_dim, so it must be told. Tokens that fill no whole block, and every token of a
layer that the scheme keeps exact, are stored as they are. Reading gives decoded rows in the chunk's dtype."""

from __future__ import annotations

import torch
from lmcache.v1.distributed.serde.async_processor import AsyncSerdeProcessor
from lmcache.v1.distributed.serde.base import Deserializer, Serializer
from lmcache.v1.distributed.serde.factory import register_serde_factory
from lmcache.v1.memory_management import MemoryFormat

from lowkv import blocks
from lowkv._core import BlockMemory, Error, LayerBlocks, Plan, default_scheme, parse_scheme

# Permutations to [2, layers, tokens, channels], and what is missing in the chunk's own shape.
_LAYERS, _TOKENS_FIRST, _ONE_LAYER = MemoryFormat.KV_2LTD, MemoryFormat.KV_T2D, MemoryFormat.KV_2TD


class Codec:
    """What both directions share. scheme: its text form; head_dim: channels of one head."""

    def __init__(self, scheme: str, head_dim: int):
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

    def sizes(self, layer: int, tokens: int, channels: int, itemsize: int) -> tuple[int, int]:
        """(packed blocks, bytes) of one layer."""
        plan = self.plan(layer, channels)
        count = tokens // plan.block_tokens if plan is not None else 0
        rest = tokens - count * plan.block_tokens if plan is not None else tokens
        return count, (count * plan.packed_bytes if count else 0) + 2 * rest * channels * itemsize

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


class LowKVSerializer(Serializer):
    def __init__(self, codec: Codec):
        self.codec = codec

    def serialize(self, src, dst, key) -> int:
        chunk = _layered(src.tensor, src.meta.fmt)
        out, at = dst.tensor.flatten().view(torch.uint8), 0
        for layer in range(chunk.shape[1]):
            keys, values = chunk[0, layer], chunk[1, layer]
            plan = self.codec.plan(layer, keys.shape[1])
            count, size = self.codec.sizes(layer, *keys.shape, keys.element_size())
            packed = 0
            if count:
                packed = count * plan.block_tokens
                held = LayerBlocks(plan, 1, BlockMemory())
                rows = [self.codec.heads(x[:packed]).contiguous() for x in (keys, values)]
                held.append(blocks.from_rows(*rows, plan.block_tokens), 1)
                data = bytearray(b"".join(held.packed(0, block) for block in range(count)))
                out[at : at + len(data)].copy_(torch.frombuffer(data, dtype=torch.uint8))
            rest = torch.stack([keys[packed:], values[packed:]]).flatten().view(torch.uint8)
            out[at + size - rest.numel() : at + size].copy_(rest)
            at += size
        return at

    def estimate_serialized_size(self, layout_desc) -> int:
        total = 0
        for shape, dtype in zip(layout_desc.shapes, layout_desc.dtypes, strict=True):
            # Without the layout's name: a chunk of all layers has 4 dimensions, one layer's has 3.
            layers = shape[1] if len(shape) == 4 else 1
            tokens = shape[2] if len(shape) == 4 else shape[0] if shape[1] == 2 else shape[1]
            total += sum(self.codec.sizes(layer, tokens, shape[-1], dtype.itemsize)[1] for layer in range(layers))
        return total


class LowKVDeserializer(Deserializer):
    def __init__(self, codec: Codec):
        self.codec = codec

    def deserialize(self, src, dst, key) -> None:
        chunk = _layered(dst.tensor, dst.meta.fmt)
        data, at = src.tensor.flatten().view(torch.uint8), 0
        for layer in range(chunk.shape[1]):
            keys, values = chunk[0, layer], chunk[1, layer]
            plan = self.codec.plan(layer, keys.shape[1])
            count, size = self.codec.sizes(layer, *keys.shape, keys.element_size())
            if at + size > data.numel():
                raise Error(f"{data.numel()} bytes, but the chunk's layers need more than {at + size - 1}: stored "
                            "with another scheme")
            packed = 0
            if count:
                packed = count * plan.block_tokens
                held = LayerBlocks(plan, 1, BlockMemory())
                for start in range(at, at + count * plan.packed_bytes, plan.packed_bytes):
                    held.append_packed(0, data[start : start + plan.packed_bytes].numpy().tobytes())
                halves = torch.empty(1, count, plan.exact_bytes // 2, dtype=torch.uint16)
                held.decode(0, halves, 1)
                heads = keys.shape[1] // self.codec.head_dim
                for rows, to in zip(blocks.to_rows(halves, heads, plan.block_tokens), (keys, values), strict=True):
                    to[:packed].copy_(rows[0].transpose(0, 1).flatten(1))
            rest = 2 * (keys.shape[0] - packed) * keys.shape[1] * keys.element_size()
            tail = data[at + size - rest : at + size].clone().view(keys.dtype).view(2, -1, keys.shape[1])
            keys[packed:], values[packed:] = tail[0], tail[1]
            at += size


def create(arguments: dict[str, object]) -> AsyncSerdeProcessor:
    """LMCache's factory: `scheme` (default: the package's), `head_dim` (needed), `max_workers` (1)."""
    if "head_dim" not in arguments:
        raise Error("the lowkv serde needs head_dim, e.g. {'type': 'lowkv', 'head_dim': 128}")
    codec = Codec(str(arguments.get("scheme", default_scheme)), int(arguments["head_dim"]))
    return AsyncSerdeProcessor(LowKVSerializer(codec), LowKVDeserializer(codec),
                               max_workers=int(arguments.get("max_workers", 1)))


register_serde_factory("lowkv", create)
