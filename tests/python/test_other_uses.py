"""What people do with a model beside giving it a lowkv cache, and caches that come from elsewhere."""

import copy
import pickle
import subprocess
import sys

import lowkv
import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from families import FAMILIES, SMALL, STOCK, build
from lowkv.names import cache_argument
from transformers import DynamicCache, StaticCache
from transformers.models.llama.modeling_llama import LlamaAttention

CACHE = cache_argument(LlamaAttention)
TOKENS = torch.randint(3, 128, (1, 120), generator=torch.Generator().manual_seed(2))


def git():
    """Its vision tower calls the AttentionInterface, its text decoder does not."""
    torch.manual_seed(0)
    config = transformers.GitConfig(**{**SMALL, "intermediate_size": 96}, vision_config=dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16))
    model = transformers.GitForCausalLM._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


# ---- with other caches, or none, a model computes what it did ----


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_restore_gives_the_model_back(family):
    model, stock = build(family)
    kinds = [type(module) for module in model.modules()]
    want = model(TOKENS).logits
    lowkv.Cache.from_model(model)
    lowkv.Cache.from_model(model)
    lowkv.restore(model)
    lowkv.restore(model)
    assert [type(module) for module in model.modules()] == kinds
    assert model.config._attn_implementation == stock.config._attn_implementation
    assert torch.equal(model(TOKENS).logits, want)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral", "gpt2", "opt", "stablelm"])
def test_attention_weights_without_a_lowkv_cache(family):
    model, stock = build(family)
    lowkv.Cache.from_model(model)
    got, want = (m(TOKENS, output_attentions=True).attentions for m in (model, stock))
    for layer, other in zip(got, want, strict=True):
        assert (layer - other).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_weights_of_a_lowkv_cache_are_refused(family):
    model, _ = build(family)
    cache = lowkv.Cache.from_model(model)
    with pytest.raises(lowkv.Error, match="output_attentions"):
        model(TOKENS, output_attentions=True, **{CACHE: cache})
    assert cache.get_seq_length() == 0
    if family in ("llama", "gpt2"):  # what generate() passes on
        with pytest.raises(lowkv.Error, match="output_attentions"):
            model.generate(TOKENS, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True,
                           **{CACHE: cache})


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("labelled", [0, 1])
def test_gradients_without_a_cache_are_those_of_stock_sdpa(family, labelled, monkeypatch):
    """Of a left-padded batch: what padding sees matters where its last token is labelled."""
    monkeypatch.setitem(STOCK, family, "sdpa")
    model, stock = build(family)
    lowkv.Cache.from_model(model, "exact")
    tokens = torch.randint(3, 128, (2, 40), generator=torch.Generator().manual_seed(0))
    seen = (torch.arange(40) >= torch.tensor([[0], [9]])).long()
    labels = tokens.clone()
    labels[1, : 10 - labelled] = -100
    gradients = []
    for its in (model, stock):
        its(tokens, attention_mask=seen, labels=labels).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in its.parameters() if p.grad is not None]))
    got, want = gradients
    assert (got - want).norm() < 1e-3 * want.norm()


@torch.no_grad()
@pytest.mark.parametrize("first", ["hooks", "lowkv"])
@pytest.mark.parametrize("family", ["llama", "gptj", "falcon-rope", "falcon-alibi", "bloom", "mpt"])
def test_modules_with_hooks_of_accelerate(family, first):
    """Those of a device_map with a part on the disk, which keep the forward() that a module had."""
    model, stock = build(family)
    if first == "lowkv":
        lowkv.Cache.from_model(model)
    for module in model.modules():
        add_hook_to_module(module, ModelHook())
    cache = {cache_argument(model): lowkv.Cache.from_model(model, "exact")}
    want = stock(TOKENS).logits
    got = torch.cat([model(part, **cache).logits for part in TOKENS.split(70, dim=1)], dim=1)
    assert (got - want).abs().max() < 1e-4
    assert (model(TOKENS).logits - want).abs().max() < 1e-4
    lowkv.restore(model)
    assert (model(TOKENS).logits - want).abs().max() < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2"])
