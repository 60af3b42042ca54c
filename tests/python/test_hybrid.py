"""Hybrid models, beyond what test_families.py has of each of them: their states beside lowkv's rows."""

import copy

import lowkv
import pytest
import torch
import transformers
from families import GROUPED, LINEAR, build
from lowkv import saving
from lowkv.layer import Layer
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

KINDS = ["qwen3_next", "granitemoehybrid", "jamba", "lfm2", "falcon_h1", "zamba2", "nemotron_h"]
SCHEME = "lowkv2.8,window=16,sinks=0"
PACKED = "int8,window=0,sinks=0"


def ids(batch=1, tokens=120, seed=3):
    return torch.randint(3, 128, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=KINDS)
def models(request):
    return build(request.param)


@torch.no_grad()
def run(model, cache, tokens):
    return model(tokens, past_key_values=cache, use_cache=True).logits


def step_by_step(model, cache, tokens):
    return torch.cat([run(model, cache, part) for part in (tokens[:, :-100], *tokens[:, -100:].split(1, dim=1))], dim=1)


def held(cache):
    """What a cache keeps, bit for bit: images of rows, and the model's states."""
    images = [bytes(layer.rows.save()) for layer in cache.attention_layers if layer.length]
    states = [state.clone() for layer in cache.layers_with_states
              for of_kind in (layer.conv_states, layer.recurrent_states)
              for state in of_kind.values() if state is not None]
    return images, states


def same(before, after):
    return before[0] == after[0] and len(before[1]) == len(after[1]) and all(map(torch.equal, before[1], after[1]))


def test_attention_is_packed_and_states_are_the_models_own(models):
    """The model's own cache with the rows and states that lowkv's holds goes on as that does: 20 times as near as the
    own cache that has its own."""
    model, stock = models
    cache, own, tokens = lowkv.Cache.from_model(model, SCHEME), DynamicCache(config=stock.config), ids(2, 600)
    got, want = (step_by_step(which, held_by, tokens) for which, held_by in ((model, cache), (stock, own)))
    assert torch.nn.functional.cosine_similarity(got, want, dim=-1).mean() > 0.95
    for layer, theirs in zip(cache.layers, own.layers, strict=True):
        assert isinstance(layer, Layer) == isinstance(theirs, CacheLayerMixin)
        assert isinstance(layer, LinearAttentionLayer) == isinstance(theirs, LinearAttentionLayer)
        if isinstance(layer, Layer):
            assert layer.length == 600 and layer.exact_tokens < 160
            assert 2 * layer.nbytes < layer.float32_bytes == theirs.keys.nbytes + theirs.values.nbytes
    assert cache.exact_bytes + cache.packed_bytes == sum(layer.nbytes for layer in cache.attention_layers)

    plain, decoded = copy.deepcopy(own), copy.deepcopy(own)
    for layer, theirs in zip(cache.layers, decoded.layers, strict=True):
        if isinstance(layer, Layer):
            theirs.keys, theirs.values = layer.full()
        if isinstance(layer, LinearAttentionLayer):
            theirs.conv_states = copy.deepcopy(layer.conv_states)
            theirs.recurrent_states = copy.deepcopy(layer.recurrent_states)
    next_ones = ids(2, 3, seed=5)
    far, near = (run(stock, other, next_ones) for other in (plain, decoded))
    got = run(model, cache, next_ones)
    assert 20 * (got - near).abs().max() < (got - far).abs().max()


MODES = {
    "sampling": dict(do_sample=True, temperature=0.8, top_k=50),
    "beams": dict(do_sample=False, num_beams=3),
    "several-sequences": dict(do_sample=True, num_return_sequences=3),
    "chunked-prefill": dict(do_sample=False, prefill_chunk_size=32),
}


@pytest.mark.parametrize("mode", MODES)
def test_generate_equals_the_own_cache(models, mode):
    results = []
    for model, cache in ((models[0], {"past_key_values": lowkv.Cache.from_model(models[0], "exact")}), (models[1], {})):
        torch.manual_seed(11)
        results.append(model.generate(ids(), max_new_tokens=20, min_new_tokens=20, **MODES[mode], **cache))
    assert torch.equal(*results)


def test_sequences_are_selected_with_their_states(models):
    model, _ = models
    cache, tokens = lowkv.Cache.from_model(model, PACKED), ids(3)
    run(model, cache, tokens)
    want = run(model, cache.fork(), ids(3, 4, seed=5))
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    got = run(model, cache, ids(3, 4, seed=5)[[2, 2, 0, 0]])
    assert (got - want[[2, 2, 0, 0]]).abs().max() < 1e-4


