"""A budget of memory: nothing is packed while all fits, then the oldest tokens have the fewest bits."""

import math
import os
import re
from pathlib import Path

import lowkv
import pytest
import torch
import transformers
import transformers_caches as benchmark
from families import FAMILIES

pytestmark = pytest.mark.skipif(os.environ.get("LOWKV_DEVICE", "cpu") != "cpu", reason="budgets are for the CPU")
BLOCK = 128
BLOCK_BYTES = 2 * 4 * 2 * 64 * BLOCK  # of a layer, unquantized
ENDLESS = "1000000GiB"


def made(family, **more):
    torch.manual_seed(5)
    name, arguments = FAMILIES[family]
    config = getattr(transformers, name)(**{**arguments, "head_dim": 64, "max_position_embeddings": 4096, **more})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def llama():
    return made("llama")


@pytest.fixture(scope="module")
def sliding():
    """A sliding layer beside a full one."""
    return made("gemma3", sliding_window=200)


@pytest.fixture(scope="module", params=["llama", "sliding"])
def model(request):
    return request.getfixturevalue(request.param)


def ids(tokens, batch=1):
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def read(model, cache, tokens, step):
    """The predictions of each step, and the bytes held after it."""
    predicted, held = [], []
    for part in tokens.split(step, dim=1):
        predicted.append(model(part, past_key_values=cache).logits)
        held.append(cache.exact_bytes + cache.packed_bytes)
    return torch.cat(predicted, dim=1), held


def bytes_at(model, tokens, scheme="exact", batch=1):
    cache = lowkv.Cache.from_model(model, scheme)
    return read(model, cache, ids(tokens, batch), tokens)[1][-1]


@pytest.mark.parametrize("step", [1, 50, 450])
def test_nothing_is_lost_within_it(model, step):
    tokens = ids(450)
    caches = [lowkv.Cache.from_model(model, "exact"), lowkv.Cache.from_model(model, "lowkv2", budget=ENDLESS)]
    want, got = (read(model, cache, tokens, step)[0] for cache in caches)
    assert torch.equal(got, want)
    assert caches[1].packed_bytes == 0


@pytest.mark.parametrize("step,batch", [(1, 1), (37, 2), (300, 1)])
def test_it_is_kept_after_every_step(model, step, batch):
    budget = int(2 * 3.8 * BLOCK_BYTES) * batch  # three blocks of a layer can't be packed
    cache = lowkv.Cache.from_model(model, "lowkv2", budget=budget)
    _, held = read(model, cache, ids(10 * BLOCK, batch), step)
    assert max(held) <= budget
    assert max(held) > 0.8 * budget
    assert cache.memory.coarsened_blocks > 0 or step == 300


def test_the_oldest_lose_most(llama):
    """Of the keys of the first layer, which no other layer's loss moves: each block's error is nearest to that of one
    fixed scheme."""
    tokens = ids(12 * BLOCK)

    def keys(scheme, step, **more):
        cache = lowkv.Cache.from_model(llama, scheme, **more)
        read(llama, cache, tokens, step)
        return cache.full(0)[0][0].unflatten(1, (-1, BLOCK))

    exact = keys("exact", 12 * BLOCK)
    ladder = ["lowkv4", "lowkv2.8", "lowkv2"]
    fixed = [(keys(scheme, 12 * BLOCK) - exact).square().mean((0, 2, 3)) for scheme in ladder]
    errors = (keys("lowkv2", 32, budget=int(2 * 3.75 * BLOCK_BYTES)) - exact).square().mean((0, 2, 3))
    assert errors[0] == errors[-1] == 0  # the first tokens, and the newest
    packed = range(1, int(errors.count_nonzero()) + 1)
    kinds = [min(range(3), key=lambda i: abs(math.log(errors[b] / fixed[i][b]))) for b in packed]
    assert kinds == sorted(kinds, reverse=True) and len(set(kinds)) > 1


