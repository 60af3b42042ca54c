"""Text from a prompt in one call."""

from __future__ import annotations

import torch
from tqdm.auto import tqdm
from transformers.generation.streamers import BaseStreamer

from lowkv._core import Error, default_scheme
from lowkv.cache import Cache
from lowkv.names import cache_argument

# Of model.generate()'s arguments, what generate() gives itself.
_ITS_OWN = {"generation_config", "max_length", "num_return_sequences", "return_dict_in_generate", "use_cache", "cache",
            "past_key_values", "cache_implementation", "inputs", "input_ids", "inputs_embeds", "attention_mask"}


def generate(model, tokenizer, prompt: str, max_new_tokens: int = 200, do_sample: bool = False,
             temperature: float | None = None, top_k: int | None = None, verbose: bool = False,
             scheme: str = default_scheme, device: str | None = None, budget: str | int | None = None,
             **arguments) -> str:
    """The prompt and its continuation, computed with a packed cache.

    temperature, top_k: for do_sample; left out, the model's own. verbose: shows progress while tokens arrive, with the
    bytes that the cache holds. device, budget: as for Cache. arguments: for `model.generate()`, for one sequence.
    Raises lowkv.Error for a model or a scheme that is not served.
    """
    if not isinstance(prompt, str):
        raise Error(f"prompt must be one str, not {type(prompt).__name__}; for batches call model.generate() with "
                    "Cache.from_model(model)")
    for name in arguments:
        if name in _ITS_OWN:
            raise Error(f"{name} is not for lowkv.generate(), which makes one text of max_new_tokens of a prompt, with "
                        "a cache of its own; call model.generate() with Cache.from_model(model)")
    if verbose and "streamer" in arguments:
        raise Error("verbose=True shows progress with a streamer of its own: leave out one of the two")
    cache = Cache.from_model(model, scheme, device, budget)
    inputs = tokenizer(prompt, return_tensors="pt")
    if inputs.input_ids.shape[1] == 0:
        raise Error("the prompt is empty: this tokenizer makes no token of it")
    if "stop_strings" in arguments:
        arguments["tokenizer"] = tokenizer
    if do_sample:
        given = {"temperature": temperature, "top_k": top_k}
        arguments |= {name: value for name, value in given.items() if value is not None}
    if tokenizer.pad_token_id is None:
        arguments.setdefault("pad_token_id", tokenizer.eos_token_id)
    if verbose:
        arguments["streamer"] = Progress(tokenizer, cache, max_new_tokens)
    with torch.inference_mode():
        # The model's own generation_config may ask for other forms of the result, or for no cache.
        output = model.generate(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask,
                                max_new_tokens=max_new_tokens, do_sample=do_sample, return_dict_in_generate=False,
                                num_return_sequences=1, use_cache=True, **{cache_argument(model): cache}, **arguments)
    return tokenizer.decode(output[0], skip_special_tokens=True)


class Progress(BaseStreamer):
    """One line on stderr: the newest words, tokens per second, what the cache holds."""

    WORDS = 32  # characters of text shown

    def __init__(self, tokenizer, cache: Cache, total: int):
        self.tokenizer, self.cache = tokenizer, cache
        self.tokens: list[int] = []
        self.prompt = True
        self.bar = tqdm(total=total, unit="token", dynamic_ncols=True)

    def put(self, value: torch.Tensor) -> None:
        if self.prompt:  # generate() gives it first
            self.prompt = False
            return
        self.tokens.extend(value.flatten().tolist())
        words = self.tokenizer.decode(self.tokens[-self.WORDS :], skip_special_tokens=True)
        self.bar.set_description_str(" ".join(words.split())[-self.WORDS :], refresh=False)
        held = self.cache.exact_bytes + self.cache.packed_bytes
        full = sum(layer.float32_bytes for layer in self.cache.attention_layers)
        self.bar.set_postfix_str(f"cache {held / 2**20:.1f} MiB, float32 {full / 2**20:.1f} MiB", refresh=False)
        self.bar.update(value.numel())

    def end(self) -> None:
        self.bar.close()