def test_forks_go_apart(models):
    model, _ = models
    cache = lowkv.Cache.from_model(model, PACKED)
    run(model, cache, ids())
    before, want = held(cache), run(model, copy.deepcopy(cache), ids(tokens=1, seed=5))
    fork = cache.fork()
    for part in ids(tokens=9, seed=6).split(3, dim=1):
        run(model, fork, part)
    assert same(before, held(cache)) and not same(before, held(fork))
    assert torch.equal(run(model, cache, ids(tokens=1, seed=5)), want)


@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("filled", [False, True])
def test_a_failed_step_takes_states_back(models, step, filled):
    """In the middle and behind each layer, by single tokens, which change states in place, and by several."""
    model, _ = models
    cache, prompt, tokens = lowkv.Cache.from_model(model, PACKED), ids(), ids(tokens=step, seed=5)
    if filled:
        run(model, cache, prompt)
    before, want = held(cache), run(model, cache.fork(), tokens)

    def fail(*_):
        raise KeyboardInterrupt

    for layer in model.get_decoder().layers:
        for module in (layer, *layer.children()):
            hook = module.register_forward_hook(fail)
            try:
                run(model, cache, tokens)
            except KeyboardInterrupt:
                assert same(before, held(cache))
            else:
                pytest.fail(f"{type(module).__name__} was not called")
            finally:
                hook.remove()
    assert torch.equal(run(model, cache, tokens), want)


def test_states_change_in_steps_alone(models):
    model, stock = models
    cache = lowkv.Cache.from_model(model, "exact")
    with torch.no_grad():
        with pytest.raises(lowkv.Error, match=r"call the model that Cache\.from_model"):
            model.get_decoder()(ids(), past_key_values=cache)
        assert cache.get_seq_length() == 0
        with cache.step():
            got = model.get_decoder()(ids(), past_key_values=cache).last_hidden_state
        assert torch.allclose(got, stock.get_decoder()(ids()).last_hidden_state, atol=1e-4)


def test_a_reset_cache_begins_anew(models):
    model, _ = models
    cache = lowkv.Cache.from_model(model, PACKED)
    run(model, cache, ids())
    cache.reset()
    assert cache.get_seq_length() == cache.packed_bytes == 0
    want = step_by_step(model, lowkv.Cache.from_model(model, PACKED), ids(2))
    assert torch.equal(step_by_step(model, cache, ids(2)), want)


def test_recurrent_states_can_not_be_cropped(models):
    model, _ = models
    if "Lfm2" in type(model).__name__:
        pytest.skip("it has none")
    cache = lowkv.Cache.from_model(model, PACKED)
    with pytest.raises(ValueError, match="not supported with stateful models"):  # transformers' own words
        model.generate(ids(), past_key_values=cache, prompt_lookup_num_tokens=5)
    assert cache.get_seq_length() == 0
    cache.activate_past_recording()
    run(model, cache, ids())
    before = held(cache)
    with pytest.raises(lowkv.Error, match=r"layer [0-9]: a recurrent state can't go back by tokens"):
        cache.crop(-3)
    assert same(before, held(cache))


@pytest.mark.parametrize("tokens", [1, 2, 120])
def test_guesses_are_cropped_out_of_a_convolution(tokens):
    model, stock = build("lfm2")
    prompt, arguments = ids(tokens=tokens), dict(do_sample=False, max_new_tokens=30, min_new_tokens=30)
    assistant = build("qwen3")[0]  # nearly always wrong
    cache = lowkv.Cache.from_model(model, "exact")
    got = model.generate(prompt, past_key_values=cache, assistant_model=assistant, **arguments)
    assert torch.equal(got, stock.generate(prompt, **arguments))


@pytest.mark.parametrize("first", [1, 2, 3, 50])
@pytest.mark.parametrize("kept", [1, 2, 40])
def test_a_cropped_convolution_is_as_if_it_had_not_seen_more(first, kept):
    model, _ = build("lfm2")
    cache, tokens = lowkv.Cache.from_model(model, PACKED), ids(tokens=60)
    cache.activate_past_recording()
    for part in (tokens[:, :first], tokens[:, first:]):
        run(model, cache, part)
    cache.crop(kept - 60)
    want = lowkv.Cache.from_model(model, "exact")
    run(model, want, tokens[:, :kept])
    for part in ids(tokens=4, seed=6).split(1, dim=1):
        assert (run(model, cache, part) - run(model, want, part)).abs().max() < 0.02


def test_a_convolution_that_recorded_nothing_is_not_cropped():
    model, _ = build("lfm2")
    cache = lowkv.Cache.from_model(model, PACKED)
    run(model, cache, ids())
    cache.crop(0)
    cache.activate_past_recording()
    run(model, cache, ids(tokens=5))
    before = held(cache)
    for tokens in (-6, 3):
        with pytest.raises(lowkv.Error, match=r"layer 0: a convolution's state can't go back by [63] tokens"):
            cache.crop(tokens)
        assert same(before, held(cache))
    cache.crop(-5)
    assert cache.get_seq_length() == 120


