"""Saved prefixes: one safetensors file with an image of each layer (docs/images.md), which says itself whether it is
whole, and what it is of. Checked here: what images don't know."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedConfig

from lowkv._core import Error, parse_scheme

FORMAT = "lowkv-cache-4"
# Of a configuration: what no key depends on. Beside it, what every model's has.
_NOT_KEYS = re.compile(r"_.*|torch_dtype|use_cache|output_.*|keys_to_ignore_.*|pretraining_tp|"
                       r"(pad|bos|eos|sep|cls|unk)_token_id|"
                       r".*(dropout|pdrop|layerdrop|initializer_range|initializer_factor|init_std|loss_coef).*")
_OF_ALL = set(PreTrainedConfig().to_dict()) - {"model_type"}
_SAMPLES = 64  # values of each weight that enter the model's fingerprint


def fingerprint(model) -> dict[str, str]:
    """What the keys of a model depend on, in parts: see docs/transformers.md."""
    processes = getattr(model, "tp_size", None) or 1
    if processes > 1:
        raise Error(f"the model is split over {processes} processes (tensor parallelism), of which each has some of "
                    "the heads; a saved prefix has all: save and load with the whole model in one process")
    adapters, idle = _adapters(model)
    weights = hashlib.sha256()
    for name, value in model.state_dict().items():
        if not f"{name}.".startswith(idle):
            _sample(weights, model, name, value)
    return {"class": type(model).__name__, "configuration": _digest(_of_keys(model.config.to_dict())),
            "weights": weights.hexdigest(), "adapters": _digest(adapters)}


def _digest(what) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()


def _of_keys(config: dict) -> dict:
    return {name: _of_keys(value) if isinstance(value, dict) else value
            for name, value in config.items() if str(name) not in _OF_ALL and not _NOT_KEYS.fullmatch(str(name))}


def _adapters(model) -> tuple[list, tuple[str, ...]]:
    """What PEFT's adapters do now, layer by layer, and how the names of weights begin that have no part in it."""
    work, idle = [], []
    for path, module in model.named_modules():
        if not isinstance(getattr(module, "disable_adapters", None), bool):  # a model has a method of that name
            continue
        active = [] if module.disable_adapters else list(module.active_adapters)
        merged, scaling = list(getattr(module, "merged_adapters", ())), getattr(module, "scaling", {})
        if active or merged:
            work.append([path, merged, {name: scaling.get(name) for name in active}])
        for kind in getattr(module, "adapter_layer_names", ()):
            idle += [f"{path}.{kind}.{name}." for name in getattr(module, kind, ()) if name not in active]
    return work, tuple(idle)


def _sample(digest, model, name: str, value) -> None:
    """Adds a weight's name, shape, dtype and some of its values, or those of the tensors that it consists of."""
    if isinstance(value, (tuple, list)):
        value = dict(enumerate(value))
    elif hasattr(value, "__tensor_flatten__"):  # a tensor of other tensors, as torchao's
        value = {part: getattr(value, part) for part in value.__tensor_flatten__()[0]}
    if isinstance(value, dict):
        for part, member in value.items():
            _sample(digest, model, f"{name}.{part}", member)
    elif isinstance(value, torch.Tensor):
        if value.is_meta:
            value = _offloaded(model, name)
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        flat = (value.dequantize() if value.is_quantized else value).detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().cpu()
        digest.update(some.view(torch.uint8).numpy().tobytes())
    elif value is None or isinstance(value, (str, int, float, torch.dtype)):
        digest.update(f"{name} {value}".encode())
    else:
        raise Error(f"the model's {name!r} is a {type(value).__name__}, of which can't be said whether it is the same "
                    "in another model: saved prefixes are not for this model")


def _offloaded(model, name: str) -> torch.Tensor:
    """A weight that accelerate keeps in memory or on the disk until its module is called."""
    path = name
    while path:
        path = path.rpartition(".")[0]
        hook = getattr(model.get_submodule(path), "_hf_hook", None)
        for inner in getattr(hook, "hooks", (hook,)):
            if getattr(inner, "weights_map", None) is not None:
                return inner.weights_map[name[len(path) :].lstrip(".")]
    raise Error(f"the model's {name!r} has no values (it is on the device meta): load the weights first")


def save(cache, model, path: Path) -> None:
    """Writes the file. A layer's image has its number for a name, and its states have 'NUMBER.conv' and
    'NUMBER.recurrent'. What the model keeps of a conversation has its own name in the model."""
    tensors = {str(layer.index): torch.from_numpy(layer.rows.save())
               for layer in cache.attention_layers if layer.length}
    metadata = {"format": FORMAT, "scheme": cache.scheme, "model": json.dumps(fingerprint(model))}
    more = {}  # it has no checksum, nor does it say how many tokens it is of
    for layer in cache.layers_with_states:
        more |= {f"{layer.index}.{kind}": state.cpu().contiguous() for kind, state in layer.saved().items()}
    for name, module in _moved(model).items():
        if module.rope_deltas is not None:
            more[name] = module.rope_deltas.cpu().contiguous()
    if tensors and more:
        tensors |= more
        metadata["contents"] = _contents(tensors, tensors.get)
    with replacing(path) as draft:
        save_file(tensors, draft, metadata)


