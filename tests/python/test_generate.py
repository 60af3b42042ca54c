"""What generate() does to a cache, against the model's own cache with the same arguments."""

import concurrent.futures
import copy

import lowkv
import lowkv.layer
import pytest
import torch
import transformers
from families import FAMILIES, build
from transformers import DynamicCache

LONG = dict(max_new_tokens=40, min_new_tokens=40)
# Packed from the first step on, so that beams, crops and forks meet packed blocks.
PACKED = "int8,window=0,sinks=3"


def ids(batch=1, tokens=120, seed=3):
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module", params=["llama", "gemma2", "falcon-alibi"])
def models(request):
    """Full attention; sliding layers and soft-cap; an adapter."""
    return build(request.param)


def both(models, scheme, tokens, **arguments):
    """(tokens on a lowkv cache, tokens on the model's own)."""
    results = []
    for model, own in ((models[0], False), (models[1], True)):
        torch.manual_seed(11)
        cache = {} if own else {"past_key_values": lowkv.Cache.from_model(model, scheme)}
        results.append(model.generate(tokens, **arguments, **cache))
    return results


MODES = {
    "greedy": dict(do_sample=False),
    "sampling": dict(do_sample=True, temperature=0.8, top_k=50),
    "beams": dict(do_sample=False, num_beams=3),
    "beam-sampling": dict(do_sample=True, num_beams=3),
    "several-sequences": dict(do_sample=True, num_return_sequences=3),
    "prompt-lookup": dict(do_sample=False, prompt_lookup_num_tokens=5),
    "chunked-prefill": dict(do_sample=False, prefill_chunk_size=32),
}


@pytest.mark.parametrize("mode", MODES)
def test_exact_equals_the_own_cache(models, mode):
    got, want = both(models, "exact", ids(), **LONG, **MODES[mode])
    assert torch.equal(got, want)


@pytest.mark.parametrize("mode", MODES)
def test_packed_runs(models, mode):
    """int8 is close to exact, and a beam, a crop or a chunk that took the wrong rows would not be."""
    got, want = both(models, PACKED, ids(), **LONG, **MODES[mode])
    new = want[:, 120:]
    assert got.shape == want.shape and (got[:, 120:] == new).float().mean() > 0.3


def test_assisted_decoding(models):
    model, stock = models
    assistant = copy.deepcopy(stock)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.mul_(1.001)
    arguments = dict(do_sample=False, **LONG)
    want = stock.generate(ids(), **arguments)
    got = model.generate(ids(), assistant_model=assistant, past_key_values=lowkv.Cache.from_model(model, "exact"),
                         **arguments)
    assert torch.equal(got, want)


@pytest.mark.long
@pytest.mark.parametrize("guesser", ["prompt lookup", "assistant"])
def test_rejected_guesses_are_cropped_out_of_packed_blocks(models, guesser, monkeypatch):
    """A cache that is told of guesses leaves the newest tokens exact; here it is made to pack them at once, so that
    rounds crop into packed blocks, which are decoded again."""
    monkeypatch.setattr(lowkv.layer, "_GUESSES", 0)
    model, stock = models
    if guesser == "assistant":  # another model, which is nearly always wrong
        assistant = build("qwen3")[0]
        assistant.generation_config.num_assistant_tokens = 10
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        guesses = {"assistant_model": assistant}
    else:
        guesses = {"prompt_lookup_num_tokens": 10}
    cache = lowkv.Cache.from_model(model, PACKED)
    tokens, arguments = ids(tokens=40).repeat(1, 3), dict(do_sample=False, max_new_tokens=100, min_new_tokens=100)
    got = model.generate(tokens, past_key_values=cache, **guesses, **arguments)
    want = stock.generate(tokens, **arguments)
    assert cache.memory.reopened_blocks > 0
    new = got[:, 120:220]  # transformers 5.4 keeps the last round's guesses
    assert (new == want[:, 120:]).float().mean() > 0.5


@pytest.mark.parametrize("family", ["mpt", "llama"])
def test_a_model_whose_configuration_says_no_cache(family, monkeypatch):
    """MPT's says so by default, and checkpoints that were saved in training do."""
    monkeypatch.delitem(FAMILIES["mpt"][1], "use_cache", raising=False)
    model, stock = build(family)
    for each in (model, stock):
        each.config.use_cache = each.generation_config.use_cache = False
    want = stock.generate(ids(), do_sample=False, **LONG)
    cache = lowkv.Cache.from_model(model, "exact")
    with pytest.raises(lowkv.Error, match="use_cache=False in a step with a lowkv cache"):
        model.generate(ids(), past_key_values=cache, do_sample=False, **LONG)
    assert cache.get_seq_length() == 0
    got = model.generate(ids(), past_key_values=cache, use_cache=True, do_sample=False, **LONG)
    assert torch.equal(got, want) and cache.get_seq_length() == want.shape[1] - 1

    class Tokenizer:
        pad_token_id, eos_token_id = 0, 2

        def __call__(self, text, return_tensors):
            return transformers.BatchEncoding({"input_ids": ids(), "attention_mask": torch.ones_like(ids())})

        def decode(self, tokens, skip_special_tokens):
            return tokens

    assert torch.equal(lowkv.generate(model, Tokenizer(), "any", max_new_tokens=40, scheme="exact", min_new_tokens=40),
                       want[0])


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(models, side):
    tokens, mask = ids(2), torch.ones(2, 120, dtype=torch.long)
    padding = slice(0, 40) if side == "left" else slice(80, 120)
    mask[1, padding], tokens[1, padding] = 0, 0
    got, want = both(models, "exact", tokens, attention_mask=mask, do_sample=False, **LONG)
    assert torch.equal(got, want)