def test_models_that_share_a_config(family):
    model, stock = build(family)
    lowkv.Cache.from_model(model)
    other = type(stock)(model.config).eval()  # as from_config(model.config) makes it
    other.load_state_dict(stock.state_dict())
    want = stock(TOKENS).logits
    assert (other(TOKENS).logits - want).abs().max() < 1e-4
    for one in (other, model, other):
        assert (one(TOKENS, **{CACHE: lowkv.Cache.from_model(one, "exact")}).logits - want).abs().max() < 1e-4
    kept = lowkv.Cache.from_model(model, "exact")
    lowkv.restore(other)  # both, as the config is one
    assert (model(TOKENS).logits - want).abs().max() < 1e-4
    with pytest.raises(lowkv.Error, match=r"After lowkv.restore\(\)"):
        model(TOKENS, **{CACHE: kept})
    again = lowkv.Cache.from_model(model, "exact")
    assert (model(TOKENS, **{CACHE: again}).logits - want).abs().max() < 1e-4


def test_a_cache_is_not_pickled():
    with pytest.raises(lowkv.Error, match=r"save\(\) writes it to a file"):
        pickle.dumps(lowkv.Cache.from_model(build("llama")[0]))


def test_continuous_batching_has_the_models_own_attention(monkeypatch):
    model, _ = build("llama")
    lowkv.Cache.from_model(model)
    seen = []
    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate_batch",
                        lambda self, inputs: seen.append(self.config._attn_implementation))
    model.generate_batch([[3, 4]])
    assert seen == ["eager"] and model.config._attn_implementation == "lowkv"
    with pytest.raises(lowkv.Error, match=r"call lowkv.restore\(model\) first"):
        model.init_continuous_batching()


@pytest.mark.long
@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.model, lambda model: model.model.layers[0]])
def test_a_switched_model_computes_in_another_process(part, tmp_path):
    model, _ = build("llama")
    lowkv.Cache.from_model(model)
    (tmp_path / "model").write_bytes(pickle.dumps((part(model), model.config)))
    code = ("import pickle, torch\nmodule, config = pickle.load(open('model', 'rb'))\n"
            "from transformers import AttentionInterface\n"
            "assert config._attn_implementation in AttentionInterface().valid_keys()\n"
            "if hasattr(module, 'config'): module(torch.arange(3, 20)[None])\n")
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@torch.no_grad()
def test_a_refused_model_is_left_as_it_was():
    model = git()
    want = model(TOKENS[:, :20]).logits
    with pytest.raises(lowkv.Error, match="computes its attention itself"):
        lowkv.Cache.from_model(model)
    assert torch.equal(model(TOKENS[:, :20]).logits, want)


@torch.no_grad()
def test_a_model_refused_at_its_first_step_is_as_it_was(monkeypatch):
    monkeypatch.setattr("lowkv.install._goes_through_the_interface", lambda model: True)
    model = git()
    want = model(TOKENS[:, :20]).logits
    cache = lowkv.Cache.from_model(model)
    with pytest.raises(lowkv.Error, match="uses the cached keys or values itself"):
        model(TOKENS[:, :20], past_key_values=cache)
    assert cache.get_seq_length() == 0
    assert torch.equal(model(TOKENS[:, :20]).logits, want)


# ---- refused by name ----


@pytest.mark.long
@torch.no_grad()
def test_a_compiled_model():
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model, "kivi4")
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(Exception, match=r"torch\.compile with a lowkv cache is not served"):
        compiled(TOKENS, past_key_values=cache)
    with pytest.raises(lowkv.Error, match=r"torch\.compile with a lowkv cache is not served"):
        lowkv.Cache.from_model(compiled)
    torch._dynamo.reset()
    fresh = lowkv.Cache.from_model(model, "kivi4")
    assert cache.get_seq_length() == 0
    assert torch.equal(model(TOKENS, past_key_values=cache).logits, model(TOKENS, past_key_values=fresh).logits)


def test_a_peft_model_is_told_what_to_give():
    class PeftModel(torch.nn.Module):
        def get_base_model(self):
            return None

    with pytest.raises(lowkv.Error, match=r"not PeftModel: give and call model.get_base_model\(\)"):
        lowkv.Cache.from_model(PeftModel())


