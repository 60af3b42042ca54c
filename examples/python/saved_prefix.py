"""A prompt's cache in a file, for another process or another day. python saved_prefix.py [MODEL]"""

# %% Compute and save.
import sys
import tempfile
from pathlib import Path

import lowkv
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
ids = tokenizer("You are a helpful assistant who answers briefly. " * 40, return_tensors="pt").input_ids
cache = lowkv.Cache.from_model(model, scheme="lowkv4")
with torch.inference_mode():
    model(ids, cache=cache, logits_to_keep=1)
path = Path(tempfile.mkdtemp()) / "prefix.lowkv"
cache.save(path)
print(f"{ids.shape[1]} tokens in {path.stat().st_size} bytes")

# %% Load: packed blocks lie in the file as in memory, so nothing is computed, and what follows is equal to the bit.
again = lowkv.Cache.load(path, model)
with torch.inference_mode():
    logits = [model(ids[:, :8], cache=c).logits for c in (cache, again)]
print("equal:", torch.equal(*logits))

# %% A file of another scheme is refused; so is one of another model, and a damaged one.
try:
    lowkv.Cache.load(path, model, scheme="kivi2")
except lowkv.Error as error:
    print("refused:", error)
