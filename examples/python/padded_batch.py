"""Several prompts of different lengths at once. python padded_batch.py [MODEL]"""

# %% Prompts are padded on the left, so that all of them end where generation begins.
import sys

import lowkv
from transformers import AutoModelForCausalLM, AutoTokenizer

name = sys.argv[1] if len(sys.argv) > 1 else "HuggingFaceTB/SmolLM2-135M-Instruct"
model, tokenizer = AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
tokenizer.padding_side = "left"
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
prompts = ["The sun is", "My favourite dish is pasta with", "In the year 1969, the first"]
inputs = tokenizer(prompts, return_tensors="pt", padding=True)
print(inputs.attention_mask)

# %% The mask tells lowkv which cells are padding; nobody sees them, packed or not.
cache = lowkv.Cache.from_model(model, scheme="kivi4")
output = model.generate(**inputs, cache=cache, max_new_tokens=20, do_sample=False,
                        pad_token_id=tokenizer.pad_token_id)
for text in tokenizer.batch_decode(output, skip_special_tokens=True):
    print("-", text)
