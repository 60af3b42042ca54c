"""What can't be served is refused by name, and never computed wrongly."""

import lowkv
import pytest
import torch
import transformers
from families import GROUPED, build
from lowkv.names import cache_argument
from transformers.models.llama.modeling_llama import LlamaAttention

TOKENS = torch.arange(3, 43)[None]
CACHE = cache_argument(LlamaAttention)


@torch.no_grad()
def test_a_model_that_computes_attention_itself_stops_at_its_first_operation():
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model)

    class Own(LlamaAttention):
        def forward(self, hidden_states, **kwargs):
            keys = self.k_proj(hidden_states).unflatten(2, (2, -1)).transpose(1, 2)
            keys, _ = kwargs[CACHE].update(keys, keys, self.layer_idx)
            return keys @ keys.transpose(2, 3), None

    model.model.layers[1].self_attn.__class__ = Own
    with pytest.raises(lowkv.Error, match="layer 1: this model's attention uses the cached keys"):
        model(TOKENS, past_key_values=cache)


@torch.no_grad()
def test_rows_that_nobody_attended_to_are_noticed():
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model)
    rows = torch.zeros(1, 2, 4, 16)
    cache.update(rows, rows, 0)
    with pytest.raises(lowkv.Error, match="layer 0: its last keys were stored but never attended to"):
        cache.update(rows, rows, 0)


def refused(message, config, arguments=GROUPED, **more):
    model = transformers.AutoModel.from_config(getattr(transformers, config)(**{**arguments, **more}))
    with pytest.raises(lowkv.Error, match=message):
        lowkv.Cache.from_model(model)


def test_models_without_a_plain_decoder():
    refused("an encoder and a decoder", "T5Config", dict(vocab_size=64, d_model=32, num_layers=1, num_heads=2, d_ff=32))
    refused("computes its attention itself", "OpenAIGPTConfig", dict(vocab_size=64, n_embd=32, n_layer=1, n_head=2))
    refused("layers of type chunked_attention", "Llama4TextConfig", layer_types=["chunked_attention"] * 2)


def test_latent_attention():
    refused("multi-head latent attention", "DeepseekV3Config", n_routed_experts=4, num_experts_per_tok=2, n_group=1,
            topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8)


class LoggedAttention(LlamaAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


@torch.no_grad()
@pytest.mark.parametrize("how", ["a class", "a patch"])
def test_an_attention_of_ones_own_that_calls_the_stock_one_is_served(how, monkeypatch):
    model, stock = build("llama")
    if how == "a class":
        for layer in model.model.layers:
            layer.self_attn.__class__ = LoggedAttention
    else:
        own = LlamaAttention.forward
        monkeypatch.setattr(LlamaAttention, "forward", lambda self, *args, **kwargs: own(self, *args, **kwargs))
    cache = lowkv.Cache.from_model(model, "exact")
    assert (model(TOKENS, **{CACHE: cache}).logits - stock(TOKENS).logits).abs().max() < 1e-4
    assert cache.get_seq_length() == TOKENS.shape[1]


SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


@pytest.mark.parametrize("kind,arguments", [
    ("BertModel", SMALL), ("BertForSequenceClassification", SMALL),
    ("ModernBertModel", dict(SMALL, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)),
    ("ViTModel", SMALL), ("T5EncoderModel", dict(vocab_size=64, d_model=32, num_layers=1, num_heads=2, d_ff=32)),
    ("CLIPTextModel", SMALL), ("CLIPVisionModel", SMALL), ("SamModel", {}), ("BarkModel", {}), ("EncodecModel", {}),
])
def test_encoders_and_what_has_no_layers(kind, arguments):
    kind = getattr(transformers, kind)
    with torch.device("meta"):
        model = kind(kind.config_class(**arguments))
    before = type(model)
    with pytest.raises(lowkv.Error, match=f"{kind.__name__} (is no decoder: it has no cache|computes its attention "
                                          "itself|has an encoder)"):
        lowkv.Cache.from_model(model)
    assert type(model) is before and getattr(model.config, "_attn_implementation", None) != "lowkv"


def test_heads_that_are_no_multiple_of_16():
    refused("heads of 20 channels; lowkv serves multiples of 16", "LlamaConfig", head_dim=20)


@torch.no_grad()
def test_a_class_of_ones_own_is_served():
    class Mine(transformers.LlamaForCausalLM):
        pass

    model, stock = build("llama")
    model.__class__ = Mine
    cache = lowkv.Cache.from_model(model, "exact")
    assert (model(TOKENS, **{CACHE: cache}).logits - stock(TOKENS).logits).abs().max() < 1e-4


@pytest.mark.skipif(not hasattr(transformers, "DoryConfig"), reason="this transformers has no looped models")
def test_looped_models():
    refused("goes through some layers several times", "DoryConfig", dict(
        GROUPED, vocab_size=128, num_hidden_layers=4, head_dim=16, n_input_layers=1, n_output_layers=1,
        n_recurrent_layers=2, n_recurrent_loops=2, pad_token_id=0))


@pytest.mark.parametrize("kind,more", [
    ("MoshiForCausalLM", {}), ("KyutaiSpeechToTextModel", dict(codebook_vocab_size=16, num_codebooks=2)),
])
def test_models_whose_masks_do_not_follow_their_sliding_window(kind, more):
    """What they compute beyond the window is not what any of their layers says."""
    kind = getattr(transformers, kind)
    model = kind(kind.config_class(**GROUPED, sliding_window=16, ffn_dim=96, head_dim=16, audio_bos_token_id=14,
                                   audio_pad_token_id=15, **more))
    with pytest.raises(lowkv.Error, match="has a sliding_window that its masks do not follow"):
        lowkv.Cache.from_model(model)
    assert model.config._attn_implementation != "lowkv"


@torch.no_grad()
def test_a_cache_under_a_name_that_transformers_ignores(monkeypatch):
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model)
    monkeypatch.setattr(lowkv.steps, "_argument", lambda kind: "past_key_values")
    with pytest.raises(lowkv.Error, match="takes a cache as past_key_values=, and would ignore cache="):
        model(TOKENS, cache=cache)


