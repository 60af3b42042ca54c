"""Images with counts that are wrong, under checksums that are right."""

import struct

import lowkv
import pytest
import torch
from families import build
from safetensors import safe_open
from saved import filled, rewritten, xxh64


def bomb(image, batch, tokens):
    """The image's header without spans and rows, with other counts."""
    spans, text = struct.unpack_from("<II", image, 80)
    out = bytearray(image[:88] + image[88 + 12 * spans : 88 + 12 * spans + text])
    out += bytes(-len(out) % 64)
    struct.pack_into("<IQ", out, 12, len(out), len(out))
    struct.pack_into("<IIIII", out, 64, batch, tokens, *struct.unpack_from("<I", image, 72), 0, 0)
    struct.pack_into("<Q", out, 24, xxh64(bytes(out[32:])))
    return torch.frombuffer(out, dtype=torch.uint8)


@pytest.mark.parametrize("batch", [1, 2**16, 2**32 - 1])
def test_a_header_without_rows_asks_for_no_memory(model, saved, batch):
    def apply(metadata, tensors):
        for name, image in tensors.items():
            tensors[name] = bomb(image.numpy().tobytes(), batch, 2**31 - 1000)
    with pytest.raises(lowkv.Error, match="bytes without a row, and its rows only"):
        lowkv.Cache.load(rewritten(saved[1], apply), model)


# docs/images.md: offset and struct's letter.
FIELDS = {"version": (8, "I"), "header bytes": (12, "I"), "image bytes": (16, "Q"), "inputs": (32, "Q"),
          "packed bytes": (40, "Q"), "block tokens": (48, "I"), "kv heads": (52, "I"), "head_dim": (56, "I"),
          "layer": (60, "I"), "batch": (64, "I"), "tokens": (68, "I"), "rows": (72, "I"), "flags": (76, "I"),
          "spans": (80, "I"), "scheme bytes": (84, "I"), "first span: first": (88, "I"),
          "first span: cells": (92, "I"), "first span: packed": (96, "I"), "second span: first": (100, "I"),
          "second span: cells": (104, "I"), "second span: packed": (108, "I"), "last span: cells": (116, "I")}


@pytest.mark.parametrize("field", FIELDS)
def test_a_mistake_with_the_right_checksum_is_refused(tmp_path, field):
    """Layer 1 of a file whose images are otherwise whole."""
    model, _ = build("llama")
    filled(model).save(tmp_path / "prefix")
    offset, letter = FIELDS[field]
    top = 2 ** (8 * struct.calcsize(letter)) - 1
    with safe_open(tmp_path / "prefix", framework="pt") as file:
        held = struct.unpack_from(f"<{letter}", file.get_tensor("1").numpy(), offset)[0]

    def change(value):
        def apply(metadata, tensors):
            image = bytearray(tensors["1"].numpy().tobytes())
            struct.pack_into(f"<{letter}", image, offset, value)
            struct.pack_into("<Q", image, 24, xxh64(image[32:]))
            tensors["1"] = torch.frombuffer(image, dtype=torch.uint8)
        return apply

    assert lowkv.Cache.load(rewritten(tmp_path / "prefix", change(held)), model).get_seq_length() == 400
    wrong = {held + 1, held - 1, held + 32, held - 32, held + 128, 2 * held + 1, 2**31, 2**31 - 1, top, 0, 3, 64}
    for value in {value & top for value in wrong} - {held}:
        with pytest.raises(lowkv.Error, match="damaged: layer 1: "):
            lowkv.Cache.load(rewritten(tmp_path / "prefix", change(value)), model)
