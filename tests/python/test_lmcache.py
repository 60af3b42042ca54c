"""Round trips through the real lmcache package, in its layouts. deps/requirements-lmcache.txt says what of it is
installed, and where it is not."""

import select

import lowkv
import pytest
import torch

pytest.importorskip("lmcache")
import lowkv.lmcache
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import SerdeConfig, create_serde_processor
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

LAYERS, TOKENS, HEADS, HEAD_DIM = 2, 300, 2, 64
FUSED = {"KV_2LTD": (1, LAYERS, TOKENS, 2 * HEADS * HEAD_DIM), "KV_MLA_FMT": (LAYERS, TOKENS, 2 * HEADS * HEAD_DIM)}
LAYERED, ONE = ((2, layers, TOKENS, HEADS * HEAD_DIM) for layers in (LAYERS, 1))


def memory(shape, dtype, layout):
    raw = torch.zeros(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8)
    shape = torch.Size(shape)
    meta = MemoryObjMetadata(shape, dtype, 0, raw.numel(), 1, fmt=MemoryFormat[layout], shapes=[shape], dtypes=[dtype])
    return TensorMemoryObj(raw, meta, None)


def wait(fd, query, task):
    assert select.select([fd], [], [], 30)[0]
    return query(task)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme,least", [("kivi4", 0.99), ("exact", 1.0), ("kivi4,layer.0=exact", 0.99)])
def test_round_trip(dtype, scheme, least):
    serde = create_serde_processor(SerdeConfig("lowkv", {"scheme": scheme, "head_dim": HEAD_DIM}))
    source, target = (memory(LAYERED, dtype, "KV_2LTD") for _ in range(2))
    source.tensor.copy_(torch.randn(LAYERED, generator=torch.Generator().manual_seed(1)))
    size = serde.estimate_serialized_size(MemoryLayoutDesc([torch.Size(LAYERED)], [dtype]))
    stored = memory((size,), torch.uint8, "BINARY")
    key = ObjectKey(b"chunk", "model", 0)
    task = serde.submit_serialize([source], [stored], [key])
    assert wait(serde.get_serialize_event_fd(), serde.query_serialize_result, task)
    task = serde.submit_deserialize([stored], [target], [key])
    assert wait(serde.get_deserialize_event_fd(), serde.query_deserialize_result, task)
    serde.close()
    got, want = target.tensor.float(), source.tensor.float()
    if scheme == "exact":
        assert torch.equal(got, want)
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) >= least * 0.9999
    assert torch.equal(got[..., -12:, :], want[..., -12:, :])  # 300 = 9 * 32 + 12
    if scheme == "kivi4":
        assert size < 0.45 * source.tensor.nbytes


@pytest.mark.parametrize("layout,shape", [("KV_2TD", (2, TOKENS, 128)), ("KV_T2D", (TOKENS, 2, 128))])
def test_chunks_of_one_layer_are_refused(layout, shape):
    """They don't say of which."""
    write = lowkv.lmcache.LowKVSerializer(lowkv.lmcache.Codec("kivi4", HEAD_DIM))
    with pytest.raises(lowkv.Error, match=f"a chunk of layout {layout} .*lowkv takes all layers"):
        write.serialize(memory(shape, torch.float16, layout), memory((400000,), torch.uint8, "BINARY"), None)


def stored_and_read(scheme, source):
    """Bytes, and what a chunk is read back as."""
    codec = lowkv.lmcache.Codec(scheme, HEAD_DIM)
    shape, layout = source.tensor.shape, source.meta.fmt.name
    write, target = lowkv.lmcache.LowKVSerializer(codec), memory(shape, source.tensor.dtype, layout)
    size = write.estimate_serialized_size(MemoryLayoutDesc([shape], [source.tensor.dtype]))
    stored = memory((size,), torch.uint8, "BINARY")
    written = write.serialize(source, stored, None)
    assert written == size
    lowkv.lmcache.LowKVDeserializer(codec).deserialize(stored, target, None)
    return written, target.tensor


