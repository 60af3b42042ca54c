"""A saved prefix goes on exactly where it was, and nothing else is taken for one."""

import copy
import struct
import threading

import lowkv
import numpy as np
import pytest
import torch
from families import build
from lowkv._core import read_image
from safetensors import safe_open
from safetensors.torch import save_file

SCHEME = "lowkv2.8,window=16"
TOKENS = torch.arange(3, 103)[None].repeat(2, 4)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request):
    return build(request.param)[0]


@torch.no_grad()
def filled(model, tokens=TOKENS, scheme=SCHEME):
    cache = lowkv.Cache.from_model(model, scheme)
    model(tokens, past_key_values=cache)
    return cache


@pytest.fixture
def saved(model, tmp_path):
    cache = filled(model)
    cache.save(tmp_path / "prefix")
    return cache, tmp_path / "prefix"


@torch.no_grad()
def test_it_goes_on_where_it_was(model, saved):
    cache, path = saved
    loaded = lowkv.Cache.load(path, model)
    assert loaded.scheme == cache.scheme and loaded.packed_bytes == cache.packed_bytes > 0
    for part in TOKENS[:, :150].split(50, dim=1):
        assert torch.equal(model(part, past_key_values=loaded).logits, model(part, past_key_values=cache).logits)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_keep_their_dtype(tmp_path, dtype):
    half, _ = build("llama", dtype)
    cache = filled(half)
    cache.save(tmp_path / "prefix")
    loaded = lowkv.Cache.load(tmp_path / "prefix", half)
    assert all(torch.equal(a, b) and a.dtype is dtype for a, b in zip(loaded.full(1), cache.full(1), strict=True))
    assert torch.equal(half(TOKENS[:, :3], past_key_values=loaded).logits,
                       half(TOKENS[:, :3], past_key_values=cache).logits)


def test_others_are_refused(model, saved, tmp_path):
    _, path = saved
    with pytest.raises(lowkv.Error, match=r"saved with scheme lowkv2.8,window=16, not kivi2"):
        lowkv.Cache.load(path, model, scheme="kivi2")
    with pytest.raises(lowkv.Error, match="another model"):
        lowkv.Cache.load(path, build("qwen3")[0])
    with pytest.raises(FileNotFoundError):
        lowkv.Cache.load(tmp_path / "nothing", model)


