"""A saved prefix goes on exactly where it was, and nothing else is taken for one."""

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
