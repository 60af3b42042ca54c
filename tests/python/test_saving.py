"""A saved prefix goes on exactly where it was, and nothing else is taken for one."""

import copy
import json

import lowkv
import pytest
import torch
from families import build
from lowkv import saving
from safetensors import safe_open
from safetensors.torch import save_file

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


def rewritten(path, change):
    """The file with `change(metadata, layers, tensors)` made to it, and the right hash of that."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    layers = json.loads(metadata["layers"])
    change(metadata, layers, tensors)
    if "layers" in metadata:
        metadata["layers"] = json.dumps(layers)
    metadata["sha256"] = saving._digest(metadata, tensors)
    damaged = path.with_name("damaged")
    save_file(tensors, damaged, metadata)
    return damaged


def tensor(name, change):
    def apply(metadata, layers, tensors):
        tensors[name] = change(tensors[name]).contiguous()
    return apply


def without(*names):
    def apply(metadata, layers, tensors):
        for name in names:
            del tensors[name]
    return apply


def state(layer, **values):
    return lambda metadata, layers, tensors: layers[layer].update(values)


def both(*changes):
    def apply(*file):
        for change in changes:
            change(*file)
    return apply


ONE_ROW, ONE_TOKEN_LESS = lambda x: x[:1], lambda x: x[:, :, :-1]
# TOKENS in SCHEME: layer 1 of each model has 256 packed tokens behind 4 sinks, and 140 newer ones exact.
WRONG = {
    "packed: fewer rows": tensor("1.packed", ONE_ROW),
    "packed: no rows": tensor("1.packed", lambda x: x[:0]),
    "packed: more rows": tensor("1.packed", lambda x: x.repeat(2, 1, 1)),
    "packed: fewer blocks": tensor("1.packed", lambda x: x[:, :-1]),
    "packed: more blocks": tensor("1.packed", lambda x: x.repeat(1, 2, 1)),
    "packed: shorter blocks": tensor("1.packed", lambda x: x[:, :, :-64]),
    "packed: longer blocks": tensor("1.packed", lambda x: torch.cat([x, x[:, :, :64]], dim=2)),
    "packed: other dtype": tensor("1.packed", lambda x: x.to(torch.int16)),
    "packed: another dtype of one byte": tensor("1.packed", lambda x: x.view(torch.int8)),
    "packed: two dimensions": tensor("1.packed", lambda x: x.flatten(1)),
    "packed: a number": tensor("1.packed", lambda x: torch.tensor(3.0)),
    "packed: missing": without("1.packed"),
    "keys: missing": without("1.keys"),
    "values: missing": without("1.values"),
    "keys and values: missing": without("1.keys", "1.values"),
    "a layer: missing": without("1.keys", "1.values", "1.packed"),
    "a layer: empty": both(without("1.keys", "1.values", "1.packed"), state(1, first=0, packed_end=0)),
    "keys: of another batch": tensor("1.keys", ONE_ROW),
    "exact rows: of another batch": both(tensor("1.keys", ONE_ROW), tensor("1.values", ONE_ROW)),
    "a layer: of another batch": both(*(tensor(f"1.{name}", ONE_ROW) for name in ("keys", "values", "packed"))),
    "values: fewer tokens": tensor("1.values", ONE_TOKEN_LESS),
    "exact rows: fewer tokens": both(tensor("1.keys", ONE_TOKEN_LESS), tensor("1.values", ONE_TOKEN_LESS)),
    "values: other head_dim": tensor("1.values", lambda x: x[..., :16] if x.shape[3] > 16 else x.repeat(1, 1, 1, 2)),
    "keys: other dtype": tensor("1.keys", lambda x: x.half()),
    "exact rows: another dtype than layer 0": both(*(tensor(f"1.{x}", lambda x: x.half()) for x in ("keys", "values"))),
    "exact rows: integers": both(*(tensor(f"{i}.{x}", lambda x: x.int()) for i in (0, 1) for x in ("keys", "values"))),
    "keys: three dimensions": tensor("1.keys", lambda x: x[0]),
    "an unknown tensor": lambda metadata, layers, tensors: tensors.update({"2.keys": torch.zeros(1)}),
    "first: before the sinks": state(1, first=0),
    "first: negative": state(1, first=-32),
    "packed_end: a block too far": state(1, packed_end=4 + 256 + 128),
    "packed_end: within a block": state(1, packed_end=4 + 256 - 1),
    "packed_end: before first": state(1, packed_end=0),
    "packed_end: not a number": state(1, packed_end="260"),
    "packed_end: not whole": state(1, packed_end=260.0),
    "packed_end: missing": lambda metadata, layers, tensors: layers[1].pop("packed_end"),
    "layers: one too few": lambda metadata, layers, tensors: layers.pop(),
    "layers: one too many": lambda metadata, layers, tensors: layers.append(layers[0]),
    "layers: missing": lambda metadata, layers, tensors: metadata.pop("layers"),
    "scheme: missing": lambda metadata, layers, tensors: metadata.pop("scheme"),
    "model: missing": lambda metadata, layers, tensors: metadata.pop("model"),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_what_does_not_hold_together_is_refused(model, saved, change):
    damaged = rewritten(saved[1], change)
    with pytest.raises(lowkv.Error, match=f"{damaged}.*(does not hold together|saved for another model)"):
        lowkv.Cache.load(damaged, model)


def test_a_rewritten_file_is_otherwise_taken(model, saved):
    loaded = lowkv.Cache.load(rewritten(saved[1], lambda *_: None), model)
    assert loaded.get_seq_length() == TOKENS.shape[1]


@pytest.mark.parametrize("scheme", [SCHEME, "exact"])
def test_a_sliding_layer_has_what_its_window_sees(tmp_path, scheme):
    model, _ = build("mistral")
    cache = lowkv.Cache.from_model(model, scheme)
    with torch.no_grad():
        model(TOKENS, past_key_values=cache)
    cache.save(tmp_path / "prefix")
    assert lowkv.Cache.load(tmp_path / "prefix", model).get_seq_length() == TOKENS.shape[1]
    first = cache.layers[0].first
    assert first > 0

    def drop(metadata, layers, tensors):
        """Cells [first, 384) of both layers, as if they had been dropped."""
        for index, layer in enumerate(layers):
            layer["first"] = 384
            if scheme == "exact":
                layer["packed_end"] = 384
                for name in (f"{index}.keys", f"{index}.values"):
                    tensors[name] = tensors[name][:, :, 384 - first :].contiguous()
            elif f"{index}.packed" in tensors:
                layer["packed_end"] = max(layer["packed_end"], 384)
                del tensors[f"{index}.packed"]

    with pytest.raises(lowkv.Error, match="does not hold together"):
        lowkv.Cache.load(rewritten(tmp_path / "prefix", drop), model)


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
