"""What a call of a switched model computes with: lowkv's attention for a lowkv cache, and stock masks and attention for
anything else, whatever other threads do with the model meanwhile."""

import copy
import inspect
import threading

import lowkv
import pytest
import torch
import transformers
from families import GROUPED, IDS, SLIDING, build
from lowkv.masks import NAME, computed_by, lowkv_mask
from lowkv.names import cache_argument
from transformers import DynamicCache
from transformers.masking_utils import (
    causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)
from transformers.models.llama.modeling_llama import LlamaAttention

CACHE = cache_argument(LlamaAttention)
TOKENS = torch.randint(10, 128, (2, 60), generator=torch.Generator().manual_seed(1))
MASK = torch.ones(2, 60, dtype=torch.long)
MASK[1, :12] = 0


def filled(model):
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval(), copy.deepcopy(model)


# ---- decoders whose attention modules say is_causal=False, although their masks are causal ----


def paligemma(text):
    tower = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                 patch_size=7)
    return transformers.PaliGemmaConfig(text_config=text, vision_config=dict(tower, projection_dim=64),
                                        projection_dim=64, image_token_index=5)


GEMMA = dict(GROUPED, head_dim=16)
GEMMA2 = dict(SLIDING, head_dim=16, query_pre_attn_scalar=16, layer_types=["sliding_attention", "full_attention"])
NOT_CAUSAL = {
    "paligemma": lambda: ("PaliGemmaForConditionalGeneration", paligemma(dict(GEMMA, model_type="gemma"))),
    "paligemma2": lambda: ("PaliGemmaForConditionalGeneration", paligemma(dict(GEMMA2, model_type="gemma2"))),
    "gemma": lambda: ("GemmaForCausalLM", transformers.GemmaConfig(**GEMMA, use_bidirectional_attention=True)),
    "bigbird_pegasus": lambda: ("BigBirdPegasusForCausalLM", transformers.BigBirdPegasusConfig(
        vocab_size=128, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, is_decoder=True, **IDS)),
}


@pytest.fixture(params=[(kind, attention) for kind in NOT_CAUSAL for attention in ("sdpa", "eager")], ids="-".join)
def not_causal(request):
    kind, attention = request.param
    name, config = NOT_CAUSAL[kind]()
    model = getattr(transformers, name)
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip("has no sdpa")
    torch.manual_seed(3)
    try:
        return filled(model._from_config(config, attn_implementation=attention))
    except ValueError as error:  # Gemma 2's softcap
        pytest.skip(str(error))


def turns(model, cache, padded, types):
    """A prompt, a chunk behind it, which passes the sliding window, and two single tokens."""
    out, seen = [], 0
    for size in (33, 25, 1, 1) if cache is not None else (60,):
        rows = slice(seen, seen + size)
        more = {"attention_mask": MASK[:, : rows.stop]} if padded else {}
        if types and "token_type_ids" in inspect.signature(model.forward).parameters:
            more["token_type_ids"] = torch.full((2, size), int(seen > 0))
        if cache is not None:
            more[CACHE] = cache
        out.append(model(input_ids=TOKENS[:, rows], use_cache=cache is not None, **more).logits)
        seen += size
    out = torch.cat(out, dim=1)
    return out[MASK.bool()] if padded else out


@torch.no_grad()
@pytest.mark.parametrize("types", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_decoders_whose_modules_are_not_causal(not_causal, padded, types):
    model, stock = not_causal
    lowkv.Cache.from_model(model)

    def own():
        return DynamicCache(config=stock.config.get_text_config(decoder=True))

    want, alone = turns(stock, own(), padded, types), turns(stock, None, padded, types)
    for cache in (lowkv.Cache.from_model(model, "exact"), own()):
        got = turns(model, cache, padded, types)
        assert (got - want).abs().max() < 1e-4 * want.abs().max()
    assert (turns(model, None, padded, types) - alone).abs().max() < 1e-5 * alone.abs().max()


# ---- masks ----


class _Config:
    def __init__(self, stock):
        self._attn_implementation = lowkv.install.Switched(NAME)
        self._attn_implementation.stock = stock


@pytest.mark.parametrize("stock,function", [("sdpa", sdpa_mask), ("eager", eager_mask)])
@pytest.mark.parametrize("queries,cells", [(1, 1), (9, 9), (1, 9), (4, 9)])
@pytest.mark.parametrize("window", [None, 5, 20])
@pytest.mark.parametrize("padded", [False, True])
def test_masks(stock, function, queries, cells, window, padded):
    """Without a lowkv cache they are stock's; with one they mean the same."""
    more = {} if window is None else dict(mask_function=sliding_window_causal_mask_function(window), local_size=window)
    keep = torch.ones(2, cells, dtype=torch.bool)
    keep[1, :3] = not padded
    arguments = dict(batch_size=2, q_length=queries, kv_length=cells, q_offset=cells - queries, kv_offset=0,
                     attention_mask=keep, **{"mask_function": causal_mask_function, **more})
    want, got = function(**arguments), lowkv_mask(config=_Config(stock), **arguments)
    assert (got is None) == (want is None) and (want is None or torch.equal(got, want))
    with computed_by(NAME):
        compact = lowkv_mask(config=_Config(stock), **arguments)
    assert (compact is None) == (want is None)
    if want is not None:
        query = torch.zeros(2, 1, queries, 16)
        seen = lowkv.attention.see(compact, cells, query, True, window).seen(0, cells, 0, queries)
        seen = torch.ones(1, dtype=torch.bool) if seen is None else seen
        assert torch.equal(seen.expand(2, 1, queries, cells), sdpa_mask(**arguments, allow_is_causal_skip=False))


def test_a_mask_that_must_be_made_is_made():
    with computed_by(NAME):
        mask = lowkv_mask(2, 4, 4, allow_is_causal_skip=False, config=_Config("sdpa"))
    assert torch.equal(mask[0, 0], torch.ones(4, 4, dtype=torch.bool).tril())


# ---- caches that transformers leaves out or replaces ----


LONG = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[2.0] * 8,
            original_max_position_embeddings=48, factor=8.0, short_mscale=1.0, long_mscale=1.0)