def test_damage_anywhere_is_noticed(model, saved, tmp_path):
    """A bit in the safetensors header, its metadata, an image's header or what the image holds."""
    _, path = saved
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    damaged = tmp_path / "damaged"
    places = [*range(0, end, 3), *range(end, end + 256, 7), *range(end, len(data), len(data) // 97), len(data) - 1]
    for place in places:
        damaged.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        if np.array_equal(images(damaged), images(path)) and meaning(damaged) == meaning(path):
            continue  # of what is no more than spelling, as the order of names
        with pytest.raises(lowkv.Error, match="damaged"):
            lowkv.Cache.load(damaged, model)


def meaning(path):
    """Format, scheme and model, or None."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: (file.metadata() or {}).get(name) for name in ("format", "scheme", "model")}
    except Exception:
        return None


def images(path):
    try:
        with safe_open(path, framework="pt") as file:
            return [file.get_tensor(name).numpy().tobytes() for name in "01"]
    except Exception:
        return []


@pytest.mark.parametrize("left", [0, 7, 8, 100, 0.3, 0.7, 0.999])
def test_a_file_that_was_cut_off_is_noticed(model, saved, tmp_path, left):
    data = saved[1].read_bytes()
    (tmp_path / "short").write_bytes(data[: left if isinstance(left, int) else int(left * len(data))])
    with pytest.raises(lowkv.Error, match="not a saved cache, or is damaged"):
        lowkv.Cache.load(tmp_path / "short", model)


def test_the_configuration_is_a_part_of_the_model(model, saved):
    _, path = saved
    other = copy.deepcopy(model)
    other.config.rms_norm_eps *= 2
    with pytest.raises(lowkv.Error, match="another model"):
        lowkv.Cache.load(path, other)


def test_a_class_loads_its_own(tmp_path):
    model, _ = build("llama")
    cache = lowkv.KiviCache.from_model(model)
    with torch.no_grad():
        model(TOKENS, past_key_values=cache)
    cache.save(tmp_path / "kivi")
    assert lowkv.KiviCache.load(tmp_path / "kivi", model).get_stats()["tokens"] == TOKENS.shape[1]


def rewritten(path, change):
    """The file with `change(metadata, tensors)` made to it."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    change(metadata, tensors)
    damaged = path.with_name("damaged")
    save_file(tensors, damaged, metadata)
    return damaged


def image_of(tokens=TOKENS, dtype=torch.float32, scheme=SCHEME):
    """Layer 1's image becomes one of a cache with other tokens, and so on."""
    def apply(model, tensors):
        other = filled(copy.deepcopy(model).to(dtype), tokens, scheme)
        tensors["1"] = torch.from_numpy(other.layers[1].rows.save())
    return apply


def tensor(change):
    def apply(model, tensors):
        tensors["1"] = change(tensors["1"]).contiguous()
    return apply


def swapped(model, tensors):
    tensors["0"], tensors["1"] = tensors["1"], tensors["0"]


ANOTHER = "was made for the scheme"  # gemma2's layer 0 slides, and has no sinks
WRONG = {
    "layers: swapped": (swapped, f"layer 0: image: it (is of layer 1, not 0|{ANOTHER})"),
    "layers: one twice": (lambda model, t: t.update({"1": t["0"].clone()}),
                          f"layer 1: image: it (is of layer 0, not 1|{ANOTHER})"),
    "layers: one missing": (lambda model, t: t.pop("0"), "no image of layer '0'"),
    "layers: the last missing": (lambda model, t: t.pop("1"), "no image of layer '1'"),
    "layers: one too many": (lambda model, t: t.update({"2": t["1"].clone()}), "a tensor '2'"),
    "a tensor of format 2": (lambda model, t: t.update({"0.keys": torch.zeros(1)}), "a tensor '0.keys'"),
    "a layer: of a smaller batch": (image_of(TOKENS[:1]), "its layers differ in tokens, batch or dtype"),
    "a layer: of a larger batch": (image_of(TOKENS.repeat(2, 1)), "its layers differ in tokens, batch or dtype"),
    "a layer: fewer tokens": (image_of(TOKENS[:, :-1]), "its layers differ in tokens, batch or dtype"),
    "a layer: fewer blocks": (image_of(TOKENS[:, :100]), "its layers differ in tokens, batch or dtype"),
    "a layer: float16": (image_of(dtype=torch.float16), "its layers differ in tokens, batch or dtype"),
    "a layer: bfloat16": (image_of(dtype=torch.bfloat16), "its layers differ in tokens, batch or dtype"),
    "a layer: another codec": (image_of(scheme="kivi2,window=16"), "it was made for the scheme"),
    "a layer: another window": (image_of(scheme="lowkv2.8,window=32"), "it was made for the scheme"),
    "a layer: other sinks": (image_of(scheme="lowkv2.8,window=16,sinks=129"), "it was made for the scheme"),
    "a layer: exact": (image_of(scheme="exact"), "it was made for the scheme"),
    "tensor: empty": (tensor(lambda x: x[:0]), "image: 0 bytes are too few"),
    "tensor: cut off": (tensor(lambda x: x[:-64]), "cut off or damaged"),
    "tensor: with more behind": (tensor(lambda x: torch.cat([x, x[:64]])), "an image of [0-9]+ bytes in [0-9]+"),
    "tensor: two dimensions": (tensor(lambda x: x[None]), r"torch.uint8 \(1, [0-9]+\) is no image"),
    "tensor: no dimensions": (tensor(lambda x: x[0]), r"torch.uint8 \(\) is no image"),
    "tensor: of int8": (tensor(lambda x: x.view(torch.int8)), "torch.int8 .* is no image"),
    "tensor: of floats": (tensor(lambda x: x.view(torch.float32)), "torch.float32 .* is no image"),
    "tensor: zeros": (tensor(torch.zeros_like), "image: these bytes are none"),
}


@pytest.mark.parametrize("change,words", WRONG.values(), ids=WRONG.keys())
def test_what_does_not_belong_together_is_refused(model, saved, change, words):
    damaged = rewritten(saved[1], lambda _, tensors: change(model, tensors))
    with pytest.raises(lowkv.Error, match=f"{damaged}: .*{words}"):
        lowkv.Cache.load(damaged, model)


METADATA = {
    "format: of before": (lambda m: m.update(format="lowkv-cache-2"), "format 'lowkv-cache-2'.*reads 'lowkv-cache-3'"),
    "format: missing": (lambda m: m.pop("format"), "format None"),
    "scheme: missing": (lambda m: m.pop("scheme"), "it has no 'scheme'"),
    "scheme: another": (lambda m: m.update(scheme="lowkv2.8,window=32"), "it was made for the scheme"),
    "scheme: none": (lambda m: m.update(scheme="lowkv99"), "lowkv99"),
    "scheme: too many layers": (lambda m: m.update(scheme=f"{SCHEME},layer.7=exact"), "override of layer 7"),
    "model: missing": (lambda m: m.pop("model"), "it has no 'model'"),
    "model: another": (lambda m: m.update(model=m["model"][::-1]), "saved for another model"),
}


@pytest.mark.parametrize("change,words", METADATA.values(), ids=METADATA.keys())
def test_metadata_that_says_something_else_is_refused(model, saved, change, words):
    damaged = rewritten(saved[1], lambda metadata, _: change(metadata))
    with pytest.raises(lowkv.Error, match=f"{damaged}: .*{words}"):
        lowkv.Cache.load(damaged, model)


@torch.no_grad()
@pytest.mark.parametrize("scheme,taken", [(SCHEME, False), (f"{SCHEME},sinks=128", True), (f"{SCHEME},sinks=0", True),
                                          ("exact", True)])
def test_a_file_of_before_sinks_were_whole_blocks(model, tmp_path, scheme, taken):
    """It has them as tokens. Where that is the same it is taken."""
    cache = lowkv.Cache.from_model(model, scheme)
    for layer in cache.layers:
        layer.retention = layer.scheme.retention(layer.index, layer.is_sliding)
    model(TOKENS, past_key_values=cache)
    cache.save(tmp_path / "prefix")
    if taken:
        loaded = lowkv.Cache.load(tmp_path / "prefix", model)
        assert torch.equal(model(TOKENS[:, :9], past_key_values=loaded).logits,
                           model(TOKENS[:, :9], past_key_values=cache).logits)
    else:
        with pytest.raises(lowkv.Error, match="it was made for the scheme .*,sinks=5,flush=0, not .*,sinks=128,flush=0"):
            lowkv.Cache.load(tmp_path / "prefix", model)


def test_a_rewritten_file_is_otherwise_taken(model, saved):
    loaded = lowkv.Cache.load(rewritten(saved[1], lambda *_: None), model)
    assert loaded.get_seq_length() == TOKENS.shape[1]


def test_writers_of_one_path_do_not_meet(tmp_path):
    """Threads, as other processes do; whoever reads meanwhile has a whole file, and no draft stays."""
    model, _ = build("llama")
    caches, path, found = [filled(model, TOKENS[:1, :n], "exact") for n in (40, 300)], tmp_path / "prefix", []
    caches[0].save(path)

    def repeated(call):
        try:
            for _ in range(60):
                call()
        except Exception as error:
            found.append(error)

    def load():
        assert lowkv.Cache.load(path, model).get_seq_length() in (40, 300)

    threads = [threading.Thread(target=repeated, args=(call,))
               for call in (lambda: caches[0].save(path), lambda: caches[1].save(path), load)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [] and list(tmp_path.iterdir()) == [path]


def test_a_save_that_fails_leaves_the_old_file(model, saved, monkeypatch):
    cache, path = saved
    before = path.read_bytes()

    def broken(images, draft, metadata):
        draft.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(lowkv.saving, "save_file", broken)
    with pytest.raises(KeyboardInterrupt):
        cache.save(path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_saved_file_is_on_the_disk_before_it_has_its_name(saved, monkeypatch):
    cache, path = saved
    calls, sync, replace = [], lowkv.saving.os.fsync, lowkv.saving.os.replace
    monkeypatch.setattr(lowkv.saving.os, "fsync", lambda file: (calls.append("fsync"), sync(file)))
    monkeypatch.setattr(lowkv.saving.os, "replace", lambda *its: (calls.append("replace"), replace(*its)))
    cache.save(path)
    assert calls == ["fsync", "replace", "fsync"]


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["lowkv2.8,window=16", "lowkv2,window=16", "lowkv4,window=0"])
@pytest.mark.parametrize("tokens", [5, 90, 250, 330])
def test_a_loaded_prefix_has_seen_its_queries(tmp_path, scheme, tokens):
    """Before and behind the first block that is packed, token by token."""
    model, _ = build("llama")
    text = torch.randint(3, 128, (2, 420), generator=torch.Generator().manual_seed(1))
    cache = filled(model, text[:, :tokens], scheme)
    cache.save(tmp_path / "prefix")
    loaded = lowkv.Cache.load(tmp_path / "prefix", model)
    for part in text[:, tokens:].split(7, dim=1):
        assert torch.equal(model(part, past_key_values=loaded).logits, model(part, past_key_values=cache).logits)
    for a, b in zip(cache.layers, loaded.layers, strict=True):
        assert np.array_equal(a.rows.save(), b.rows.save())


def bomb(image, batch, tokens):
    """The image's header without spans and rows, with other counts."""
    spans, text = struct.unpack_from("<II", image, 80)
    out = bytearray(image[:88] + image[88 + 12 * spans : 88 + 12 * spans + text])
    out += bytes(-len(out) % 64)
    struct.pack_into("<IQ", out, 12, len(out), len(out))
    struct.pack_into("<IIIII", out, 64, batch, tokens, *struct.unpack_from("<I", image, 72), 0, 0)
    struct.pack_into("<Q", out, 24, xxh64(bytes(out[32:])))
    return torch.frombuffer(out, dtype=torch.uint8)


@pytest.mark.parametrize("batch", [1, 2**16, 2**32 - 1])
def test_a_header_without_rows_asks_for_no_memory(model, saved, batch):
    def apply(metadata, tensors):
        for name, image in tensors.items():
            tensors[name] = bomb(image.numpy().tobytes(), batch, 2**31 - 1000)
    with pytest.raises(lowkv.Error, match="bytes without a row, and its rows only"):
        lowkv.Cache.load(rewritten(saved[1], apply), model)


def test_a_split_model_is_refused(model, saved, monkeypatch):
    """Each process has some heads, and one path has room for one's."""
    cache, path = saved
    monkeypatch.setattr(type(model), "tp_size", property(lambda self: 2), raising=False)
    for call in (lambda: cache.save(path), lambda: lowkv.Cache.load(path, model)):
        with pytest.raises(lowkv.Error, match="split over 2 processes .tensor parallelism."):
            call()


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


# docs/images.md: offset and struct's letter.
FIELDS = {"version": (8, "I"), "header bytes": (12, "I"), "image bytes": (16, "Q"), "inputs": (32, "Q"),
          "packed bytes": (40, "Q"), "block tokens": (48, "I"), "kv heads": (52, "I"), "head_dim": (56, "I"),
          "layer": (60, "I"), "batch": (64, "I"), "tokens": (68, "I"), "rows": (72, "I"), "flags": (76, "I"),
          "spans": (80, "I"), "scheme bytes": (84, "I"), "first span: first": (88, "I"),
          "first span: cells": (92, "I"), "first span: packed": (96, "I"), "second span: first": (100, "I"),
          "second span: cells": (104, "I"), "second span: packed": (108, "I"), "last span: cells": (116, "I")}


@pytest.mark.parametrize("field", FIELDS)
def test_a_mistake_with_the_right_checksum_is_refused(tmp_path, field):
    """Layer 1 of a file whose images are otherwise whole."""
    model, _ = build("llama")
    filled(model).save(tmp_path / "prefix")
    offset, letter = FIELDS[field]
    top = 2 ** (8 * struct.calcsize(letter)) - 1
    with safe_open(tmp_path / "prefix", framework="pt") as file:
        held = struct.unpack_from(f"<{letter}", file.get_tensor("1").numpy(), offset)[0]

    def change(value):
        def apply(metadata, tensors):
            image = bytearray(tensors["1"].numpy().tobytes())
            struct.pack_into(f"<{letter}", image, offset, value)
            struct.pack_into("<Q", image, 24, xxh64(image[32:]))
            tensors["1"] = torch.frombuffer(image, dtype=torch.uint8)
        return apply

    assert lowkv.Cache.load(rewritten(tmp_path / "prefix", change(held)), model).get_seq_length() == 400
    wrong = {held + 1, held - 1, held + 32, held - 32, held + 128, 2 * held + 1, 2**31, 2**31 - 1, top, 0, 3, 64}
    for value in {value & top for value in wrong} - {held}:
        with pytest.raises(lowkv.Error, match="damaged: layer 1: "):
            lowkv.Cache.load(rewritten(tmp_path / "prefix", change(value)), model)


def test_a_file_opens_in_other_tools(saved):
    """Plain safetensors: a uint8 tensor for each layer, and what they are of."""
    cache, path = saved
    with safe_open(path, framework="np") as file:
        assert file.metadata().keys() == {"format", "scheme", "model"}
        for layer in cache.layers:
            image = file.get_tensor(str(layer.index))
            assert image.dtype == np.uint8 and image[:8].tobytes() == b"LOWKVIMG"
            header = read_image(image)
            assert (header.layer, header.sequences, header.tokens) == (layer.index, 2, 400)


@pytest.mark.parametrize("scheme", [SCHEME, "exact"])
def test_a_sliding_layer_has_what_its_window_sees(tmp_path, scheme):
    model, _ = build("mistral")
    cache = filled(model, scheme=scheme)
    cache.save(tmp_path / "prefix")
    assert lowkv.Cache.load(tmp_path / "prefix", model).get_seq_length() == TOKENS.shape[1]
    for layer in cache.layers:
        assert layer.rows.first > 0
        layer.rows.drop_before(TOKENS.shape[1])
    cache.save(tmp_path / "prefix")
    with pytest.raises(lowkv.Error, match="it has its tokens from [0-9]+ on, and 377 is needed"):
        lowkv.Cache.load(tmp_path / "prefix", model)


@torch.no_grad()
@pytest.mark.parametrize("tokens", [1, 3, 20, 170])
def test_short_and_cropped_caches_go_on(model, tmp_path, tokens):
    cache = lowkv.Cache.from_model(model, SCHEME)
    cache.activate_past_recording()
    model(TOKENS[:, :180], past_key_values=cache)
    cache.crop(tokens - 180)
    cache.save(tmp_path / "prefix")
    loaded = lowkv.Cache.load(tmp_path / "prefix", model)
    assert torch.equal(model(TOKENS[:, :3], past_key_values=loaded).logits,
                       model(TOKENS[:, :3], past_key_values=cache).logits)
    lowkv.Cache.from_model(model, SCHEME).save(tmp_path / "empty")
    assert lowkv.Cache.load(tmp_path / "empty", model).get_seq_length() == 0
    cache.crop(-cache.get_seq_length())
    cache.save(tmp_path / "empty")
    assert lowkv.Cache.load(tmp_path / "empty", model).get_seq_length() == 0
