"""Run by torchrun (see test_tensor_parallel.py): generates on a share of the heads, and prints the tokens."""

import os
import sys

import lowkv
import torch
from transformers import AutoModelForCausalLM

folder, schemes = sys.argv[1], sys.argv[2:]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
ids = torch.arange(3, 103)[None]
for scheme in schemes:
    cache = lowkv.Cache.from_model(model, scheme)
    output = model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=20, min_new_tokens=20)
    heads = cache.layers[0].rows.shape[1]
    if torch.distributed.get_rank() == 0:
        print("heads", heads, "tokens", *output[0, 100:].tolist())
torch.distributed.destroy_process_group()
# Without Python's end: gloo's threads may still be dropping tensors then, and torch 2.13 aborts.
sys.stdout.flush()
os._exit(0)