def phi(kind, **more):
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**GROUPED, original_max_position_embeddings=48, rope_parameters=LONG, **more)
    return filled(transformers.AutoModelForCausalLM.from_config(config))


PHIS = {"phi3": lambda: phi("Phi3Config"), "phi3-sliding": lambda: phi("Phi3Config", sliding_window=24),
        "phimoe": lambda: phi("PhimoeConfig", num_local_experts=2, sliding_window=None)}


@torch.no_grad()
@pytest.mark.parametrize("kind", PHIS)
@pytest.mark.parametrize("more", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 10}],
                         ids=lambda more: next(iter(more), "greedy"))
@pytest.mark.parametrize("tokens", [30, 48, 60])
def test_phi_keeps_its_cache_beyond_its_short_factors(kind, more, tokens):
    if kind == "phi3-sliding" and "prompt_lookup_num_tokens" in more:
        pytest.skip("the cache that stock makes can't be cropped")
    model, stock = PHIS[kind]()
    arguments = dict(max_new_tokens=30, min_new_tokens=30, do_sample=False, return_dict_in_generate=True, **more)
    want = stock.generate(TOKENS[:1, :tokens], **arguments).sequences
    cache = lowkv.Cache.from_model(model, "exact")
    got = model.generate(TOKENS[:1, :tokens], **{CACHE: cache}, **arguments)
    assert torch.equal(got.sequences, want)
    assert got[CACHE] is cache and cache.get_seq_length() == tokens + 29


@torch.no_grad()
def test_phi_computes_a_saved_beginning_again():
    model, stock = PHIS["phi3"]()
    cache = lowkv.Cache.from_model(model, "exact")
    model(TOKENS[:1, :20], **{CACHE: cache})
    got = model.generate(TOKENS[:1], max_new_tokens=5, do_sample=False, **{CACHE: cache})
    assert torch.equal(got, stock.generate(TOKENS[:1], max_new_tokens=5, do_sample=False))
    assert cache.get_seq_length() == 64


def test_generate_sees_the_names_of_the_models_own_arguments():
    model, stock = build("llama")
    lowkv.Cache.from_model(model)
    got, want = (inspect.signature(each.prepare_inputs_for_generation) for each in (model, stock))
    assert got == want


@pytest.mark.parametrize("padded", [False, True])
def test_gradient_checkpointing_is_refused(padded):
    """Its layers get no cache."""
    model, _ = build("llama")
    model.train()
    model.gradient_checkpointing_enable()
    cache = lowkv.Cache.from_model(model, "exact")
    with pytest.raises(lowkv.Error, match="gradient checkpointing leaves caches out"):
        model(TOKENS, attention_mask=MASK if padded else None, use_cache=True, **{CACHE: cache})
    assert cache.get_seq_length() == 0


# ---- weights, other threads ----


@torch.no_grad()
def test_weights_that_the_configuration_asks_for():
    model, stock = build("llama")
    for each in (model, stock):
        each.config.output_attentions = True
    cache = lowkv.Cache.from_model(model, "exact")
    got, want = model(TOKENS).attentions, stock(TOKENS).attentions
    assert len(got) == len(want) and all((a - b).abs().max() < 1e-5 for a, b in zip(got, want, strict=True))
    with pytest.raises(lowkv.Error, match="output_attentions"):
        model(TOKENS, **{CACHE: cache})