def _moved(model) -> dict:
    """Modules that keep how far images have moved the positions of a conversation, as Qwen2-VL's."""
    return {f"{path}.rope_deltas": module for path, module in model.named_modules() if hasattr(module, "rope_deltas")}


def _contents(names, tensor_of) -> str:
    """A checksum of all tensors."""
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = tensor_of(name)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which then takes the place of `path`: whole, and on the disk. Writers of one path do not
    meet, the last one's file stays, and a save that is interrupted leaves the old one. A link is followed."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise Error(f"save: {path} is there, and is no regular file")
    with tempfile.TemporaryDirectory(prefix=".lowkv.", dir=path.parent) as folder:  # nobody else's
        draft = Path(folder) / "draft"
        draft.touch()  # safetensors would let nobody else read it
        mode = (path if path.exists() else draft).stat().st_mode
        yield draft
        draft.chmod(mode)
        _sync(draft)
        os.replace(draft, path)
    with contextlib.suppress(OSError):  # some file systems have no such thing for folders
        _sync(path.parent)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


@contextlib.contextmanager
def opened(path: Path, model, scheme: str | None) -> Iterator[tuple[safe_open, str]]:
    """The file, if it was saved for this model and this scheme (if one is given), and its scheme. What is found
    wrong with it while it is open gets its name."""
    if path.exists() and not path.is_file():
        raise Error(f"{path} is not a saved cache: it is no regular file")
    try:
        with _mapped(path) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise Error(f"format {metadata.get('format')!r}; this version of lowkv reads {FORMAT!r}")
            for name in ("scheme", "model"):
                if name not in metadata:
                    raise Error(f"it has no {name!r}")
            if scheme is not None and str(parse_scheme(scheme)) != metadata["scheme"]:
                raise Error(f"it was saved with scheme {metadata['scheme']}, not {parse_scheme(scheme)}")
            _require_same(metadata["model"], fingerprint(model))
            yield file, metadata["scheme"]
    except SafetensorError as error:
        raise Error(f"{path} is not a saved cache, or is damaged: {error}") from None
    except Error as error:
        raise Error(f"{path}: {error}") from None


def _mapped(path: Path) -> safe_open:
    """The file. safetensors opens it twice, by its name: if another takes its place meanwhile, it is opened again."""
    while True:
        before = os.stat(path)
        try:
            file = safe_open(path, framework="pt")
        except RuntimeError:  # torch's: the other one is shorter
            if os.path.samestat(before, os.stat(path)):
                raise
            continue
        if os.path.samestat(before, os.stat(path)):
            return file


def _require_same(saved: str, own: dict[str, str]) -> None:
    try:
        parts = json.loads(saved)
        other = [name for name in own if parts.get(name) != own[name]]
    except (ValueError, AttributeError, RecursionError):
        raise Error("what it says of its model is damaged") from None
    if other:
        raise Error("it was saved for another model, whose keys mean nothing to this one: other "
                    f"{' and '.join(other)}")


def restore(cache, file) -> None:
    """Fills an empty cache from the file's images and states: all of its layers', or none."""
    found, wanted = set(file.keys()), {str(layer.index) for layer in cache.attention_layers}
    if not found:
        return
    moved = _moved(cache.model())
    if cache.layers_with_states or found & set(moved):
        if _contents(found, file.get_tensor) != file.metadata().get("contents"):
            raise Error("it is damaged: its tensors are not those that were saved together")
        for layer in cache.layers_with_states:
            for kind in ("conv", "recurrent"):
                if (name := f"{layer.index}.{kind}") in found and file.get_slice(name).get_shape():
                    layer.restore(kind, file.get_tensor(name).to(cache.model().device))
                    found.remove(name)
        wanted |= {f"{layer.index} (states)" for layer in cache.layers_with_states if not layer.saved()}
    for name in sorted((found - set(moved)) ^ wanted):
        raise Error(f"it has {'no image of layer' if name in wanted else 'a tensor'} {name!r}")
    for layer in cache.attention_layers:
        image = file.get_tensor(str(layer.index))
        if image.dtype != torch.uint8 or image.ndim != 1:
            raise Error(f"layer {layer.index}: {image.dtype} {tuple(image.shape)} is no image")
        try:
            layer.load(image)
        except Error as error:
            raise Error(f"layer {layer.index}: {error}") from None
    if len({(layer.length, layer.batch_size, layer.rows.dtype) for layer in cache.attention_layers}) > 1:
        raise Error("its layers differ in tokens, batch or dtype")
    for name, module in moved.items():
        module.rope_deltas = file.get_tensor(name).to(cache.model().device) if name in found else None
