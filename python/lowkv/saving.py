"""Saved prefixes: one safetensors file with each layer's exact rows and packed blocks as they lie in memory."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from lowkv._core import Error, parse_scheme

FORMAT = "lowkv-cache-2"
# Of a configuration: what may change between two loads of one model.
_NOT_THE_MODEL = {"_name_or_path", "_attn_implementation", "_attn_implementation_internal", "transformers_version",
                  "torch_dtype", "dtype", "use_cache", "return_dict", "output_attentions", "output_hidden_states"}
_SAMPLES = 64  # values of each parameter that enter the model's fingerprint


def fingerprint(model) -> str:
    """Tells models apart by their class, by their configuration but for what says where they came from and how they
    run, and by names, shapes, dtypes and some values of their parameters."""
    digest = hashlib.sha256(type(model).__name__.encode())
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_THE_MODEL}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        flat = parameter.detach().reshape(-1)
        digest.update(flat[:: max(1, flat.numel() // _SAMPLES)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def save(cache, model, path: Path) -> None:
    tensors, layers = {}, []
    for layer in cache.layers:
        layers.append({"first": layer.first, "packed_end": layer.packed_end})
        if layer.exact is None:
            continue
        tensors[f"{layer.index}.keys"] = layer.exact.keys.contiguous()
        tensors[f"{layer.index}.values"] = layer.exact.values.contiguous()
        if layer.blocks is not None and len(layer.blocks):
            rows = [b"".join(layer.blocks.packed(row, block) for block in range(len(layer.blocks)))
                    for row in range(layer.blocks.batch)]
            packed = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
            tensors[f"{layer.index}.packed"] = packed.view(len(rows), -1, layer.packed_bytes)
    metadata = {"format": FORMAT, "scheme": cache.scheme, "model": fingerprint(model),
                "layers": json.dumps(layers)}
    metadata["sha256"] = _digest(metadata, tensors)
    draft = path.with_name(f".{path.name}.{os.getpid()}")  # an interrupted save leaves the old file
    try:
        save_file(tensors, draft, metadata)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read(path: Path, model, scheme: str | None):
    """The metadata and the tensors of a file, checked."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise Error(f"{path} is not a saved cache, or is damaged: {error}") from None
    if metadata.get("format") != FORMAT:
        raise Error(f"{path}: format {metadata.get('format')!r}; this version of lowkv reads {FORMAT!r}")
    if _digest(metadata, tensors) != metadata.get("sha256"):
        raise Error(f"{path} is damaged: its contents do not match their hash")
    if scheme is not None and str(parse_scheme(scheme)) != metadata["scheme"]:
        raise Error(f"{path} was saved with scheme {metadata['scheme']}, not {parse_scheme(scheme)}")
    if fingerprint(model) != metadata["model"]:
        raise Error(f"{path} was saved for another model, whose keys mean nothing to this one")
    return metadata, tensors


def restore(cache, metadata, tensors) -> None:
    """Fills an empty cache."""
    for layer, state in zip(cache.layers, json.loads(metadata["layers"]), strict=True):
        keys = tensors.get(f"{layer.index}.keys")
        if keys is None:
            continue
        layer.lazy_initialization(keys, tensors[f"{layer.index}.values"])
        layer.exact.append(keys, tensors[f"{layer.index}.values"])
        layer.first, layer.packed_end = state["first"], state["packed_end"]
        packed = tensors.get(f"{layer.index}.packed")
        if packed is not None:
            for row in range(packed.shape[0]):
                for block in packed[row]:
                    layer.blocks.append_packed(row, block.numpy().tobytes())


def _digest(metadata, tensors) -> str:
    """Of all that a file holds but the hash itself."""
    said = {name: value for name, value in metadata.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()
