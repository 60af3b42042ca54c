"""A serde for LMCache: chunks of a KV cache go to its storage as images of their layers (docs/images.md).

Import this module (it registers itself), then name it in the configuration of an L2 adapter:

    {"type": "fs", "base_path": "/cache", "serde": {"type": "lowkv", "scheme": "lowkv4", "head_dim": 128}}

LMCache's chunks carry no head_dim, so it must be told. Tokens that fill no whole block, and every token of a
layer that the scheme keeps exact, are stored as they are. Reading gives decoded rows in the chunk's dtype."""

from __future__ import annotations

import functools

import torch
from lmcache.v1.distributed.serde.async_processor import AsyncSerdeProcessor
from lmcache.v1.distributed.serde.base import Deserializer, Serializer
from lmcache.v1.distributed.serde.factory import register_serde_factory
from lmcache.v1.memory_management import MemoryFormat

from lowkv._core import (
    Batch,
    Error,
    Plan,
    Retention,
    RowType,
    Store,
    default_scheme,
    image_bytes,
    parse_scheme,
    read_image,
)

# Permutations to [2, layers, tokens, channels], and what is missing in the chunk's own shape.
_LAYERS, _TOKENS_FIRST, _ONE_LAYER = MemoryFormat.KV_2LTD, MemoryFormat.KV_T2D, MemoryFormat.KV_2TD
_DTYPES = {torch.float32: RowType.float32, torch.float16: RowType.float16, torch.bfloat16: RowType.bfloat16}
_PACK_ALL = Retention(window=0, sinks=0, flush=0)


class Codec:
    """What both directions share. scheme: its text form; head_dim: channels of one head."""

    def __init__(self, scheme: str, head_dim: int):
        self.scheme, self.head_dim = parse_scheme(scheme), head_dim
        self._plan = functools.cache(functools.partial(Plan, self.scheme))
        self.plan(0, head_dim, torch.float16)  # raises Error for a head_dim that can't be

    def plan(self, layer: int, channels: int, dtype: torch.dtype) -> Plan:
        """The layer's codecs, compiled for a chunk's rows. Raises Error for channels that are not whole heads, and for
        other dtypes."""
        if channels % self.head_dim:
            raise Error(f"chunks of {channels} channels are not whole heads of head_dim {self.head_dim}")
        if dtype not in _DTYPES:
            raise Error(f"a chunk of {dtype}; lowkv takes float32, float16 and bfloat16")
        return self._plan(layer, channels // self.head_dim, self.head_dim, _DTYPES[dtype])

    def size(self, layer: int, tokens: int, channels: int, dtype: torch.dtype) -> int:
        """Bytes that one layer of a chunk takes."""
        return image_bytes(self.plan(layer, channels, dtype), _PACK_ALL, tokens)

    def heads(self, rows: torch.Tensor) -> torch.Tensor:
        """`[tokens, channels]` as `[1, heads, tokens, head_dim]`."""
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
    """Chunks to images."""

    def __init__(self, codec: Codec):
        self.codec = codec

    def serialize(self, src, dst, key) -> int:
        """Packs the chunk `src` into the bytes `dst`; returns how many."""
        data, written = dst.tensor.flatten().view(torch.uint8), 0
        for layer, (keys, values) in enumerate(_layered(src.tensor, src.meta.fmt).unbind(1)):
            rows = Batch(Store(), self.codec.plan(layer, keys.shape[1], keys.dtype), _PACK_ALL, 1)
            rows.append(self.codec.heads(keys), self.codec.heads(values))
            rows.settle(0, 1)
            image = torch.from_numpy(rows.save())
            end = written + len(image)
            if end > len(data):
                raise Error(f"{len(data)} bytes, but the chunk's layers need {end} or more: another scheme?")
            data[written:end] = image
            written = end
        return written

    def estimate_serialized_size(self, layout_desc) -> int:
        """Bytes of a packed chunk of these shapes and dtypes; exact, not an estimate."""
        total = 0
        for shape, dtype in zip(layout_desc.shapes, layout_desc.dtypes, strict=True):
            # Without the layout's name: a chunk of all layers has 4 dimensions, one layer's has 3.
            layers = shape[1] if len(shape) == 4 else 1
            tokens = shape[2] if len(shape) == 4 else shape[0] if shape[1] == 2 else shape[1]
            total += sum(self.codec.size(layer, tokens, shape[-1], dtype) for layer in range(layers))
        return total


class LowKVDeserializer(Deserializer):
    """Images to decoded chunks."""

    def __init__(self, codec: Codec):
        self.codec = codec

    def deserialize(self, src, dst, key) -> None:
        """Decodes what serialize() wrote into the chunk `dst`. Raises Error for what is damaged, cut off, or was
        written with another scheme or head_dim, or for a chunk of another shape or dtype."""
        data = src.tensor.flatten().view(torch.uint8)
        for layer, (keys, values) in enumerate(_layered(dst.tensor, dst.meta.fmt).unbind(1)):
            try:
                data = data[self._read(layer, data, keys, values) :]
            except Error as error:
                raise Error(f"a stored chunk can't be read, layer {layer}: {error}. Clear the storage after a change "
                            "of the configuration") from None

    def _read(self, layer: int, data: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> int:
        """One layer from the image that `data` begins with; its bytes."""
        header = read_image(data)
        rows = Batch.load(data, Store(), self.codec.plan(layer, keys.shape[1], keys.dtype), _PACK_ALL)
        if (rows.shape[0], rows.first, rows.tokens) != (1, 0, len(keys)):
            raise Error(f"it has tokens [{rows.first}, {rows.tokens}) of {rows.shape[0]} sequences, and the chunk "
                        f"{len(keys)} of one")
        rows.read(0, self.codec.heads(keys), self.codec.heads(values), 1)
        return header.bytes


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
