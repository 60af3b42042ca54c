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
from lowkv.layer import DTYPES

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
    """The metadata and the tensors of a file that was saved for this model and scheme, and came through whole."""
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
    for name in ("scheme", "model", "layers"):
        _require(path, name in metadata, f"it has no {name!r}")
    if scheme is not None and str(parse_scheme(scheme)) != metadata["scheme"]:
        raise Error(f"{path} was saved with scheme {metadata['scheme']}, not {parse_scheme(scheme)}")
    if fingerprint(model) != metadata["model"]:
        raise Error(f"{path} was saved for another model, whose keys mean nothing to this one")
    return metadata, tensors


def restore(cache, path: Path, metadata, tensors) -> None:
    """Fills an empty cache. A hash shows damage, not mistakes: whatever is counted on is checked."""
    try:
        states = json.loads(metadata["layers"])
    except json.JSONDecodeError as error:
        _require(path, False, f"its 'layers' are no JSON: {error}")
    _require(path, isinstance(states, list) and len(states) == len(cache.layers),
             f"its 'layers' are not a list of {len(cache.layers)} layers")
    names = {f"{layer.index}.{part}" for layer in cache.layers for part in ("keys", "values", "packed")}
    unknown = sorted(set(tensors) - names)
    _require(path, not unknown, f"it has a tensor {unknown and unknown[0]!r}")
    for layer, state in zip(cache.layers, states, strict=True):
        found = {part: tensors.get(f"{layer.index}.{part}") for part in ("keys", "values", "packed")}
        problem = _restore_layer(layer, state, **found)
        _require(path, not problem, f"layer {layer.index}: {problem}")
    kinds = {(layer.length, layer.exact and (layer.batch_size, layer.exact.keys.dtype)) for layer in cache.layers}
    _require(path, len(kinds) == 1, "its layers differ in tokens, batch or dtype")


def _restore_layer(layer, state, keys, values, packed) -> str | None:
    """Fills one layer, or says what does not hold together."""
    counts = [state.get(name) for name in ("first", "packed_end")] if isinstance(state, dict) else []
    if len(counts) != 2 or not all(type(count) is int for count in counts):
        return "it does not say its 'first' and 'packed_end'"
    first, packed_end = counts
    if keys is None and values is None and packed is None:
        return None if first == packed_end == layer.sinks else "its tensors are missing"
    if keys is None or values is None:
        return "its keys or its values are missing"
    if keys.dtype not in DTYPES or keys.ndim != 4 or 0 in (*keys.shape[:2], keys.shape[3]):
        return f"its keys are {_kind(keys)}"
    if values.dtype != keys.dtype or values.shape != keys.shape:
        return f"its values are {_kind(values)}, its keys {_kind(keys)}"
    layer.lazy_initialization(keys, values)
    problem = _counts(layer, first, packed_end, keys.shape[2]) or _packed(layer, packed_end - first, packed)
    if problem:
        return problem
    layer.exact.append(keys, values)
    layer.first, layer.packed_end = first, packed_end
    if packed is not None:
        layer.blocks.append_packed(packed.contiguous())
    return None


def _counts(layer, first: int, packed_end: int, rows: int) -> str | None:
    said = f"its packed tokens are [{first}, {packed_end}), with {rows} exact ones beside"
    if not layer.sinks <= first <= packed_end or (not layer.is_sliding and first != layer.sinks):
        return said
    if layer.blocks is None:
        if first != packed_end:
            return f"{said}, but its scheme packs nothing"
    elif (first - layer.sinks) % layer.block_tokens or (packed_end - first) % layer.block_tokens:
        return f"{said}, but its blocks have {layer.block_tokens} tokens"
    if packed_end > layer.sinks > rows:
        return f"{said}, but it has {layer.sinks} sinks"
    length = packed_end - layer.sinks + rows
    if layer.is_sliding and first > max(0, length - layer.sliding_window + 1):
        return f"{said}, but its window sees {layer.sliding_window} of {length}"
    return None


def _packed(layer, tokens: int, packed) -> str | None:
    if tokens == 0 and packed is None:
        return None
    blocks = tokens // layer.block_tokens if tokens else 0
    wanted = f"{tokens} tokens of a batch of {layer.batch_size} are packed"
    if blocks:
        wanted += f", in torch.uint8 {(layer.batch_size, blocks, layer.packed_bytes)}"
    if packed is None or not blocks or packed.dtype != torch.uint8 or packed.shape != (
            layer.batch_size, blocks, layer.packed_bytes):
        return f"its packed blocks are {'missing' if packed is None else _kind(packed)}, but {wanted}"
    return None


def _kind(tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _require(path: Path, legal: bool, problem: str) -> None:
    if not legal:
        raise Error(f"{path} does not hold together: {problem}")


def _digest(metadata, tensors) -> str:
    """Of all that a file holds but the hash itself."""
    said = {name: value for name, value in metadata.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
