#!/usr/bin/env python3
"""The same weights in another type: an f16 or q8_0 model file from a quantized one.

llama.cpp multiplies quantized weights with 8-bit activations, whose rounding flips with every change of
the last digit of attention: with Q4_1 weights that noise (mean KLD .003) hides what a 4-bit cache loses.
Dequantized to f16 the weights are the same to half a thousandth, activations stay floats, and the noise
is .0001. So the figures of docs/quality.md are measured on f16 weights.

    eval/weights.py f16                 the set-up's model as f16, into build/quality
    eval/weights.py q8_0 -m model.gguf  another one
"""

import argparse
import os
import sys
from pathlib import Path

import gguf
import numpy as np
from gguf import quants
from paths import ROOT, fingerprint, set_up_paths

STORED = "stored"  # as the file has them
TYPES = {"f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
         "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0)}
WEIGHTS = [*TYPES, STORED]
FOLDER = ROOT / "build/quality"


def write(source, target, kind, added=None):
    """`added`: more tensors in f32, by name."""
    tensor_type, file_type = TYPES[kind]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer's own
        value = int(file_type) if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        floats = quants.dequantize(tensor.data, tensor.tensor_type)
        if len(tensor.shape) == 1:  # norms and biases are f32 in every file
            writer.add_tensor(tensor.name, floats.astype(np.float32))
        else:
            writer.add_tensor(tensor.name, quants.quantize(floats, tensor_type), raw_dtype=tensor_type)
    for name, floats in (added or {}).items():
        writer.add_tensor(name, floats.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def model_with(kind, source):
    """The path of `source` with weights of this type; made where it is not there."""
    if kind == STORED:
        return Path(source)
    target = FOLDER / f"{Path(source).stem}-{fingerprint(source)}-{kind}.gguf"
    if not target.exists():
        print(f"writing {target}", file=sys.stderr)
        FOLDER.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        write(source, unfinished, kind)
        unfinished.replace(target)
    return target


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("type", choices=TYPES)
    parser.add_argument("-m", "--model", help="default: the model of the set-up")
    args = parser.parse_args()
    print(model_with(args.type, args.model or set_up_paths()["LOWKV_MODEL"]))


if __name__ == "__main__":
    main()
