"""Every family: forward and generate() on a lowkv cache against the model's own cache."""

import lowkv
import pytest
import torch
from families import FAMILIES, HYBRIDS, build
from transformers import DynamicCache

PROMPT, NEW = 150, 20


@pytest.fixture(params=FAMILIES)
def models(request):
    return build(request.param)


def ids(batch, tokens, seed=0):
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def own_cache(model):
    return DynamicCache(config=model.config)


def logits(model, cache, chunks, mask=None):
    """The logits of all chunks, fed one after the other."""
    out, seen = [], 0
    for chunk in chunks:
        seen += chunk.shape[1]
        part = {} if mask is None else {"attention_mask": mask[:, :seen]}
        if mask is not None:
            positions = (mask[:, :seen].cumsum(1) - 1).clamp_min(0)[:, -chunk.shape[1]:]
            if "position_ids" in model.forward.__code__.co_varnames:
                part["position_ids"] = positions
        out.append(model(chunk, past_key_values=cache, use_cache=True, **part).logits)
    return torch.cat(out, dim=1)


def chunks_of(tokens):
    """A prompt in two chunks, then single tokens."""
    return [tokens[:, :90], tokens[:, 90:140], *tokens[:, 140:].split(1, dim=1)]


@torch.no_grad()
def test_exact_is_the_models_own_cache(models):
    model, stock = models
    tokens = ids(1, PROMPT)
    got = logits(model, lowkv.Cache.from_model(model, "exact"), chunks_of(tokens))
    want = logits(stock, own_cache(stock), chunks_of(tokens))
    assert (got - want).abs().max() < 1e-4
    assert (want.argmax(-1) == got.argmax(-1)).all()


@torch.no_grad()
def test_exact_left_padded_batch(models):
    model, stock = models
    tokens, mask = ids(2, PROMPT), torch.ones(2, PROMPT, dtype=torch.long)
    mask[1, :31] = 0
    got = logits(model, lowkv.Cache.from_model(model, "exact"), chunks_of(tokens), mask)
    want = logits(stock, own_cache(stock), chunks_of(tokens), mask)
    assert (got - want)[mask.bool()].abs().max() < 1e-4


@torch.no_grad()
def test_exact_generates_the_same_tokens(models):
    model, stock = models
    tokens = ids(1, PROMPT, seed=1)
    arguments = dict(max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    got = model.generate(tokens, past_key_values=lowkv.Cache.from_model(model, "exact"), **arguments)
    assert torch.equal(got, stock.generate(tokens, **arguments))


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True])
def test_kivi4_is_close(models, padded):
    """A short window, so that almost all of the cache is packed."""
    model, stock = models
    tokens, mask = ids(2, PROMPT, seed=2), torch.ones(2, PROMPT, dtype=torch.long)
    if padded:
        mask[1, :31] = 0
    cache = lowkv.Cache.from_model(model, "kivi4,window=16")
    got = logits(model, cache, chunks_of(tokens), mask)
    want = logits(stock, own_cache(stock), chunks_of(tokens), mask)
    assert cache.packed_bytes > 0
    cosine = torch.nn.functional.cosine_similarity(got, want, dim=-1)[mask.bool()]
    assert cosine.mean() > 0.99 and cosine.min() > 0.9


@torch.no_grad()
def test_other_caches_still_compute_what_they_did(models):
    model, stock = models
    tokens = ids(2, 60)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[0, :9] = 0
    lowkv.Cache.from_model(model, "exact")
    for given in (None, mask):
        got = logits(model, own_cache(model), [tokens[:, :50], tokens[:, 50:]], given)
        want = logits(stock, own_cache(stock), [tokens[:, :50], tokens[:, 50:]], given)
        seen = torch.ones_like(mask) if given is None else given
        assert (got - want)[seen.bool()].abs().max() < 1e-4
    assert (model(tokens).logits - stock(tokens).logits).abs().max() < 1e-4


@pytest.mark.skipif("lfm2" in FAMILIES, reason="with this transformers they are served")
@pytest.mark.parametrize("family", ["jamba", "lfm2", "zamba2"])
def test_hybrid_models_of_older_transformers_are_refused(family, monkeypatch):
    monkeypatch.setitem(FAMILIES, family, HYBRIDS[family])
    with pytest.raises(lowkv.Error, match="has layers of type "):
        lowkv.Cache.from_model(build(family)[0])
