"""After a step that failed, wherever it failed, a cache refuses by name or is what it was before: a retry never
gives wrong numbers."""

import contextlib

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


def clean(model, *parts):
    cache = lowkv.Cache.from_model(model, SCHEME)
    return [run(model, cache, part) for part in parts][-1]


def parts_of(model):
    """By name: what a step goes through, from its first module to its last."""
    blocks = model.get_decoder().layers if hasattr(model.get_decoder(), "layers") else model.get_decoder().h
    found = {}
    for number, block in enumerate(blocks):
        found[f"layer {number}"] = block
        attention = getattr(block, "self_attn", getattr(block, "attn", None))
        found[f"layer {number}, before its attention"] = attention
        found[f"layer {number}, after its attention"] = getattr(attention, "o_proj", getattr(attention, "out_proj", 0))
        found[f"layer {number}, its MLP"] = block.mlp
    found["the head"] = model.lm_head
    return found


PARTS = [f"layer {number}{part}" for number in (0, 1)
         for part in ("", ", before its attention", ", after its attention", ", its MLP")] + ["the head"]


@contextlib.contextmanager
def failing(module):
    def fail(*_):
        raise Failure

    hook = module.register_forward_pre_hook(fail)
    with pytest.raises(Failure):
        yield
    hook.remove()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("first", [True, False], ids=["first step", "later step"])
def test_a_failure_anywhere_never_gives_wrong_numbers(model, part, first):
    cache = lowkv.Cache.from_model(model, SCHEME)
    before = [] if first else [PROMPT]
    for tokens in before:
        run(model, cache, tokens)
    fork = cache.fork()
    step = PROMPT if first else STEP
    with failing(parts_of(model)[part]):
        run(model, cache, step)
    wanted = clean(model, *before, step)
    if all(layer.length == 100 * len(before) for layer in cache.layers):
        assert "layer 0" in part and "after" not in part and "MLP" not in part
        assert torch.equal(run(model, cache, step), wanted)
    else:
        refused(model, cache, step)
    assert torch.equal(run(model, fork, step), wanted)


def refused(model, cache, step):
    for _ in range(2):
        with pytest.raises(lowkv.Error, match="last step"):
            run(model, cache, step)
    with pytest.raises(lowkv.Error, match="last step"):
        run(model, cache.fork(), step)
    cache.reset()
    assert torch.equal(run(model, cache, step), clean(model, step))


def test_a_cache_that_is_not_whole_is_neither_cropped_nor_saved(tmp_path):
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model, SCHEME)
    with failing(model.model.layers[1]):
        run(model, cache, PROMPT)
    for use in (lambda: cache.crop(-1), lambda: cache.save(tmp_path / "prefix")):
        with pytest.raises(lowkv.Error, match="0 to 100: the last step failed or was interrupted"):
            use()


def test_tokens_of_a_step_that_failed_after_its_layers_can_be_taken_back():
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model, "exact")
    wanted = run(model, cache, PROMPT)
    with failing(model.lm_head):
        run(model, cache, STEP)
    with pytest.raises(lowkv.Error, match=r"100 to 105 tokens.*crop\(-5\)"):
        run(model, cache, STEP)
    cache.crop(-5)
    again = run(model, cache, STEP)
    cache.reset()
    assert torch.equal(run(model, cache, PROMPT), wanted) and torch.equal(run(model, cache, STEP), again)


def test_a_layer_that_can_not_be_packed_counts_no_token_twice():
    """Two pieces of 1024 tokens: the first is packed when the second turns out to be infinite in f16."""
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model, SCHEME)
    layer = cache.layers[0]
    rows = torch.randn(1, 2, 2048, 16)
    rows[:, :, 1500] = 1e6
    with pytest.raises(lowkv.Error, match="above 65504"):
        layer.take_over(rows, rows)
    assert layer.length == 2048 and cache.packed_bytes == 0
    assert torch.equal(layer.full()[0], rows)
    with pytest.raises(lowkv.Error, match="last step"):
        layer.append(rows, rows)


def test_a_step_that_can_not_be_packed_is_not_retried():
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model, SCHEME)
    run(model, cache, PROMPT)
    model.model.layers[1].self_attn.v_proj.weight.data.mul_(1e6)
    with pytest.raises(lowkv.Error, match="above 65504"):
        run(model, cache, PROMPT)
    refused(model, cache, PROMPT[:, :3])