@pytest.mark.parametrize("layout", FUSED)
@pytest.mark.parametrize("scheme", ["exact", "kivi4", "lowkv4", "kivi4,layer.1=exact"])
def test_keys_beside_their_values_are_the_same_rows(layout, scheme):
    """Newer vLLM has one plane, kv_size 1: of each head the key, then the value."""
    plain, fused = memory(LAYERED, torch.bfloat16, "KV_2LTD"), memory(FUSED[layout], torch.bfloat16, layout)
    plain.tensor.normal_(generator=torch.Generator().manual_seed(1))

    def beside(rows):
        return rows.unflatten(3, (HEADS, HEAD_DIM)).permute(1, 2, 3, 0, 4).flatten(2)

    fused.tensor.copy_(beside(plain.tensor).reshape(FUSED[layout]))
    (size, want), (fused_size, got) = stored_and_read(scheme, plain), stored_and_read(scheme, fused)
    assert size == fused_size
    assert torch.equal(got, beside(want).reshape(got.shape))
    codec = lowkv.lmcache.Codec(scheme, 96)
    with pytest.raises(lowkv.Error, match="256 channels with keys beside values are not whole heads of head_dim 96"):
        lowkv.lmcache.LowKVSerializer(codec).serialize(fused, fused, None)


@pytest.mark.parametrize("shape", [LAYERED, *FUSED.values()])
def test_chunks_without_a_layout_have_all_layers(shape):
    """LMCache's lazy allocator, which is its default where memory can be pinned, names no layout."""
    named, unnamed = (memory(shape, torch.bfloat16, layout) for layout in ("KV_2LTD", "UNDEFINED"))
    for source in (named, unnamed):
        source.tensor.normal_(generator=torch.Generator().manual_seed(1))
    (size, want), (unnamed_size, got) = stored_and_read("kivi4", named), stored_and_read("kivi4", unnamed)
    assert size == unnamed_size
    assert torch.equal(got, want)


@pytest.mark.parametrize("scheme,first,last", [("lowkv2.8", 0, 0), ("lowkv2.8,sinks=5,window=20", 128, 20),
                                               ("lowkv2.8,sinks=0,window=0", 0, 0), ("kivi2,sinks=40", 64, 0),
                                               ("kivi2,window=7", 0, 7), ("lowkv2.8,window=900", TOKENS, 0)])
def test_sinks_and_window_are_followed_where_they_are_named(scheme, first, last):
    source = memory(LAYERED, torch.bfloat16, "KV_2LTD")
    source.tensor.normal_(generator=torch.Generator().manual_seed(1))
    _, got = stored_and_read(scheme, source)
    same = (got == source.tensor).all(3).all(1).all(0)
    assert same[:first].all() and same[TOKENS - last :].all()
    assert first == TOKENS or not same[first]
    with pytest.raises(lowkv.Error, match="flush= is not served in LMCache's chunks; leave that out"):
        lowkv.lmcache.Codec("kivi2,flush=64", HEAD_DIM)


def test_wrong_configurations_are_refused():
    with pytest.raises(lowkv.Error, match="needs head_dim"):
        create_serde_processor(SerdeConfig("lowkv", {}))
    source = memory(ONE, torch.float32, "KV_2LTD")
    short = memory((5000,), torch.uint8, "BINARY")
    with pytest.raises(lowkv.Error, match="a stored chunk can't be read, layer 0: image: this is none"):
        lowkv.lmcache.LowKVDeserializer(lowkv.lmcache.Codec("kivi4", HEAD_DIM)).deserialize(short, source, None)
    with pytest.raises(lowkv.Error, match=r"[0-9]+ bytes, but the chunk's layers need"):
        lowkv.lmcache.LowKVSerializer(lowkv.lmcache.Codec("kivi4", HEAD_DIM)).serialize(source, short, None)
    with pytest.raises(lowkv.Error, match="no 'scehme'; it takes scheme, head_dim"):
        create_serde_processor(SerdeConfig("lowkv", {"scehme": "kivi2", "head_dim": HEAD_DIM}))
    with pytest.raises(lowkv.Error, match=r"rows of torch\.uint8; lowkv takes float32"):
        numbers = memory(ONE, torch.uint8, "KV_2LTD")
        lowkv.lmcache.LowKVSerializer(lowkv.lmcache.Codec("kivi4", HEAD_DIM)).serialize(numbers, short, None)
    codec = lowkv.lmcache.Codec("kivi2", 48)
    with pytest.raises(lowkv.Error, match="not whole heads of head_dim 48"):
        codec.plan(0, 128, torch.float16)
    with pytest.raises(lowkv.Error, match="head_dim 20 is not supported"):
        lowkv.lmcache.Codec("kivi2", 20)