def test_wrong_arguments():
    model, _ = build("llama")
    with pytest.raises(lowkv.Error, match="kivi7"):
        lowkv.Cache.from_model(model, "kivi7")
    with pytest.raises(lowkv.Error, match="takes a transformers model"):
        lowkv.Cache.from_model("gpt2")
    with pytest.raises(lowkv.Error, match="g48"):
        lowkv.KiviCache.from_model(model, group_size=48)


@torch.no_grad()
def test_rows_that_do_not_fit():
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model, "kivi4,window=0")
    model(TOKENS, past_key_values=cache)
    with pytest.raises(lowkv.Error, match="do not fit a cache with batch 1"):
        model(TOKENS.expand(2, -1), past_key_values=cache)
    odd = torch.zeros(1, 2, 4, 20)
    with pytest.raises(lowkv.Error, match="head_dim 20 is not supported"):
        lowkv.Cache.from_model(model).update(odd, odd, 0)


@pytest.mark.parametrize("scheme,words", [
    ("skvq-k2v2", "not served in Python"),
    ("lowkv2.8,layer.0=kvquant3", "not served in Python"),
    ("kivi2,filter=heavy,evict=50%", "filter="),
])
def test_schemes_that_only_the_core_serves_are_refused(scheme, words):
    with pytest.raises(lowkv.Error, match=words):
        lowkv.Cache.from_model(build("llama")[0], scheme=scheme)


@torch.no_grad()
def test_a_watched_model_that_bypasses_the_attention_is_stopped_at_its_first_step():
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model)

    class Own(LlamaAttention):
        def forward(self, hidden_states, **kwargs):
            keys = self.k_proj(hidden_states).unflatten(2, (2, -1)).transpose(1, 2)
            kwargs[CACHE].update(keys, keys, self.layer_idx)
            return hidden_states, None

    model.model.layers[1].self_attn.__class__ = Own
    # From the second step on, the model has its own attention again.
    for said in ("layer 1: its last keys were stored but never", "needs Cache.from_model.. again"):
        with pytest.raises(lowkv.Error, match=said):
            model(TOKENS, past_key_values=cache)
        assert cache.get_seq_length() == 0


@torch.no_grad()
def test_an_interrupted_step_of_something_else_than_the_model_is_noticed():
    """The decoder is no model that the cache was made for: nothing tells when its step is over."""
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model, "kivi4")
    model(TOKENS, past_key_values=cache)

    def interrupt(*_):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.model(TOKENS[:, :5], past_key_values=cache)
    hook.remove()
    for step in (lambda: model(TOKENS[:, :5], past_key_values=cache), lambda: cache.crop(-1),
                 lambda: model.model(TOKENS[:, :5], past_key_values=cache)):
        with pytest.raises(lowkv.Error, match="different numbers of tokens, 40 to 45: the last step failed"):
            step()
    cache.reset()
    assert torch.equal(model(TOKENS, past_key_values=cache).logits,
                       model(TOKENS, past_key_values=lowkv.Cache.from_model(model, "kivi4")).logits)


@torch.no_grad()
def test_a_cache_of_another_model_is_noticed():
    model, _ = build("llama")
    lowkv.Cache.from_model(model)
    small = lowkv.Cache("kivi4", [None])
    with pytest.raises(lowkv.Error, match="the model has a layer 1, but this cache was made for one of 1 layers"):
        model(TOKENS, past_key_values=small)
    with pytest.raises(lowkv.Error, match="override of layer 9, but this model has 2 layers, numbered 0 to 1"):
        lowkv.Cache.from_model(model, "kivi2,layer.9=exact")
    with pytest.raises(lowkv.Error, match=r"scheme must be a str such as 'lowkv2\.8', not NoneType"):
        lowkv.Cache.from_model(model, None)


@torch.no_grad()
def test_masks_that_hide_the_cache_and_weights_are_refused():
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model, "kivi4")
    model(TOKENS, past_key_values=cache)
    short = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
    with pytest.raises(lowkv.Error, match="for 60 cells: it has a column for each token in the cache"):
        model(TOKENS[:, :20], past_key_values=cache, attention_mask=short)


def test_an_empty_cache_can_be_cropped_and_forgets_guesses():
    model, _ = build("llama")
    cache = lowkv.Cache.from_model(model, "kivi2,window=32")
    cache.crop(-3)
    assert cache.get_seq_length() == 0
    cache.activate_past_recording()
    cache.reset()
    with torch.no_grad():
        model(TOKENS.repeat(1, 12), past_key_values=cache)
    assert cache.packed_bytes > 0


@torch.no_grad()
def test_a_stock_cache_keeps_its_window_where_the_module_does_not_say_it():
    stock = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**GROUPED, num_local_experts=2, sliding_window=8))
    stock.eval()
    wanted = stock(TOKENS).logits
    lowkv.Cache.from_model(stock)
    assert torch.allclose(stock(TOKENS).logits, wanted, atol=1e-4)
