"""For eval/engine_kld.py, in vLLM's own Python: an engine reads windows of a text, and its predictions at each
position, whole, are written to a file, or set against those in it. Takes JSON (read()) and prints JSON (main()).

vLLM hands out the likeliest tokens of a prediction only, so a worker extension looks at them where the worker makes
them: in its sampler, which is asked for log probabilities of a prompt's positions, one step's after the other, and of
nothing else while nobody asks for those of an answer."""

import json
import math
import os
import sys

from predictions import Predictions, windows

EXTENSION = f"{__name__ if __name__ != '__main__' else 'vllm_predictions'}.Watcher"


class Watcher:
    """Methods of vLLM's worker."""

    def watch_predictions(self, path, reference, positions, skip):
        """From now on. reference: whether this engine writes the file that others read. positions: of a window, of
        which the first `skip` are left out."""
        sampler = self.model_runner.sampler
        log_probabilities = sampler.compute_logprobs
        self.predictions = Predictions(path, reference)
        seen = 0

        def watched(logits):
            nonlocal seen
            found = log_probabilities(logits)
            first = seen % positions
            seen += len(found)
            self.predictions.take(found[max(0, skip - first):].numpy())
            return found

        sampler.compute_logprobs = watched

    def told_predictions(self):
        return self.predictions.told()


def read(model, text, out, reference, windows_count, tokens, chunk, skip):
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(model=model, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=tokens + 1,
              max_num_seqs=1, max_num_batched_tokens=chunk, kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False,
              worker_extension_cls=EXTENSION)
    llm.collective_rpc("watch_predictions", args=(out, reference, tokens - 1, skip))
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    losses = []
    for window in windows(AutoTokenizer.from_pretrained(model), open(text).read(), windows_count, tokens):
        (answer,) = llm.generate([TokensPrompt(prompt_token_ids=window)], sampling, use_tqdm=False)
        losses += [-by_id[token].logprob for token, by_id in
                   list(zip(window, answer.prompt_logprobs, strict=True))[skip + 1:]]
    found = llm.collective_rpc("told_predictions")[0]
    llm.llm_engine.engine_core.shutdown()
    return {**found, "perplexity": math.exp(sum(losses) / len(losses))}


def main():
    found = read(**json.loads(sys.stdin.read()))
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # the engine's threads may hold up an orderly end


if __name__ == "__main__":
    main()
