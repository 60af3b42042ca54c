"""Every type of model that transformers can generate text with, tiny, at random weights, from its configuration's own
defaults: what makes it large is made small by its name."""

import dataclasses
import sys
from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from families import HYBRIDS

# type: names of classes. A type may be in both tables, with a class in each.
TYPES = {}
for mapping in (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
                modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
    for kind, name in mapping.items():
        TYPES.setdefault(kind, set()).update([name] if isinstance(name, str) else name)

LAYERS = 3
WORDS = range(10, 100)  # the tokens of a test's text: those below and above mean something
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
          "num_decoder_layers", "num_encoder_layers", "depth", "num_blocks", "layers", "conf_num_hidden_layers")
SIZES = {
    128: "vocab_size vocab_size_per_layer_input decoder_vocab_size text_vocab_size audio_vocab_size",
    64: "hidden_size d_model n_embd embed_dim embedding_size word_embed_proj_dim decoder_hidden_size out_hidden_size "
        "output_size projection_dim text_hidden_size hidden_size_global",
    96: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim mlp_dim d_ff dff d_inner ffn_hidden_size dim_ff "
        "intermediate_size_mlp expert_ffn_hidden_size dense_intermediate_size shared_intermediate_size",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
       "num_encoder_attention_heads num_decoder_attention_heads attention_heads swa_num_attention_heads "
       "num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_tok moe_topk top_k_experts "
       "moe_k linear_num_value_heads index_n_heads cross_num_attention_heads",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_global_key_value_heads "
       "cross_num_key_value_heads",
    1: "n_group topk_group n_shared_experts num_shared_experts first_k_dense_replace num_dense_layers mamba_n_groups "
       "moe_num_shared_experts n_groups num_mem_blocks mamba_ngroups",
    16: "head_dim v_head_dim swa_head_dim swa_v_head_dim global_head_dim dim_head d_head d_kv query_pre_attn_scalar "
        "linear_key_head_dim linear_value_head_dim linear_head_dim q_lora_rank kv_lora_rank mamba_d_state "
        "mamba_d_head mamba_head_dim ssm_state_size index_head_dim laurel_rank cross_head_dim",
    8: "qk_rope_head_dim qk_nope_head_dim rotary_dim hidden_size_per_layer_input mamba_n_heads mamba_num_heads "
       "mamba_dt_rank adapter_rank",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size mamba_chunk_size "
        "chunk_size block_multiple_of expert_hidden_size",
    128 << 3: "max_position_embeddings n_positions max_seq_len n_ctx context_length",
    24: "sliding_window",
    46: "original_max_position_embeddings",  # Phi-3's, which a test's text passes while it is generated
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "padding_idx": 0}
# What must be said of a type beside: its tower's, or what its sizes above don't go together with.
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MORE = {
    "glm4v_moe": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2],
                                                      "partial_rotary_factor": 0.5}}},
    **{kind: {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}}}
       for kind in ("glm46v", "glm4v", "glm_ocr", "glmga", "qwen2_5_omni_thinker", "paddleocr_vl", "qwen2_5_vl",
                    "qwen2_vl")},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "nemotron": {"num_key_value_heads": 2},
    "deepseek_v2": {"num_experts_per_tok": 4},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 4},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 32]}},
    "step3p7": {"text_config": {"sliding_window": 24}},
    "dots3_note": {"num_key_value_heads": 4},
    "dots3_note_text": {"num_key_value_heads": 4},
    "ministral": {"rope_parameters": ROPE},
    "hunyuan_v1_dense": {"rope_parameters": ROPE},
    "hunyuan_v1_moe": {"rope_parameters": ROPE},
    "zaya": {"num_experts_per_tok": 1},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "glm5_next": {"num_key_value_heads": 4},
}


def shrunk(kind, widths):
    """Arguments for a configuration's class. widths: whether layers are made narrow, too, or only few."""
    default, found, special = vars(kind()), {}, 100
    for field in dataclasses.fields(kind):
        name, value = field.name, default.get(field.name)
        if isinstance(value, transformers.PreTrainedConfig):
            text = name in ("text_config", "decoder", "llm_config", "language_config") or hasattr(value, "text_config")
            found[name] = {**shrunk(type(value), widths or text), "model_type": value.model_type}
        elif name in SPECIAL:
            found[name] = SPECIAL[name]
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            found[name], special = special, special + 1
        elif name == "is_decoder":
            found[name] = True
        elif name == "layer_types" and value is not None:
            kinds = list(dict.fromkeys(value))
            found[name] = (kinds * LAYERS)[: max(LAYERS, len(kinds))]
        elif name in DEPTHS and value is not None:
            found[name] = max(LAYERS, len(set(default.get("layer_types") or ())))
        elif name == "num_key_value_heads" and "kv_lora_rank" in default:  # latent attention
            found[name] = SMALL["num_attention_heads"]
        elif name in SMALL and value is not None and (widths or name in ("vocab_size", "max_position_embeddings")):
            found[name] = SMALL[name]
    return found


def require_small(model, config):
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in model(config).parameters())
    except (RuntimeError, NotImplementedError):  # it computes something with its weights
        return
    if size > 1 << 27:
        raise ValueError(f"{size / 1e6:.0f} million parameters")


def build(kind, name, attention=None):
    """A model of this type and class, in eval mode. Raises what its classes do where that is too small for them."""
    failed = None
    for widths in (True, False):  # towers' widths may have to fit each other
        try:
            arguments = shrunk(CONFIG_MAPPING[kind], widths)
            for key, value in MORE.get(kind, {}).items():
                arguments[key] = {**arguments[key], **value} if isinstance(arguments.get(key), dict) else value
            if not widths:  # but those of the text
                arguments = {**{key: value for key, value in shrunk(CONFIG_MAPPING[kind], True).items()
                                if not isinstance(value, dict)}, **arguments}
            hybrid, known = HYBRIDS.get(kind, (None, None))
            config = CONFIG_MAPPING[kind](**(known if hybrid == CONFIG_MAPPING[kind].__name__ else arguments))
            model = getattr(transformers, name)
            if name.endswith("ForCausalLM") and not isinstance(config, model.config_class):
                config = config.get_text_config(decoder=True)  # of a multimodal type
            require_small(model, config)
            torch.manual_seed(sum(map(ord, kind)))
            more = {} if attention is None else {"attn_implementation": attention}
            model = model._from_config(config, **more).eval()
        except Exception as error:
            failed = failed or error
            continue
        for parameter in model.parameters():
            if parameter.ndim > 1 and parameter.numel() < 1 << 17:  # 0.02 gives logits that hardly depend on the cache
                torch.nn.init.normal_(parameter, std=0.15)
        return model
    raise failed
