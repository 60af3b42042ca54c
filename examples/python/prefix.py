"""One long prompt, many questions: forks of a cache share its packed blocks. python prefix.py [MODEL]"""

# %% The prompt is computed once.
import sys

import lowkv
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
story = "Ann has a red car, Bob has a blue boat and Carla has a green bicycle. " * 20
inputs = tokenizer(story, return_tensors="pt")
prefix = lowkv.Cache.from_model(model)
with torch.inference_mode():
    model(**inputs, cache=prefix, logits_to_keep=1)
held = prefix.packed_bytes
print(f"{prefix.get_seq_length()} tokens, {held} bytes packed")

# %% Each question goes on with a fork. generate() takes the whole text, and computes what the cache has not got.
forks = []
for question in ("Ann's car is", "Bob's boat is", "Carla's bicycle is"):
    whole = torch.cat([inputs.input_ids, tokenizer(question, return_tensors="pt").input_ids], dim=1)
    forks.append(prefix.fork())
    output = model.generate(whole, attention_mask=torch.ones_like(whole), cache=forks[-1],
                            max_new_tokens=5, do_sample=False)
    print(tokenizer.decode(output[0, inputs.input_ids.shape[1] :]))

# %% Four caches, one set of blocks.
print(f"{len(forks)} forks hold {prefix.packed_bytes - held} bytes of packed blocks of their own")
