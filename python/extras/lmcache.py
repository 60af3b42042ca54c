"""A serde for LMCache: chunks of a KV cache go to its storage as images of their layers (docs/images.md).

Import this module (it registers itself), then name it in the configuration of an L2 adapter:

    {"type": "fs", "base_path": "/cache", "serde": {"type": "lowkv", "scheme": "lowkv4", "head_dim": 128}}

LMCache's chunks carry no head_dim, so it must be told. Tokens that fill no whole block, and every token of a
layer that the scheme keeps exact, are stored as they are. Reading gives decoded rows in the chunk's dtype.

A chunk does not say where in its sequence it lies, so by default all of it is packed, the first tokens of a prompt
too. A scheme that names sinks= or window= keeps so many tokens exact at the beginning, in whole blocks, or the
end of every chunk."""

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
    Host,
    Plan,
    Retention,
    Store,
    default_scheme,
    image_bytes,
    parse_scheme,
    read_image,
)

_LAYERS, _FUSED, _UNNAMED = MemoryFormat.KV_2LTD, MemoryFormat.KV_MLA_FMT, MemoryFormat.UNDEFINED


class Codec:
    """What both directions share. scheme: its text form; head_dim: channels of one head."""

    def __init__(self, scheme: str, head_dim: int):
        self.scheme, self.head_dim = parse_scheme(scheme, Host.lmcache), head_dim
        self._plan = functools.cache(functools.partial(Plan, self.scheme))
        self.plan(0, head_dim, torch.float16)  # raises Error for a head_dim that can't be

    def plan(self, layer: int, channels: int, dtype: torch.dtype) -> Plan:
        """The layer's codecs, compiled for a chunk's rows. Raises Error for channels that are not whole heads, and for
        other dtypes."""
        self.require_heads(channels, 1)
        return self._plan(layer, channels // self.head_dim, self.head_dim, dtype)

    def retention(self, layer: int) -> Retention:
        """What of a chunk's layer stays exact."""
        return self.scheme.retention(layer, False)

    def size(self, layer: int, tokens: int, channels: int, dtype: torch.dtype) -> int:
        """Bytes that one layer of a chunk takes."""
        return image_bytes(self.plan(layer, channels, dtype), self.retention(layer), tokens)

    def layered(self, tensor: torch.Tensor, layout: MemoryFormat) -> torch.Tensor:
        """A view of a chunk as `[layers, 2, 1, heads, tokens, head_dim]`."""
        if layout == _UNNAMED:  # of LMCache's lazy allocator, its default with a GPU
            layout = _LAYERS
        if tensor.ndim == 4 and layout == _LAYERS and tensor.shape[0] == 2:
            return self._heads(tensor.transpose(0, 1))
        if tensor.ndim == 4 and layout in (_LAYERS, _FUSED) and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor.ndim == 3 and layout in (_LAYERS, _FUSED):  # each head's key and value side by side
            self.require_heads(tensor.shape[-1], 2)
            return tensor.unflatten(2, (-1, 2, self.head_dim)).permute(0, 3, 2, 1, 4)[:, :, None]
        raise Error(f"a chunk of layout {layout.name} and shape {tuple(tensor.shape)}; lowkv takes all layers: "
                    "KV_2LTD, and keys beside their values in KV_2LTD or KV_MLA_FMT")

    def require_heads(self, channels: int, parts: int) -> None:
        """Raises Error for channels that are not whole heads of so many parts."""
        if channels % (parts * self.head_dim):
            beside = " with keys beside values" if parts == 2 else ""
            raise Error(f"chunks of {channels} channels{beside} are not whole heads of head_dim {self.head_dim}")

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        """`[layers, 2, tokens, channels]` as layered() gives it."""
        self.require_heads(rows.shape[-1], 1)
        return rows.unflatten(3, (-1, self.head_dim)).transpose(2, 3)[:, :, None]


class LowKVSerializer(Serializer):
    """Chunks to images."""

    def __init__(self, codec: Codec):
        self.codec = codec

    def serialize(self, src, dst, key) -> int:
        """Packs the chunk `src` into the bytes `dst`; returns how many."""
        data, written = dst.tensor.flatten().view(torch.uint8), 0
        for layer, (keys, values) in enumerate(self.codec.layered(src.tensor, src.meta.fmt)):
            plan = self.codec.plan(layer, keys.shape[1] * keys.shape[3], keys.dtype)
            rows = Batch(Store(), plan, self.codec.retention(layer), 1)
            rows.append(keys, values)
            rows.pack(0, 1)
            image = torch.from_numpy(rows.save())
            end = written + len(image)
            if end > len(data):
                raise Error(f"{len(data)} bytes, but the chunk's layers need {end} or more: another scheme?")
            data[written:end] = image
            written = end
        return written

    def estimate_serialized_size(self, layout_desc) -> int:
        """Bytes of a packed chunk of these shapes and dtypes."""
        sizes = []
        for shape, dtype in zip(layout_desc.shapes, layout_desc.dtypes, strict=True):
            *planes, layers, tokens, channels = shape
            if planes != [2]:  # keys beside values
                self.codec.require_heads(channels, 2)
                channels //= 2
            sizes += [self.codec.size(layer, tokens, channels, dtype) for layer in range(layers)]
        return sum(sizes)


class LowKVDeserializer(Deserializer):
    """Images to decoded chunks."""

    def __init__(self, codec: Codec):
        self.codec = codec

    def deserialize(self, src, dst, key) -> None:
        """Decodes what serialize() wrote into the chunk `dst`. Raises Error for what is damaged, cut off, or was
        written with another scheme or head_dim, or for a chunk of another shape or dtype."""
        data = src.tensor.flatten().view(torch.uint8)
        for layer, (keys, values) in enumerate(self.codec.layered(dst.tensor, dst.meta.fmt)):
            try:
                data = data[self._read(layer, data, keys, values) :]
            except Error as error:
                raise Error(f"a stored chunk can't be read, layer {layer}: {error}. Clear the storage after a change "
                            "of the configuration") from None

    def _read(self, layer: int, data: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> int:
        """One layer from the image that `data` begins with; its bytes."""
        header, tokens = read_image(data), keys.shape[2]
        if (header.sequences, header.tokens) != (1, tokens):  # before anything is made of it
            raise Error(f"it has tokens [0, {header.tokens}) of {header.sequences} sequences, and the chunk {tokens} "
                        "of one")
        plan = self.codec.plan(layer, keys.shape[1] * keys.shape[3], keys.dtype)
        rows = Batch.load(data, Store(), plan, self.codec.retention(layer))
        if rows.first > 0:
            raise Error(f"it has its tokens from {rows.first} on, and the chunk from the first")
        rows.read(0, keys, values, 1)
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
