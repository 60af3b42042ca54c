"""Files of saved prefixes (lowkv/saving.py): bytes that were changed anywhere, and real files of which tensors and
metadata were changed, under the checksum that is right for them."""

import json
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["lowkv"]):
    import lowkv.cache  # which lowkv itself imports later
    import lowkv.states
    from lowkv import saving
import target
import torch
from families import FAMILIES, build
from safetensors.torch import load, save, save_file
from saved import filled

torch.set_num_threads(1)
FOLDER = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
PATH = Path(FOLDER.name) / "prefix"
# Rows alone; sliding layers; states of a convolution beside rows, and of linear attention.
MODELS = [build(family)[0] for family in ("llama", "mistral", "lfm2", "qwen3_next") if family in FAMILIES]
SCHEMES = ("lowkv2.8,window=16", "kivi2,window=0,sinks=0", "exact")
TOKENS = torch.arange(3, 73)[None].repeat(2, 1)


def saved(model, scheme):
    filled(model, TOKENS, scheme).save(PATH)
    return PATH.read_bytes()


def parts_of(data):
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size])["__metadata__"], load(data)


def seeds():
    for number, model in enumerate(MODELS):
        for scheme in range(len(SCHEMES)):
            yield bytes([number, 0]) + saved(model, SCHEMES[scheme])
            yield bytes([number, 1, scheme]) + bytes(range(1, 40))


FILES = {(number, scheme): parts_of(saved(model, name))
         for number, model in enumerate(MODELS) for scheme, name in enumerate(SCHEMES)}
OTHERS = [tensor for _, tensors in FILES.values() for tensor in tensors.values()]


def changed(choices, metadata, tensors):
    """One change."""
    name = choices.PickValueInList(sorted(tensors)) if tensors else "0"
    kind = choices.ConsumeIntInRange(0, 9)
    tensor = tensors.get(name, torch.zeros(0))
    if kind == 0:
        tensors.pop(name, None)
    elif kind == 1:
        more = choices.ConsumeUnicodeNoSurrogates(12)
        tensors[choices.PickValueInList([more, f"{name}{more}", f"{name}.{more}"])] = tensor
    elif kind == 2:
        tensors[name] = choices.PickValueInList(OTHERS)
    elif kind == 3 and tensor.ndim:
        tensors[name] = tensor[: choices.ConsumeIntInRange(0, len(tensor))].contiguous()
    elif kind == 4:
        tensors[name] = tensor.reshape(-1)
    elif kind == 5:
        tensors[name] = tensor.to(choices.PickValueInList([torch.uint8, torch.float16, torch.float64, torch.int32]))
    elif kind == 6:
        tensors[name] = tensor.repeat(*[1] * (tensor.ndim - 1), 2) if tensor.ndim else tensor[None]
    elif kind == 7:
        tensors[name] = torch.frombuffer(bytearray(choices.ConsumeBytes(99) or b"0"), dtype=torch.uint8)
    elif kind == 8:
        metadata[choices.PickValueInList(["scheme", "model", "format", "contents", "more"])] = \
            choices.ConsumeUnicodeNoSurrogates(40) * choices.PickValueInList([1, 1, 1, 50000])
    elif tensor.ndim:
        tensors[name] = tensor.clone()
        tensors[name].view(-1)[choices.ConsumeIntInRange(0, max(0, tensor.numel() - 1)) :][:1] = \
            choices.ConsumeIntInRange(0, 255)


def file_of(choices, number):
    metadata, tensors = (dict(part) for part in FILES[number, choices.ConsumeIntInRange(0, len(SCHEMES) - 1)])
    for _ in range(choices.ConsumeIntInRange(0, 4)):
        changed(choices, metadata, tensors)
    if "contents" in metadata and choices.ConsumeIntInRange(0, 7):
        metadata["contents"] = saving._contents(tensors, tensors.get)
    return metadata, {name: tensor.clone() for name, tensor in tensors.items()}


def require_same(model, cache):
    """What was loaded is saved as it was, and goes on."""
    cache.save(PATH)
    once = PATH.read_bytes()
    lowkv.Cache.load(PATH, model).save(PATH)
    target.require(parts_of(PATH.read_bytes())[0] == parts_of(once)[0], "other metadata once it was loaded")
    (_, before), (_, after) = parts_of(once), parts_of(PATH.read_bytes())
    target.require(before.keys() == after.keys(), "other tensors once it was loaded")
    for name, tensor in before.items():
        target.require(save({"it": tensor}) == save({"it": after[name]}), f"another tensor {name} once it was loaded")
    if cache.get_seq_length() < 500 and not cache.layers_with_states:  # whose shapes the model alone knows
        sequences = max([layer.batch_size for layer in cache.attention_layers if layer.length] or [1])
        with torch.no_grad():
            model(torch.ones(sequences, 3, dtype=torch.long), past_key_values=cache)


def try_bytes(data):
    number, mode = (data[0] if data else 0) % len(MODELS), (data[1] if len(data) > 1 else 0) % 2
    if mode == 0:
        PATH.write_bytes(data[2:])
    else:
        metadata, tensors = file_of(atheris.FuzzedDataProvider(data[2:]), number)
        save_file(tensors, PATH, metadata)
    try:
        cache = lowkv.Cache.load(PATH, MODELS[number])
    except lowkv.Error:
        return
    require_same(MODELS[number], cache)


target.run(seeds, try_bytes)
