"""For eval/engine_kld.py, in transformers' own Python: a model reads windows of a text through a cache, some tokens at
a time. Takes JSON (read()) and LOWKV_SCHEME (empty: transformers' own cache), and prints JSON."""

import json
import math
import os
import sys

import torch
from predictions import Predictions, windows


def read(model, text, out, reference, windows_count, tokens, chunk, skip):
    import lowkv
    from lowkv import benchmark
    from transformers import DynamicCache

    scheme = os.environ["LOWKV_SCHEME"]
    model, tokenizer = benchmark.load(model)
    predictions, losses = Predictions(out, reference), []
    for window in torch.tensor(windows(tokenizer, open(text).read(), windows_count, tokens)):
        cache = lowkv.Cache.from_model(model, scheme) if scheme else DynamicCache(config=model.config)
        for first in range(0, tokens - 1, chunk):
            ids = window[first : min(first + chunk, tokens - 1)]
            counted = max(0, skip - first)
            with torch.inference_mode():
                found = model(ids[None], past_key_values=cache).logits[0, counted:].float().log_softmax(-1)
            predictions.take(found.numpy())
            following = window[first + 1 : first + 1 + len(ids)][counted:]
            losses += (-found.gather(1, following[:, None])).flatten().tolist()
    return {**predictions.told(), "perplexity": math.exp(sum(losses) / len(losses))}


if __name__ == "__main__":
    print("\n" + json.dumps(read(**json.loads(sys.stdin.read()))), flush=True)
