"""A saved prefix goes on exactly where it was."""

import lowkv
import numpy as np
import pytest
import torch
from families import build
from lowkv._core import read_image
from safetensors import safe_open
from saved import SCHEME, TOKENS, filled, rewritten


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


def test_a_class_loads_its_own(tmp_path):
    model, _ = build("llama")
    cache = lowkv.KiviCache.from_model(model)
    with torch.no_grad():
        model(TOKENS, past_key_values=cache)
    cache.save(tmp_path / "kivi")
    assert lowkv.KiviCache.load(tmp_path / "kivi", model).get_stats()["tokens"] == TOKENS.shape[1]


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
    with pytest.raises(lowkv.Error, match=r"it has its tokens from [0-9]+ on, and 377 is needed"):
        lowkv.Cache.load(tmp_path / "prefix", model)


def test_a_rewritten_file_is_otherwise_taken(model, saved):
    loaded = lowkv.Cache.load(rewritten(saved[1], lambda *_: None), model)
    assert loaded.get_seq_length() == TOKENS.shape[1]


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