def test_attention_of_ones_own_makes_weights():
    class Mine(LlamaAttention):
        pass

    model, stock = build("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Mine
    lowkv.Cache.from_model(model)
    got, want = (each(TOKENS, output_attentions=True).attentions for each in (model, stock))
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(got, want, strict=True))


def in_turn(monkeypatch, kind, first, *others):
    """What `first` gives, with `others` run in threads of their own while it is in its first layer, and what these
    give."""
    forward, found = kind.forward, {}
    done = threading.local()

    def interrupted(self, *args, **kwargs):
        if threading.current_thread() is main and not getattr(done, "once", False):
            done.once = True
            threads = [threading.Thread(target=lambda number=number, call=call: found.update({number: call()}))
                       for number, call in enumerate(others)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return forward(self, *args, **kwargs)

    main = threading.current_thread()
    monkeypatch.setattr(kind, "forward", interrupted)
    result = first()
    monkeypatch.undo()
    return result, *(found[number] for number in range(len(others)))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_weights_for_one_thread_leave_the_others_alone(attention, monkeypatch):
    from families import STOCK

    monkeypatch.setitem(STOCK, "llama", attention)
    model, stock = build("llama")
    lowkv.Cache.from_model(model)
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer

    @torch.no_grad()
    def weights():
        return model(TOKENS, output_attentions=True)

    @torch.no_grad()
    def plain(**more):
        return model(TOKENS, attention_mask=MASK, **more).logits[MASK.bool()]

    def packed():
        return plain(**{CACHE: lowkv.Cache.from_model(model, "exact")})

    outer, *got, inner = in_turn(monkeypatch, layer, weights, lambda: plain(use_cache=False), plain, packed, weights)
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        want = stock(TOKENS, attention_mask=MASK).logits[MASK.bool()]
        expected = stock(TOKENS, output_attentions=True)
    for logits in got:
        assert (logits - want).abs().max() < 1e-4
    for each in (outer, inner):
        assert (each.logits - expected.logits).abs().max() < 1e-4
        assert all((a - b).abs().max() < 1e-5 for a, b in zip(each.attentions, expected.attentions, strict=True))


def test_generate_batch_leaves_other_threads_alone():
    """It computes in a thread of its own, with a cache of transformers' own."""
    model, stock = build("llama")
    cache = lowkv.Cache.from_model(model, "exact")
    settings = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found, failed = {}, []

    def batch():
        found.update(model.generate_batch([TOKENS[0, :20].tolist()], generation_config=settings))

    thread = threading.Thread(target=batch)
    with torch.no_grad():
        want = stock(TOKENS).logits
        thread.start()
        while thread.is_alive():
            cache.reset()
            failed += [name for name, more in (("packed", {CACHE: cache}), ("own", {}))
                       if (model(TOKENS, **more).logits - want).abs().max() > 1e-4]
        thread.join()
        expected = stock.generate(TOKENS[:1, :20], generation_config=settings)[0, 20:].tolist()
    assert not failed and model.config._attn_implementation == "lowkv"
    assert [each.generated_tokens for each in found.values()] == [expected]


# ---- traced, exported and compiled, without a lowkv cache ----


@pytest.fixture(params=["sdpa", "eager"])
def traceable(request, monkeypatch):
    from families import STOCK

    monkeypatch.setitem(STOCK, "llama", request.param)
    model, stock = build("llama")
    lowkv.Cache.from_model(model)
    return model.requires_grad_(False), stock


def test_traced_models_take_any_padding(traceable):
    model, stock = traceable
    traced = torch.jit.trace(lambda tokens, mask: model(tokens, attention_mask=mask, use_cache=False,
                                                        return_dict=False)[0],
                             (TOKENS, torch.ones_like(TOKENS)), check_trace=False)
    want = stock(TOKENS, attention_mask=MASK, use_cache=False).logits
    assert (traced(TOKENS, MASK) - want)[MASK.bool()].abs().max() < 1e-4


@pytest.mark.parametrize("strict", [False, True])
def test_exported_models(traceable, strict):
    model, stock = traceable
    arguments = dict(attention_mask=torch.ones_like(TOKENS), use_cache=False)
    exported = torch.export.export(model, (TOKENS,), kwargs=arguments, strict=strict).module()
    want = stock(TOKENS, attention_mask=MASK, use_cache=False).logits
    got = exported(TOKENS, attention_mask=MASK, use_cache=False).logits
    assert (got - want)[MASK.bool()].abs().max() < 1e-4


def test_compiled_models(traceable):
    model, stock = traceable
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    want = stock(TOKENS, attention_mask=MASK, use_cache=False).logits
    assert (compiled(TOKENS, attention_mask=MASK, use_cache=False).logits - want)[MASK.bool()].abs().max() < 1e-4
    torch._dynamo.reset()