def test_stored_chunks_are_checked():
    Codec, Write, Read = (getattr(lowkv.lmcache, n) for n in ("Codec", "LowKVSerializer", "LowKVDeserializer"))
    source, target = (memory(ONE, torch.bfloat16, "KV_2LTD") for _ in range(2))
    source.tensor.normal_()
    stored = memory((200000,), torch.uint8, "BINARY")
    size = Write(Codec("lowkv4", HEAD_DIM)).serialize(source, stored, None)
    Read(Codec("lowkv4", HEAD_DIM)).deserialize(stored, target, None)
    for scheme, head_dim, words in (("kivi2", HEAD_DIM, "made for the scheme"),
                                    ("lowkv4", 2 * HEAD_DIM, "kv heads: 2, not 1")):
        with pytest.raises(lowkv.Error, match=f"can't be read, layer 0: image: .*{words}.*Clear the storage"):
            Read(Codec(scheme, head_dim)).deserialize(stored, target, None)
    half = memory(ONE, torch.float16, "KV_2LTD")
    with pytest.raises(lowkv.Error, match="its exact rows are bf16, not f16"):
        Read(Codec("lowkv4", HEAD_DIM)).deserialize(stored, half, None)
    short = memory((2, 1, TOKENS - 44, HEADS * HEAD_DIM), torch.bfloat16, "KV_2LTD")
    with pytest.raises(lowkv.Error, match=r"it has tokens \[0, 300\) of 1 sequences, and the chunk 256 of one"):
        Read(Codec("lowkv4", HEAD_DIM)).deserialize(stored, short, None)
    layers = memory(LAYERED, torch.bfloat16, "KV_2LTD")
    with pytest.raises(lowkv.Error, match="can't be read, layer 1: image: "):
        Read(Codec("lowkv4", HEAD_DIM)).deserialize(stored, layers, None)
    for place in (*range(0, 120, 5), *range(120, size, size // 50), size - 1):
        stored.tensor[place] ^= 1
        with pytest.raises(lowkv.Error, match="can't be read, layer 0: image: "):
            Read(Codec("lowkv4", HEAD_DIM)).deserialize(stored, target, None)
        stored.tensor[place] ^= 1
    for left in (0, 80, size // 2, size - 1):
        cut = memory((left,), torch.uint8, "BINARY")
        cut.tensor.copy_(stored.tensor[:left])
        with pytest.raises(lowkv.Error, match="can't be read, layer 0: image: "):
            Read(Codec("lowkv4", HEAD_DIM)).deserialize(cut, target, None)
    Read(Codec("lowkv4", HEAD_DIM)).deserialize(stored, target, None)


def test_the_layers_of_a_chunk_are_not_mixed_up():
    Codec, Write, Read = (getattr(lowkv.lmcache, n) for n in ("Codec", "LowKVSerializer", "LowKVDeserializer"))
    source, target = (memory(LAYERED, torch.bfloat16, "KV_2LTD") for _ in range(2))
    source.tensor.normal_()
    stored = memory((400000,), torch.uint8, "BINARY")
    size = Write(Codec("lowkv4", HEAD_DIM)).serialize(source, stored, None)
    half = size // LAYERS
    stored.tensor[:size] = torch.cat([stored.tensor[half:size], stored.tensor[:half]])
    with pytest.raises(lowkv.Error, match="layer 0: image: it is of layer 1, not 0"):
        Read(Codec("lowkv4", HEAD_DIM)).deserialize(stored, target, None)
