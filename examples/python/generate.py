"""Text in one call, and what generate() of transformers can do on a packed cache. python generate.py [MODEL]"""

# %% A model: a name on the hub or a folder.
import sys

import lowkv
from transformers import AutoModelForCausalLM, AutoTokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)

# %% One call, with the default scheme.
print(lowkv.generate(model, tokenizer, "The capital of France is", max_new_tokens=20))

# %% The same with another scheme, sampled.
print(lowkv.generate(model, tokenizer, "Once upon a time", max_new_tokens=20, scheme="kivi2", do_sample=True,
                     temperature=0.8, top_k=50))

# %% transformers' own generate(): the cache is passed to it. Here: beams.
inputs = tokenizer("Three reasons to learn to cook:", return_tensors="pt")
cache = lowkv.Cache.from_model(model, scheme="lowkv4")
output = model.generate(**inputs, cache=cache, max_new_tokens=20, num_beams=3, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))

# %% What it took.
print(f"{cache.get_seq_length()} tokens of {output.shape[0]} sequence: {cache.exact_bytes} bytes exact, "
      f"{cache.packed_bytes} packed")