def test_a_prefix_is_forked_for_many_continuations(models):
    model, _ = models
    prefix = lowkv.Cache.from_model(model, PACKED)
    with torch.no_grad():
        model(ids(), past_key_values=prefix)
    held = prefix.packed_bytes
    results = []
    for seed in (5, 6):
        question = torch.cat([ids(), ids(tokens=9, seed=seed)], dim=1)
        fork = prefix.fork()
        assert prefix.packed_bytes == held  # shared
        results.append(model.generate(question, past_key_values=fork, do_sample=False, **LONG))
        fresh = lowkv.Cache.from_model(model, PACKED)
        with torch.no_grad():
            model(ids(), past_key_values=fresh)
        again = model.generate(question, past_key_values=fresh, do_sample=False, **LONG)
        assert torch.equal(results[-1], again)
    assert prefix.get_seq_length() == 120


def test_forks_are_continued_by_threads_at_once(models):
    """They share blocks and a store."""
    model, _ = models
    prefix = lowkv.Cache.from_model(model, PACKED)
    with torch.no_grad():
        model(ids(), past_key_values=prefix)

    def continued(seed):
        question = torch.cat([ids(), ids(tokens=50, seed=seed)], dim=1)
        return model.generate(question, past_key_values=prefix.fork(), do_sample=False, **LONG)

    wanted = [continued(seed) for seed in range(6)]
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        for got, want in zip(threads.map(continued, range(6)), wanted, strict=True):
            assert torch.equal(got, want)
    assert prefix.get_seq_length() == 120


def test_no_grad_inference_mode_and_return_dict(models):
    model, _ = models
    caches = [lowkv.Cache.from_model(model, PACKED) for _ in range(2)]
    with torch.inference_mode():
        first = model(ids(), past_key_values=caches[0]).logits
        second = model(ids(), past_key_values=caches[1], return_dict=False)[0]
    assert torch.equal(first, second)
    with torch.no_grad():  # a prefix of one mode goes on in the other
        first = model(ids(tokens=9), past_key_values=caches[0]).logits
    with torch.inference_mode():
        second = model(ids(tokens=9), past_key_values=caches[1], return_dict=False)[0]
    assert torch.equal(first, second)
    assert caches[0].get_seq_length() == 129


def test_gradients_are_refused(models):
    model, _ = models
    with pytest.raises(lowkv.Error, match="no gradients"):
        model(ids(), past_key_values=lowkv.Cache.from_model(model, PACKED))


@torch.no_grad()
def test_crop_goes_back_into_packed_blocks(models):
    """Cropping and feeding the same tokens again gives the same logits, up to what reopening one block costs."""
    model, _ = models
    cache = lowkv.Cache.from_model(model, PACKED)
    cache.activate_past_recording()
    model(ids(), past_key_values=cache)
    cache.crop(0)  # packs
    want = model(ids(tokens=6, seed=9), past_key_values=cache).logits
    for back in (6, 20):
        cache.crop(-back)
        assert cache.get_seq_length() == 126 - back
        replay = torch.cat([ids(), ids(tokens=6, seed=9)], dim=1)[:, 126 - back :]
        got = model(replay, past_key_values=cache).logits[:, -6:]
        assert torch.nn.functional.cosine_similarity(got, want, dim=-1).min() > 0.99


@torch.no_grad()
def test_recording_does_not_keep_everything_exact(models):
    """A cache that assisted decoding has used, and that plain decoding goes on with, never to crop it."""
    model, _ = models
    cache = lowkv.Cache.from_model(model, PACKED)
    cache.activate_past_recording()
    model(ids(tokens=900), past_key_values=cache)
    assert cache.packed_bytes > 0
    assert all(layer.exact_tokens < 700 for layer in cache.layers)


@torch.no_grad()
def test_reset_and_offload(models):
    model, _ = models
    cache = lowkv.Cache.from_model(model, PACKED)
    first = model(ids(), past_key_values=cache).logits
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.packed_bytes == 0
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    assert torch.equal(model(ids(), past_key_values=cache).logits, first)


@torch.no_grad()
def test_the_own_cache_agrees_across_dtypes():
    for dtype in (torch.bfloat16, torch.float16):
        model, stock = build("llama", dtype)
        cache = lowkv.Cache.from_model(model, "exact")
        got = [model(part, past_key_values=cache).logits.float() for part in ids().split(60, dim=1)]
        assert cache.full(0)[0].dtype is dtype
        own = DynamicCache(config=stock.config)
        want = [stock(part, past_key_values=own).logits.float() for part in ids().split(60, dim=1)]
        assert torch.nn.functional.cosine_similarity(torch.cat(got), torch.cat(want), dim=-1).min() > 0.999
