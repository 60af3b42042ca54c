"""A decoding loop of one's own, with the prompt fed in pieces. python own_loop.py [MODEL]"""

# %% A model, and a prompt of a few hundred tokens.
import sys

import lowkv
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
prompt = tokenizer("A list of colours: red, green, blue, yellow, " * 30, return_tensors="pt").input_ids

# %% The prompt, 128 tokens at a time: what has left the window is packed after each piece.
cache = lowkv.Cache.from_model(model, scheme="lowkv2.8")
with torch.inference_mode():
    for piece in prompt.split(128, dim=1):
        logits = model(piece, cache=cache, logits_to_keep=1).logits
print(f"{cache.get_seq_length()} tokens: {cache.exact_bytes} bytes exact, {cache.packed_bytes} packed")

# %% Then token by token.
tokens = []
with torch.inference_mode():
    for _ in range(20):
        token = logits[:, -1].argmax(dim=-1, keepdim=True)
        tokens.append(token)
        logits = model(token, cache=cache).logits
print(tokenizer.decode(torch.cat(tokens, dim=1)[0]))

# %% Back by ten tokens, as after a rejected guess, and to the start.
cache.crop(-10)
print(cache.get_seq_length(), "tokens after crop()")
cache.reset()
print(cache.get_seq_length(), "tokens after reset()")
