"""A step that failed or was interrupted, wherever that was, leaves the cache as it was before it: a retry gives what
it would have given a cache that never failed."""

import contextlib
import copy
import pickle

import lowkv
import pytest
import torch
from families import build

SCHEME = "kivi4,window=0"
PROMPT, STEP = torch.arange(3, 103)[None], torch.arange(3, 8)[None]


class Failure(Exception):
    pass


@pytest.fixture(params=["llama", "gptj", "gemma2"])
def model(request):
    return build(request.param)[0]


def run(model, cache, tokens):
    with torch.no_grad():
        return model(tokens, past_key_values=cache).logits


def clean(model, *parts, scheme=SCHEME):
    cache = lowkv.Cache.from_model(model, scheme)
    return [run(model, cache, part) for part in parts][-1]


def state(cache):
    """What must be as before: tokens and bytes, and what the layers hold, bit for bit."""
    rows = [layer.full() if layer.length else None for layer in cache.layers]
    images = [bytes(layer.rows.save()) if layer.length else None for layer in cache.layers]
    return [(layer.length, layer.nbytes) for layer in cache.layers], cache.exact_bytes, cache.packed_bytes, images, rows


def same(before, after):
    *numbers, rows = before
    *numbers_after, rows_after = after
    assert numbers == numbers_after
    for held, now in zip(rows, rows_after, strict=True):
        assert held is now is None or all(torch.equal(a, b) for a, b in zip(held, now, strict=True))


def parts_of(model):
    """By name: what a step goes through, from its first module to its last."""
    blocks = model.get_decoder().layers if hasattr(model.get_decoder(), "layers") else model.get_decoder().h
    found = {"the model": model}
    for number, block in enumerate(blocks):
        found[f"layer {number}"] = block
        attention = getattr(block, "self_attn", getattr(block, "attn", None))
        found[f"layer {number}, before its attention"] = attention
        found[f"layer {number}, after its attention"] = getattr(attention, "o_proj", getattr(attention, "out_proj", 0))
        found[f"layer {number}, its MLP"] = block.mlp
    found["the head"] = model.lm_head
    return found


PARTS = ["the model", *(f"layer {number}{part}" for number in (0, 1)
                        for part in ("", ", before its attention", ", after its attention", ", its MLP")), "the head"]


@contextlib.contextmanager
def failing(module, kind=Failure, after=False):
    def fail(*_):
        raise kind

    hook = module.register_forward_hook(fail) if after else module.register_forward_pre_hook(fail)
    with pytest.raises(kind):
        yield
    hook.remove()


@pytest.mark.parametrize("kind", [Failure, KeyboardInterrupt])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_a_failure_anywhere_changes_nothing(model, part, first, kind):
    cache = lowkv.Cache.from_model(model, SCHEME)
    before = [] if first else [PROMPT]
    for tokens in before:
        run(model, cache, tokens)
    held, fork = state(cache), cache.fork()
    step = PROMPT if first else STEP
    wanted = clean(model, *before, step)
    for after in (False, True, True):
        with failing(parts_of(model)[part], kind, after):
            run(model, cache, step)
        same(held, state(cache))
    assert torch.equal(run(model, cache, step), wanted)
    assert torch.equal(run(model, fork, step), wanted)
    assert torch.equal(run(model, cache, STEP), clean(model, *before, step, STEP))


@pytest.mark.parametrize("scheme", ["exact", "kivi2", "lowkv2.8,window=16,sinks=3", "kivi4,window=32,flush=64",
                                    "k=sorted-4220-head-1row,v=token-2-g32,window=16,sinks=3"])
@pytest.mark.parametrize("tokens", [1, 31, 200])
def test_every_step_may_fail_once(scheme, tokens):
    """Blocks that a step completes, packs, or drops behind a sliding window come back."""
    model, _ = build("mistral")
    cache, other = (lowkv.Cache.from_model(model, scheme) for _ in range(2))
    generator = torch.Generator().manual_seed(tokens)
    for count in (70, tokens, 1, 33, tokens):
        part = torch.randint(3, 128, (2, count), generator=generator)
        held = state(cache)
        with failing(model.lm_head):
            run(model, cache, part)
        same(held, state(cache))
        assert torch.equal(run(model, cache, part), run(model, other, part))


