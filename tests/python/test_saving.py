"""A saved prefix goes on exactly where it was, and nothing else is taken for one."""

import copy

import lowkv
import pytest
import torch
from families import build

SCHEME = "lowkv2.8,window=16"
TOKENS = torch.arange(3, 103)[None].repeat(2, 4)


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request):
    return build(request.param)[0]


@pytest.fixture
def saved(model, tmp_path):
    cache = lowkv.Cache.from_model(model, SCHEME)
    with torch.no_grad():
        model(TOKENS, past_key_values=cache)
    cache.save(tmp_path / "prefix")
    return cache, tmp_path / "prefix"


@torch.no_grad()
def test_it_goes_on_where_it_was(model, saved):
    cache, path = saved
    loaded = lowkv.Cache.load(path, model)
    assert loaded.scheme == cache.scheme and loaded.packed_bytes == cache.packed_bytes > 0
    for part in TOKENS[:, :150].split(50, dim=1):
        assert torch.equal(model(part, past_key_values=loaded).logits, model(part, past_key_values=cache).logits)


def test_others_are_refused(model, saved, tmp_path):
    _, path = saved
    with pytest.raises(lowkv.Error, match=r"saved with scheme lowkv2.8,window=16, not kivi2"):
        lowkv.Cache.load(path, model, scheme="kivi2")
    with pytest.raises(lowkv.Error, match="another model"):
        lowkv.Cache.load(path, build("qwen3")[0])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    (tmp_path / "damaged").write_bytes(data)
    with pytest.raises(lowkv.Error, match="do not match their hash"):
        lowkv.Cache.load(tmp_path / "damaged", model)
    (tmp_path / "short").write_bytes(data[:-100])
    with pytest.raises(lowkv.Error, match="not a saved cache, or is damaged"):
        lowkv.Cache.load(tmp_path / "short", model)


def test_damage_anywhere_is_noticed(model, saved, tmp_path):
    _, path = saved
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    at = data.index(b"packed_end") + len(b'packed_end\\": ')
    damaged = tmp_path / "damaged"
    for place in (at, data.index(b"sha256"), data.index(b'"scheme"') + 1, end + 50):
        damaged.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(lowkv.Error, match="damaged"):
            lowkv.Cache.load(damaged, model)


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
