#!/usr/bin/env python3
"""Writes a GGUF file's model as vLLM reads it: a folder with a transformers checkpoint, weights dequantized.

    PYTHON_OF_VLLM deps/vllm_checkpoint.py model.gguf FOLDER
    PYTHON_OF_VLLM deps/vllm_checkpoint.py model.gguf FOLDER --dtype float32

Models whose architecture transformers reads from GGUF: Llama and SmolLM2, Gemma, Qwen and others."""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("folder", type=Path, help="made; what it was is replaced")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"),
                        help="of the weights (default: %(default)s)")
    args = parser.parse_args()
    unfinished = args.folder.with_name(args.folder.name + ".unfinished")
    source = {"pretrained_model_name_or_path": args.gguf.parent, "gguf_file": args.gguf.name}
    # Else transformers 5 keeps the weights as GGUF has them, and can't save them.
    AutoModelForCausalLM.from_pretrained(**source, dtype=getattr(torch, args.dtype),
                                         quantization_config=GgufConfig(dequantize=True)).save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(**source).save_pretrained(unfinished)
    shutil.rmtree(args.folder, ignore_errors=True)
    unfinished.rename(args.folder)


if __name__ == "__main__":
    main()