@pytest.mark.skipif("qwen3_next" not in FAMILIES, reason="hybrid models are served from transformers 5.23 on")
@pytest.mark.parametrize("family,layers", [("qwen3_next", 1), ("falcon_h1", 2)])  # which has states in both
def test_attention_layers_of_a_hybrid_model_have_all_of_it(family, layers):
    hybrid, budget = made(family), int(layers * 3.8 * BLOCK_BYTES)
    cache = lowkv.Cache.from_model(hybrid, "lowkv2", budget=budget)
    _, held = read(hybrid, cache, ids(8 * BLOCK), 64)
    assert 0.9 * budget < max(held) <= budget and cache.packed_bytes > 0


def test_it_loses_less_than_the_scheme_it_ends_at(model):
    tokens = ids(8 * BLOCK)
    want, _ = read(model, lowkv.Cache.from_model(model, "exact"), tokens, 37)
    within, fixed = ((read(model, cache, tokens, 37)[0] - want).norm() / want.norm() for cache in (
        lowkv.Cache.from_model(model, "lowkv2", budget=int(2 * 3.5 * BLOCK_BYTES)),
        lowkv.Cache.from_model(model, "lowkv2")))
    assert 0 < within < 0.9 * fixed < 0.2


@torch.no_grad()
def test_the_least_budget_is_the_fixed_scheme(llama):
    tokens = ids(6 * BLOCK + 20)
    fixed = lowkv.Cache.from_model(llama, "lowkv2")
    llama(tokens, past_key_values=fixed)
    least = fixed.exact_bytes + fixed.packed_bytes
    caches = lowkv.Cache.from_model(llama, "lowkv2", budget=least), fixed
    llama(tokens, past_key_values=caches[0])
    for layer in (0, 1):
        for got, want in zip(*(cache.full(layer) for cache in caches), strict=True):
            assert torch.equal(got, want)
    with pytest.raises(lowkv.Error, match=rf"^budget={least - 2} is too little: 788 tokens take [\d.]+MiB at lowkv2"):
        llama(tokens, past_key_values=lowkv.Cache.from_model(llama, "lowkv2", budget=least - 2))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_full_budget_names_the_size_that_works_and_loses_nothing(model, batch):
    budget = bytes_at(model, 600, "lowkv2", batch)
    tokens = ids(4000, batch)
    cache = lowkv.Cache.from_model(model, "lowkv2", budget=budget)
    with pytest.raises(lowkv.Error, match="too little") as caught:
        read(model, cache, tokens, 50)
    seen = cache.get_seq_length()
    assert 100 < seen < 4000 and cache.exact_bytes + cache.packed_bytes <= budget
    before = [cache.full(layer) for layer in (0, 1)]
    with pytest.raises(lowkv.Error, match="too little"):
        read(model, cache, tokens[:, seen : seen + 50], 50)
    for layer, want in enumerate(before):
        assert all(torch.equal(*pair) for pair in zip(cache.full(layer), want, strict=True))
    told, size = re.search(r"(\d+) tokens take ([\d.]+)MiB", str(caught.value)).groups()
    assert int(told) == (seen + 50) * batch
    read(model, lowkv.Cache.from_model(model, "lowkv2", budget=f"{size}MiB"), tokens[:, : seen + 50], 50)