@pytest.mark.parametrize("trains", ["q_proj", "k_proj", "v_proj"])
def test_gradients_of_one_projection(trains):
    model, _ = build("llama")
    model.requires_grad_(False)
    getattr(model.model.layers[1].self_attn, trains).weight.requires_grad_(True)
    cache = lowkv.Cache.from_model(model, "exact")
    with pytest.raises(lowkv.Error, match="no gradients"):
        model(TOKENS, past_key_values=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("first,then,refused", [
    (torch.bfloat16, torch.float32, True), (torch.float16, torch.bfloat16, True),
    (torch.bfloat16, torch.float16, True), (torch.float32, torch.bfloat16, False)])
def test_rows_are_never_rounded_to_another_dtype(first, then, refused):
    layer = lowkv.Cache("exact", [None]).layers[0]
    rows = torch.randn(1, 2, 8, 64)
    layer.append(rows.to(first), rows.to(first))
    layer.pack()
    for keys, values in ((then, then), (first, then)):
        if refused:
            with pytest.raises(lowkv.Error, match="to which they would be rounded"):
                layer.append(rows.to(keys), rows.to(values))
        else:
            layer.append(rows.to(keys), rows.to(values))
            layer.pack()
            assert torch.equal(layer.full()[1][:, :, -8:], rows.to(then).float())


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "bloom", "falcon-rope"])
def test_autocast_loses_no_more_than_with_stock_caches(family):
    """Keys are float32 where a model rotates them, else bfloat16, as the values are."""
    model, stock = build(family)
    parts = [TOKENS[:, :70], TOKENS[:, 70:90], *TOKENS[:, 90:100].split(1, dim=1)]
    want, errors = stock(TOKENS[:, :100]).logits, []
    for its, cache in ((model, lowkv.Cache.from_model(model, "exact")), (stock, DynamicCache())):
        with torch.autocast("cpu", torch.bfloat16):
            got = torch.cat([its(part, **{cache_argument(its): cache}).logits for part in parts], dim=1)
        errors.append((got.float() - want).norm() / want.norm())
    assert errors[0] < 1.2 * errors[1] < 0.1


@torch.no_grad()
@pytest.mark.parametrize("recording", [False, True])
def test_a_whole_mask_on_a_sliding_layer(recording):
    model, _ = build("mistral")  # window 24
    cache = lowkv.Cache.from_model(model, "exact")
    if recording:
        cache.activate_past_recording()
    model(TOKENS[:, :-2], past_key_values=cache)
    with pytest.raises(lowkv.Error, match="layer 0, which slides over 24 tokens"):
        model(TOKENS[:, -2:], past_key_values=cache, attention_mask=torch.ones(1, 1, 2, 120, dtype=torch.bool))
    assert cache.get_seq_length() == 118
    other = cache.fork()
    of_the_window = torch.ones(1, 1, 1, 24, dtype=torch.bool)
    got = model(TOKENS[:, -1:], past_key_values=cache, attention_mask=of_the_window).logits
    assert torch.equal(got.argmax(-1), model(TOKENS[:, -1:], past_key_values=other).logits.argmax(-1))


# ---- other caches, dtypes, crops ----


@torch.no_grad()
def test_tokens_of_stock_caches():
    model, stock = build("mistral")
    long, short = DynamicCache(config=stock.config), DynamicCache(config=stock.config)
    stock(TOKENS, past_key_values=long)
    stock(TOKENS[:, :20], past_key_values=short)
    cache = lowkv.KiviCache.from_model(model)
    with pytest.raises(lowkv.Error, match="DynamicSlidingWindowLayer, has seen 120 tokens and kept 23"):
        cache.add_tokens(long)
    assert cache.get_seq_length() == 0
    cache.add_tokens(short)
    assert cache.get_seq_length() == 20

    model, stock = build("llama")
    static, own = StaticCache(config=stock.config, max_cache_len=200), DynamicCache(config=stock.config)
    for other in (static, own):
        stock(TOKENS, past_key_values=other)
    caches = [lowkv.KiviCache.from_model(model) for _ in range(2)]
    for cache, other in zip(caches, (static, own), strict=True):
        cache.add_tokens(other)
        assert cache.get_seq_length() == 120
    for got, want in zip(caches[0].full(0), caches[1].full(0), strict=True):
        assert (got - want).abs().max() < 1e-5

    class QuantoQuantizedLayer(type(own.layers[0])):
        def _quantize(self, tensor, axis):
            raise NotImplementedError

    own.layers[1].__class__ = QuantoQuantizedLayer
    with pytest.raises(lowkv.Error, match="layer 1 of that cache is a QuantoQuantizedLayer"):
        lowkv.KiviCache.from_model(model).add_tokens(own)