@torch.no_grad()
def test_a_cache_that_rolled_back_can_be_cropped_forked_saved_and_reordered(tmp_path):
    model, _ = build("llama")
    caches = [lowkv.Cache.from_model(model, SCHEME) for _ in range(2)]
    for cache in caches:
        run(model, cache, PROMPT.repeat(2, 1))
    with failing(model.model.layers[1]):
        run(model, caches[0], STEP.repeat(2, 1))
    for cache in caches:
        cache.crop(-40)
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.save(tmp_path / "prefix")
    same(state(caches[0]), state(caches[1]))
    loaded = lowkv.Cache.load(tmp_path / "prefix", model)
    wanted = run(model, caches[1], STEP.repeat(2, 1))
    for cache in (caches[0].fork(), caches[0], loaded):
        assert torch.equal(run(model, cache, STEP.repeat(2, 1)), wanted)


@torch.no_grad()
def test_generate_goes_on_after_an_interruption(model):
    cache = lowkv.Cache.from_model(model, SCHEME)
    arguments = dict(do_sample=False, max_new_tokens=12, min_new_tokens=12)
    wanted = model.generate(PROMPT, past_key_values=lowkv.Cache.from_model(model, SCHEME), **arguments)
    calls = []

    def interrupt(*_):
        calls.append(None)
        if len(calls) == 5:
            raise KeyboardInterrupt

    hook = parts_of(model)["layer 1, its MLP"].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.generate(PROMPT, past_key_values=cache, **arguments)
    hook.remove()
    assert cache.get_seq_length() == 103
    rest = dict(do_sample=False, max_new_tokens=8, min_new_tokens=8)
    assert torch.equal(model.generate(wanted[:, :104], past_key_values=cache, **rest), wanted)


def test_tokens_are_taken_over_by_all_layers_or_by_none():
    model, _ = build("llama")
    cache = lowkv.KiviCache.from_model(model, residual_length=32)
    run(model, cache, PROMPT)
    held, rows = state(cache), torch.randn(1, 2, 300, 16)
    with pytest.raises(lowkv.Error, match=r"layer 1: keys .* do not fit a cache"):
        cache.add_tokens(((rows, rows), (rows[:, :1], rows[:, :1])))
    same(held, state(cache))


@torch.no_grad()
def test_a_crop_goes_back_in_all_layers_or_in_none():
    """gemma2's sliding layer can't go back so far, its full one could."""
    model, _ = build("gemma2")
    cache = lowkv.Cache.from_model(model, SCHEME)
    run(model, cache, PROMPT.repeat(1, 4))
    held = state(cache)
    with pytest.raises(lowkv.Error, match="can't go back from 400 to 50"):
        cache.crop(-350)
    same(held, state(cache))


@torch.no_grad()
@pytest.mark.parametrize(("select", "chosen"), [
    (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), [1, 1]),
    (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
])
def test_a_batch_is_selected_in_all_layers_or_in_none(monkeypatch, select, chosen):
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model, SCHEME)
    select(cache)  # empty: nothing to select, as with the stock cache
    run(model, cache, PROMPT.repeat(2, 1) + torch.tensor([[0], [1]]))
    held = state(cache)

    def fail(indices):
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(cache.layers[-1], "selected", fail)
        with pytest.raises(MemoryError):
            select(cache)
    same(held, state(cache))
    select(cache)
    for layer, rows in zip(cache.layers, held[-1], strict=True):
        assert all(torch.equal(now, before[chosen]) for now, before in zip(layer.full(), rows, strict=True))


@torch.no_grad()
def test_copies_of_a_model_have_steps_too():
    model, _ = build("llama")
    name = str(type(model))
    lowkv.Cache.from_model(model)
    watched = type(model)
    lowkv.Cache.from_model(model)
    assert type(model) is watched and str(watched) == name
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert str(type(other)) == name and isinstance(other, watched.__mro__[2])
        cache = lowkv.Cache(SCHEME, [None, None])
        with failing(other.lm_head):
            run(other, cache, PROMPT)
        assert cache.get_seq_length() == 0
        assert torch.equal(run(other, cache, PROMPT), clean(model, PROMPT))


@torch.no_grad()
def test_a_step_of_ones_own():
    """For loops over layers of the user's own: step() makes them whole."""
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model, SCHEME)
    run(model, cache, PROMPT)
    held = state(cache)
    with pytest.raises(Failure), cache.step():
        model.model(STEP, past_key_values=cache)
        run(model, cache, STEP)
        raise Failure
    same(held, state(cache))
    with cache.step():
        run(model, cache, STEP)
    assert torch.equal(run(model, cache, STEP), clean(model, PROMPT, STEP, STEP))
