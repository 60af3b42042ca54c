"""Vision-language models: their text decoder's cache is packed, and its vision tower is left alone."""

import copy

import lowkv
import pytest
import torch
import transformers
from families import GROUPED
from lowkv.names import cache_argument
from transformers.models.llama.modeling_llama import LlamaAttention

CACHE = cache_argument(LlamaAttention)
IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
TEXT = dict(GROUPED, head_dim=16)
TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28,
             patch_size=7)
IMAGE = 5  # the token that stands for a part of an image
GENERATE = dict(max_new_tokens=12, min_new_tokens=12, do_sample=False)


def config(kind):
    if kind == "Llava":
        return transformers.LlavaConfig(text_config=dict(TEXT, model_type="llama"), image_token_index=IMAGE,
                                        vision_config=dict(TOWER, model_type="clip_vision_model", projection_dim=32),
                                        vision_feature_layer=-1)
    if kind == "PaliGemma":
        return transformers.PaliGemmaConfig(text_config=dict(TEXT, model_type="gemma"), image_token_index=IMAGE,
                                            vision_config=dict(TOWER, projection_dim=64), projection_dim=64)
    return transformers.Mistral3Config(text_config=dict(TEXT, model_type="mistral", sliding_window=None),
                                       vision_config=dict(TOWER, model_type="pixtral", head_dim=16),
                                       image_token_index=IMAGE, spatial_merge_size=2)


def build(kind, attention):
    torch.manual_seed(4)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")._from_config(config(kind),
                                                                                  attn_implementation=attention)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("kind", ["Llava", "PaliGemma", "Mistral3"])
def test_answers_are_the_models_own(kind, attention):
    model = build(kind, attention)
    stock = copy.deepcopy(model)
    tokens = torch.randint(10, 128, (1, 30), generator=torch.Generator().manual_seed(1))
    asked = {"input_ids": tokens}
    if kind != "Mistral3":  # whose images have sizes of their own
        tokens[0, :16] = IMAGE
        asked["pixel_values"] = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(2))
    want = stock.generate(**asked, **GENERATE)
    cache = lowkv.Cache.from_model(model, "exact")
    assert torch.equal(model.generate(**asked, **GENERATE, **{CACHE: cache}), want)
    assert cache.get_seq_length() == 41
    assert torch.equal(model.generate(**asked, **GENERATE), want)
    assert model.config.vision_config._attn_implementation == stock.config.vision_config._attn_implementation
    lowkv.restore(model)
    assert model.config.text_config._attn_implementation == attention


def test_a_decoder_whose_config_is_the_models_leaves_its_towers_alone():
    small = dict(num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    own = transformers.Phi4MultimodalConfig(**small, **IDS, num_key_value_heads=2)
    with torch.device("meta"):
        model = transformers.Phi4MultimodalForCausalLM._from_config(
            own, attn_implementation={"": "sdpa", "vision_config": "eager", "audio_config": "sdpa"})
    parts = (model.config, model.config.vision_config, model.config.audio_config)
    lowkv.Cache.from_model(model, "exact")
    assert [part._attn_implementation for part in parts] == ["lowkv", "eager", "sdpa"]
    lowkv.restore(model)
    assert [part._attn_implementation for part in parts] == ["sdpa", "eager", "sdpa"]


def test_layers_that_attend_to_images_alone_are_refused():
    own = transformers.MllamaConfig(
        text_config=dict(TEXT, num_hidden_layers=3, cross_attention_layers=[1]), image_token_index=127,
        vision_config=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_global_layers=1,
                           attention_heads=2, image_size=28, patch_size=14, vision_output_dim=64,
                           intermediate_layers_indices=[0], supported_aspect_ratios=[[1, 1]], max_num_tiles=1))
    with torch.device("meta"):
        model = transformers.MllamaForConditionalGeneration(own)
    with pytest.raises(lowkv.Error, match="layers that attend to images alone"):
        lowkv.Cache.from_model(model)