def test_sequences_of_a_batch_share_it(llama):
    budget, longest = bytes_at(llama, 16 * BLOCK), {}
    for batch in (1, 2, 4):
        cache = lowkv.Cache.from_model(llama, "lowkv2.8", budget=budget)
        for part in ids(20 * BLOCK // batch, batch).split(BLOCK // 4, dim=1):
            read(llama, cache, part, part.shape[1])
            if cache.packed_bytes:
                break
            longest[batch] = cache.get_seq_length()
    assert longest == {1: 16 * BLOCK, 2: 8 * BLOCK, 4: 4 * BLOCK}


@torch.no_grad()
@pytest.mark.parametrize("arguments", [dict(num_beams=2), dict(num_return_sequences=2, do_sample=True),
                                       dict(prompt_lookup_num_tokens=5)])
def test_beams_selections_and_crops(model, arguments):
    """By a budget so large that they give what the exact cache does, and by one that packs."""
    tokens = ids(700)
    found = {}
    for budget in (None, ENDLESS, 2 * 9 * BLOCK_BYTES):
        torch.manual_seed(11)
        cache = lowkv.Cache.from_model(model, "lowkv4" if budget else "exact", budget=budget)
        found[budget] = model.generate(tokens, max_new_tokens=80, min_new_tokens=80, past_key_values=cache,
                                       **{"do_sample": False, **arguments})
        if budget not in (None, ENDLESS):
            assert cache.exact_bytes + cache.packed_bytes <= budget
            assert cache.packed_bytes > 0 or "prompt_lookup_num_tokens" in arguments  # which spares 512 tokens
    assert torch.equal(found[None], found[ENDLESS])


@torch.no_grad()
def test_forks_and_going_back(llama):
    tokens, budget = ids(10 * BLOCK), bytes_at(llama, 5 * BLOCK)
    cache = lowkv.Cache.from_model(llama, "lowkv2", budget=budget)
    read(llama, cache, tokens, 64)
    before, fork = cache.full(1), cache.fork()
    read(llama, fork, ids(2 * BLOCK), 64)
    for got, want in zip(cache.full(1), before, strict=True):
        assert torch.equal(got, want)
    for kept in (7 * BLOCK + 5, 3 * BLOCK + 70, 60):
        cache.crop(kept - cache.get_seq_length())
        assert cache.get_seq_length() == kept
        for got, want in zip(cache.full(1), before, strict=True):
            assert (got - want[:, :, :kept]).abs().max() < 1e-2  # decoded rows were rounded to f16
        assert cache.exact_bytes + cache.packed_bytes <= 2 * budget  # the fork's beside
    read(llama, cache, tokens, 64)


def test_what_is_refused(llama, tmp_path):
    for budget, scheme, message in [("lots", "lowkv2", "^budget=lots is no size: say 24MiB"),
                                    ("0", "lowkv2", "^budget=0 is no size"),
                                    (2.5, "lowkv2", "^budget must be a str such as '24MiB', or an int"),
                                    ("1GiB", "kivi2", "^budget is for the schemes lowkv4, "),
                                    ("1GiB", "exact", "^budget is for the schemes lowkv4, "),
                                    ("1GiB", "lowkv2,layer.0=lowkv4", "^budget is for the schemes lowkv4, ")]:
        with pytest.raises(lowkv.Error, match=message):
            lowkv.Cache.from_model(llama, scheme, budget=budget)
    cache = lowkv.Cache.from_model(llama, budget="1GiB")
    read(llama, cache, ids(20), 20)
    with pytest.raises(lowkv.Error, match=r"^save: a cache with a budget .*make it without budget="):
        cache.save(tmp_path / "cache")
    layers = lowkv.Cache("lowkv2", [None, None], budget="1GiB").layers
    layers[0].append(*[torch.zeros(1, 2, 3, 64)] * 2)
    with pytest.raises(lowkv.Error, match=r"^layer 1 has kv_heads and head_dim \(1, 64\), and another one \(2, 64\)"):
        layers[1].append(*[torch.zeros(1, 1, 3, 64)] * 2)


@pytest.mark.long
@pytest.mark.skipif("LOWKV_MODEL" not in os.environ, reason="LOWKV_MODEL is not set; make test-python does")
def test_smollm2():
    """Greedy text as with the exact cache while all fits; then within 24 MiB, which float32 fills at 512 tokens."""
    model, tokenizer = benchmark.load(os.environ["LOWKV_MODEL"])
    text = Path(__file__).with_name("smollm2_prompt.dat").read_text()
    prompt = tokenizer(text, return_tensors="pt").input_ids[:, :300]
    texts = {}
    for budget in (None, "1GiB", "24MiB"):
        cache = lowkv.Cache.from_model(model, "lowkv2" if budget else "exact", budget=budget)
        texts[budget] = model.generate(prompt, max_new_tokens=250, min_new_tokens=250, do_sample=False,
                                       past_key_values=cache, pad_token_id=0)[0].tolist()
    assert texts["1GiB"] == texts[None]
    assert cache.exact_bytes + cache.packed_bytes <= 24 * 2**20 and cache.packed_bytes > 0
    assert texts["24MiB"][:510] == texts[None][:510]