@pytest.mark.parametrize("recorded", [False, True])
def test_a_saved_prefix_goes_on(models, tmp_path, recorded):
    model, _ = models
    cache = lowkv.Cache.from_model(model, SCHEME)
    cache.save(tmp_path / "empty")
    assert lowkv.Cache.load(tmp_path / "empty", model).get_seq_length() == 0
    if recorded:
        cache.activate_past_recording()
    run(model, cache, ids(2, 200))
    cache.save(tmp_path / "prefix")
    loaded = lowkv.Cache.load(tmp_path / "prefix", model)
    assert held(loaded)[0] == held(cache)[0]
    assert all(layer.conv_states[0].shape[-1] <= 4 for layer in loaded.layers_with_states)
    if recorded:
        loaded.activate_past_recording()
    # Torch convolves the longer states of a cache that has recorded, and with AVX2 alone it rounds them otherwise.
    most = 1e-4 if recorded else 0
    for part in (ids(2, 1), ids(2, 5), ids(2, 1)):
        assert (run(model, loaded, part) - run(model, cache, part)).abs().max() <= most


def test_a_saved_prefix_with_other_states_is_refused(models, tmp_path):
    from safetensors import safe_open
    from safetensors.torch import save_file

    model, _ = models
    cache = lowkv.Cache.from_model(model, SCHEME)
    run(model, cache, ids())
    cache.save(tmp_path / "prefix")
    with safe_open(tmp_path / "prefix", framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    states = [name for name in tensors if "." in name]
    assert states
    damages = [{**tensors, states[0]: tensors[states[0]] + 1}, {k: v for k, v in tensors.items() if k != states[-1]}]
    for damaged in damages:
        save_file(damaged, tmp_path / "prefix", metadata)
        with pytest.raises(lowkv.Error, match="its tensors are not those that were saved together"):
            lowkv.Cache.load(tmp_path / "prefix", model)
    rows = {name: tensor for name, tensor in tensors.items() if name not in states}
    save_file(rows, tmp_path / "prefix", {**metadata, "contents": saving._contents(rows, rows.get)})
    with pytest.raises(lowkv.Error, match=r"it has no image of layer '[0-9]+ \(states\)'"):
        lowkv.Cache.load(tmp_path / "prefix", model)
    layer = states[0].partition(".")[0]
    damages = {f"{layer}.other": torch.zeros(2, 2), f"{layer}.": torch.ones(2), states[0]: torch.zeros(())}
    for name, tensor in damages.items():
        other = {**tensors, name: tensor}
        save_file(other, tmp_path / "prefix", {**metadata, "contents": saving._contents(other, other.get)})
        with pytest.raises(lowkv.Error, match=rf"it has (a tensor '{name}'|no image of layer '{layer} \(states\)')"):
            lowkv.Cache.load(tmp_path / "prefix", model)


def test_stock_caches_are_not_taken_over():
    model, stock = build("qwen3_next")
    own = DynamicCache(config=stock.config)
    run(stock, own, ids())
    cache = lowkv.KiviCache.from_model(model)
    with pytest.raises(lowkv.Error, match="a hybrid model keeps states beside keys and values"):
        cache.add_tokens(own)
    for ask in (cache.full, cache.get_stats):
        with pytest.raises(lowkv.Error, match="layer 0 of this model has no keys and values"):
            ask(0)
    run(model, cache, ids())
    assert cache.get_stats(1)["tokens"] == 120 and cache.full(1)[0].shape == (1, 2, 120, 32)


@pytest.mark.parametrize("message,config,more", [
    ("RecurrentGemmaModel keeps its recurrent states in the model", "RecurrentGemmaConfig", {}),
    ("MiniMaxModel needs a cache of a class of its own", "MiniMaxConfig", {}),
    ("Mamba2Model has no attention layers", "Mamba2Config", dict(num_heads=8, head_dim=16)),
    ("KimiLinearModel has multi-head latent attention", "KimiLinearConfig", dict(layer_types=LINEAR)),
    ("InklingTextModel has layers of type hybrid_sliding", "InklingTextConfig", {}),
])
def test_others_are_refused_before_anything_is_computed(message, config, more):
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(getattr(transformers, config)(**{**GROUPED, **more}))
    attention = model.config._attn_implementation
    with pytest.raises(lowkv.Error, match=message):
        lowkv.Cache.from_model(model)
    assert model.config._attn_implementation == attention
