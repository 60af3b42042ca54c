"""With LOWKV_DEVICE in the environment (make test-python-opencl, test-python-cuda) the tests' caches lie on that
device."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))  # transformers_caches

# The tests' models are tiny: more threads than one only wait for each other.
torch.set_num_threads(1)

# Of what is the host's whatever the device: by file, and why.
HOST_ONLY = {
    "test_llama_cpp": "the plug-in has stores of its own",
    "test_lmcache": "chunks are packed on the CPU",
    "test_quantize": "arrays of the host, without a cache",
}


def pytest_collection_modifyitems(items):
    if os.environ.get("LOWKV_DEVICE", "cpu") == "cpu":
        return
    for item in items:
        reason = HOST_ONLY.get(item.path.stem)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"LOWKV_DEVICE: {reason}"))
