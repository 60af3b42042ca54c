"""Saved prefixes: one safetensors file with an image of each layer (docs/images.md), which says itself whether it is
whole, and what it is of. Checked here: what images don't know."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lowkv._core import Error, parse_scheme

FORMAT = "lowkv-cache-3"
# Of a configuration: what may change between two loads of one model.
_NOT_THE_MODEL = {"_name_or_path", "_attn_implementation", "_attn_implementation_internal", "transformers_version",
                  "torch_dtype", "dtype", "use_cache", "return_dict", "output_attentions", "output_hidden_states"}
_SAMPLES = 64  # values of each parameter that enter the model's fingerprint


def fingerprint(model) -> str:
    """Tells models apart by their class, by their configuration but for what says where they came from and how they
    run, and by names, shapes, dtypes and some values of their parameters."""
    processes = getattr(model, "tp_size", None) or 1
    if processes > 1:
        raise Error(f"the model is split over {processes} processes (tensor parallelism), of which each has some of "
                    "the heads; a saved prefix has all: save and load with the whole model in one process")
    digest = hashlib.sha256(type(model).__name__.encode())
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_THE_MODEL}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        flat = parameter.detach().reshape(-1)
        digest.update(flat[:: max(1, flat.numel() // _SAMPLES)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def save(cache, model, path: Path) -> None:
    """Writes the file. A layer's image has its number for a name, and its states have 'NUMBER.conv' and
    'NUMBER.recurrent'."""
    tensors = {str(layer.index): torch.from_numpy(layer.rows.save())
               for layer in cache.attention_layers if layer.length}
    metadata = {"format": FORMAT, "scheme": cache.scheme, "model": fingerprint(model)}
    if tensors and cache.layers_with_states:  # states have no checksum, nor do they say how many tokens they have seen
        for layer in cache.layers_with_states:
            tensors |= {f"{layer.index}.{kind}": state.cpu().contiguous() for kind, state in layer.saved().items()}
        metadata["contents"] = _contents(tensors, tensors.get)
    with replacing(path) as draft:
        save_file(tensors, draft, metadata)


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
    meet, the last one's file stays, and a save that is interrupted leaves the old one."""
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:  # nobody else's
        draft = Path(folder) / path.name
        yield draft
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
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise Error(f"format {metadata.get('format')!r}; this version of lowkv reads {FORMAT!r}")
            for name in ("scheme", "model"):
                if name not in metadata:
                    raise Error(f"it has no {name!r}")
            if scheme is not None and str(parse_scheme(scheme)) != metadata["scheme"]:
                raise Error(f"it was saved with scheme {metadata['scheme']}, not {parse_scheme(scheme)}")
            if fingerprint(model) != metadata["model"]:
                raise Error("it was saved for another model, whose keys mean nothing to this one")
            yield file, metadata["scheme"]
    except SafetensorError as error:
        raise Error(f"{path} is not a saved cache, or is damaged: {error}") from None
    except Error as error:
        raise Error(f"{path}: {error}") from None


def restore(cache, file) -> None:
    """Fills an empty cache from the file's images and states: all of its layers', or none."""
    found, wanted = set(file.keys()), {str(layer.index) for layer in cache.attention_layers}
    if not found:
        return
    if cache.layers_with_states:
        if _contents(found, file.get_tensor) != file.metadata().get("contents"):
            raise Error("it is damaged: its tensors are not those that were saved together")
        for layer in cache.layers_with_states:
            kinds = {name: name.partition(".")[2] for name in found if name.startswith(f"{layer.index}.")}
            layer.restore({kind: file.get_tensor(name) for name, kind in kinds.items()}, cache.model().device)
            found -= set(kinds)
    for name in sorted(found ^ wanted):
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