@torch.no_grad()
def test_another_default_dtype():
    model, _ = build("llama", torch.bfloat16)
    tokens, mask = TOKENS.view(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[1, :20] = 0
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.set_default_dtype(dtype)
        try:
            cache = lowkv.Cache.from_model(model, "kivi4,window=16")
            results.append(model.generate(tokens, attention_mask=mask, past_key_values=cache, max_new_tokens=20,
                                          do_sample=False))
        finally:
            torch.set_default_dtype(torch.float32)
    assert all(torch.equal(result, results[0]) for result in results)


@torch.no_grad()
@pytest.mark.parametrize("family", ["mistral", "gemma2", "llama"])
def test_cropping_twice(family):
    model, _ = build(family)
    tokens = torch.randint(3, 128, (1, 900), generator=torch.Generator().manual_seed(8))
    cache = lowkv.Cache.from_model(model, "exact")
    cache.activate_past_recording()
    model(tokens, past_key_values=cache)
    for back in (1, 400, 100):
        cache.crop(-back)
    fresh = lowkv.Cache.from_model(model, "exact")
    model(tokens[:, :399], past_key_values=fresh)
    got, want = (model(tokens[:, 399:], past_key_values=each).logits for each in (cache, fresh))
    assert (got - want).abs().max() < 1e-3


@torch.no_grad()
@pytest.mark.parametrize("pads", [1, 300, 500])
def test_padding_is_nobodys_query(pads):
    """Queries of padding, here enormous, leave keys coded as they are without them."""
    results = []
    for size in (1, 1e4):
        torch.manual_seed(4)
        layer = lowkv.Cache("lowkv2.8,window=0,sinks=0", [None]).layers[0]
        rows, query = torch.randn(2, 2, 640, 64), torch.randn(2, 4, 640, 64)
        keep = torch.ones(2, 640, dtype=torch.bool)
        keep[1, :pads] = False
        query[1, :, :pads] *= size * torch.arange(64)
        layer.append(rows, rows)
        layer.attend(query, lowkv.visibility.Visibility(640, 640, keep=keep), 0.125, None, None)
        results.append(layer.full()[0])
    assert torch.equal(*results)


@torch.no_grad()
def test_generate_takes_the_models_own_settings(monkeypatch):
    from tokenizers import Tokenizer, models, pre_tokenizers

    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w3"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0", eos_token="w2")
    model, _ = build("llama")
    want = lowkv.generate(model, tokenizer, "w5 w6 w7", max_new_tokens=4)
    model.generation_config.return_dict_in_generate = True
    assert lowkv.generate(model, tokenizer, "w5 w6 w7", max_new_tokens=4) == want
    seen = []
    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate",
                        lambda self, **arguments: seen.append(arguments) or TOKENS)
    for given in ({}, {"temperature": 0.5}, {"top_k": 7}):
        lowkv.generate(model, tokenizer, "w5", do_sample=True, **given)
        assert {name: seen[-1][name] for name in ("temperature", "top_k") if name in seen[-1]} == given


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("padded", [False, True])
def test_masked_prompts_are_few_calls_of_torch(window, padded, monkeypatch):
    calls, sdpa = [], torch.nn.functional.scaled_dot_product_attention

    def counted(query, keys, *args, **kwargs):
        calls.append((query.shape[2], keys.shape[2]))
        return sdpa(query, keys, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    batch, heads, tokens = 2, 32, 1024
    query, rows = torch.randn(batch, heads, tokens, 16), torch.randn(batch, 8, tokens, 16)
    keep = torch.ones(batch, tokens, dtype=torch.bool)
    keep[1, :40] = not padded
    visibility = lowkv.visibility.Visibility(tokens, tokens, window=window, keep=keep if padded else None)
    got = lowkv.rows_attention.attend_to_rows(query, rows, rows, visibility, 0.25)
    assert min(queries for queries, _ in calls) >= 128
    assert window is None or max(cells for _, cells in calls) <= 128 + window - 1
    monkeypatch.undo()
    want = sdpa(query, rows, rows, attn_mask=visibility.mask(0, tokens, 0, tokens), scale=0.25, enable_gqa=True)
    real = keep[:, None].expand(-1, heads, -1)
    assert (got - want)[real].abs().max() < 1e-4


def test_copies_are_restored_apart():
    model, _ = build("llama")
    lowkv.Cache.from_model(model)
    other = copy.deepcopy(model)
    lowkv.restore(other)
    assert other.config._attn_implementation == "eager" and model.config._attn_implementation == "lowkv"
