"""What is damaged, of something else, or of parts that do not belong together is not taken for a saved prefix."""

import copy

import lowkv
import numpy as np
import pytest
import torch
from families import build
from safetensors import safe_open
from saved import SCHEME, TOKENS, filled, rewritten


def test_others_are_refused(model, saved, tmp_path):
    _, path = saved
    with pytest.raises(lowkv.Error, match=r"saved with scheme lowkv2.8,window=16, not kivi2"):
        lowkv.Cache.load(path, model, scheme="kivi2")
    with pytest.raises(lowkv.Error, match="another model"):
        lowkv.Cache.load(path, build("qwen3")[0])
    with pytest.raises(lowkv.Error, match="is not a saved cache: it is no regular file"):
        lowkv.Cache.load(tmp_path, model)
    with pytest.raises(FileNotFoundError):
        lowkv.Cache.load(tmp_path / "nothing", model)


def test_the_configuration_is_a_part_of_the_model(model, saved):
    _, path = saved
    other = copy.deepcopy(model)
    other.config.rms_norm_eps *= 2
    with pytest.raises(lowkv.Error, match="another model"):
        lowkv.Cache.load(path, other)


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
    "tensor: zeros": (tensor(torch.zeros_like), "image: this is none"),
}


@pytest.mark.parametrize("change,words", WRONG.values(), ids=WRONG.keys())
def test_what_does_not_belong_together_is_refused(model, saved, change, words):
    damaged = rewritten(saved[1], lambda _, tensors: change(model, tensors))
    with pytest.raises(lowkv.Error, match=f"{damaged}: .*{words}"):
        lowkv.Cache.load(damaged, model)


METADATA = {
    "format: of before": (lambda m: m.update(format="lowkv-cache-3"), "format 'lowkv-cache-3'.*reads 'lowkv-cache-4'"),
    "format: missing": (lambda m: m.pop("format"), "format None"),
    "scheme: missing": (lambda m: m.pop("scheme"), "it has no 'scheme'"),
    "scheme: another": (lambda m: m.update(scheme="lowkv2.8,window=32"), "it was made for the scheme"),
    "scheme: none": (lambda m: m.update(scheme="lowkv99"), "lowkv99"),
    "scheme: too many layers": (lambda m: m.update(scheme=f"{SCHEME},layer.7=exact"), "override of layer 7"),
    "model: missing": (lambda m: m.pop("model"), "it has no 'model'"),
    "model: another": (lambda m: m.update(model=m["model"].replace('"class": "', '"class": "X')),
                       "another model.*: other class$"),
    "model: damaged": (lambda m: m.update(model=m["model"][::-1]), "what it says of its model is damaged"),
    "model: nested": (lambda m: m.update(model="[" * 100000), "what it says of its model is damaged"),
    "model: of other parts": (lambda m: m.update(model="[]"), "what it says of its model is damaged"),
}


@pytest.mark.parametrize("change,words", METADATA.values(), ids=METADATA.keys())
def test_metadata_that_says_something_else_is_refused(model, saved, change, words):
    damaged = rewritten(saved[1], lambda metadata, _: change(metadata))
    with pytest.raises(lowkv.Error, match=f"{damaged}: .*{words}"):
        lowkv.Cache.load(damaged, model)
