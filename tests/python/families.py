"""A tiny random-weight model of every family, built offline from its configuration."""

import copy
import os
from pathlib import Path

import torch
import transformers

# On AMX prompts meet packed rows as bf16: queries and keys are off by 2^-9 each, and so a score by 2^-8 of what its
# channels' products add up to in size, about 4 in these tests (tests/attention_case.h).
MATRIX_BUDGET = 2**-6
CPU_MULTIPLIES_MATRICES = Path("/proc/cpuinfo").exists() and "amx_bf16" in Path("/proc/cpuinfo").read_text() \
    and os.environ.get("LOWKV_IMPLEMENTATION", "amx") == "amx"

SMALL = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=1024, bos_token_id=1, eos_token_id=2, pad_token_id=0)
GROUPED = dict(SMALL, intermediate_size=96, num_key_value_heads=2)
SLIDING = dict(GROUPED, sliding_window=24)
MIXED = ["sliding_attention", "full_attention"]
IDS = dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)

# Family: (configuration class, its arguments).
FAMILIES = {
    "llama": ("LlamaConfig", GROUPED),
    "mistral": ("MistralConfig", SLIDING),
    "mixtral": ("MixtralConfig", dict(SLIDING, num_local_experts=4)),
    "phi": ("PhiConfig", dict(GROUPED, partial_rotary_factor=0.5)),
    "phi3": ("Phi3Config", SLIDING),
    "qwen2": ("Qwen2Config", dict(GROUPED, use_sliding_window=True, sliding_window=24, layer_types=MIXED)),
    "qwen3": ("Qwen3Config", dict(GROUPED, head_dim=32)),
    "gemma": ("GemmaConfig", dict(GROUPED, head_dim=256)),
    "gemma2": ("Gemma2Config", dict(SLIDING, head_dim=256, query_pre_attn_scalar=64, layer_types=MIXED,
                                    attn_logit_softcapping=20.0)),
    "gemma3": ("Gemma3TextConfig", dict(SLIDING, head_dim=32, query_pre_attn_scalar=32, layer_types=MIXED)),
    "gpt2": ("GPT2Config", dict(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=1024, **IDS)),
    "gptj": ("GPTJConfig", dict(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=1024, rotary_dim=8,
                                **IDS)),
    "gpt_neox": ("GPTNeoXConfig", dict(SMALL, intermediate_size=96)),
    "opt": ("OPTConfig", dict(SMALL, ffn_dim=96, word_embed_proj_dim=64)),
    "falcon-rope": ("FalconConfig", dict(SMALL, new_decoder_architecture=True, num_kv_heads=2, alibi=False)),
    "falcon-mqa": ("FalconConfig", dict(SMALL, new_decoder_architecture=False, multi_query=True, alibi=False)),
    "falcon-alibi": ("FalconConfig", dict(SMALL, num_attention_heads=4, new_decoder_architecture=False,
                                          multi_query=False, alibi=True)),
    "bloom": ("BloomConfig", dict(vocab_size=128, hidden_size=64, n_layer=2, n_head=4, **IDS)),
    "mpt": ("MptConfig", dict(vocab_size=128, d_model=64, n_layers=2, n_heads=4, max_seq_len=1024, expansion_ratio=2,
                              use_cache=True, **IDS)),
    "stablelm": ("StableLmConfig", dict(GROUPED, partial_rotary_factor=0.25)),
    # All experts at once: a router that flips between two would be what the test measures.
    "gpt_oss": ("GptOssConfig", dict(SLIDING, head_dim=32, layer_types=MIXED, num_local_experts=4,
                                     num_experts_per_tok=4)),
}

# Hybrid models: layers with states beside attention, or with both.
LINEAR = ["linear_attention", "full_attention"]
HYBRID = ["linear_attention", "hybrid", "hybrid"]
DELTA = dict(GROUPED, layer_types=LINEAR, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
             linear_value_head_dim=16, linear_conv_kernel_dim=4)
MAMBA = dict(GROUPED, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2)
MAMBA2 = dict(MAMBA, mamba_n_heads=8, mamba_d_head=16, mamba_n_groups=1, mamba_chunk_size=32)
EXPERTS = dict(num_experts=4, num_experts_per_tok=4, moe_intermediate_size=32)
HYBRIDS = {
    "qwen3_next": ("Qwen3NextConfig", dict(DELTA, **EXPERTS, head_dim=32, shared_expert_intermediate_size=32)),
    "qwen3_5": ("Qwen3_5TextConfig", dict(DELTA, head_dim=32)),
    "olmo_hybrid": ("OlmoHybridConfig", DELTA),
    "granitemoehybrid": ("GraniteMoeHybridConfig", dict(MAMBA2, layer_types=LINEAR, shared_intermediate_size=64,
                                                        num_local_experts=4, num_experts_per_tok=4)),
    "bamba": ("BambaConfig", dict(MAMBA2, attn_layer_indices=[1])),
    "falcon_h1": ("FalconH1Config", dict(MAMBA2, head_dim=32, mamba_d_ssm=128)),
    "jamba": ("JambaConfig", dict(MAMBA, attn_layer_period=2, attn_layer_offset=1, mamba_dt_rank=8, num_experts=4,
                                  num_experts_per_tok=4)),
    "lfm2": ("Lfm2Config", dict(GROUPED, layer_types=["conv", "full_attention"], block_multiple_of=32)),
    "lfm2_moe": ("Lfm2MoeConfig", dict(GROUPED, **EXPERTS, layer_types=["conv", "full_attention"],
                                       num_dense_layers=1)),
    "zamba": ("ZambaConfig", dict(MAMBA, num_hidden_layers=3, layers_block_type=HYBRID, n_mamba_heads=2,
                                  mamba_dt_rank=8)),
    # Its attention is twice as wide as hidden_size says: 64 channels, as that of the others.
    "zamba2": ("Zamba2Config", dict(MAMBA, hidden_size=32, num_hidden_layers=3, layers_block_type=HYBRID,
                                    num_mem_blocks=1, n_mamba_heads=8, mamba_headdim=8, mamba_ngroups=1,
                                    chunk_size=32, adapter_rank=8)),
    "nemotron_h": ("NemotronHConfig", dict(GROUPED, num_hidden_layers=4, head_dim=32, ssm_state_size=16,
                                           layers_block_type=["linear_attention", "mlp", "full_attention", "moe"],
                                           conv_kernel=4, mamba_num_heads=8, mamba_head_dim=16, n_groups=1,
                                           chunk_size=32, n_routed_experts=4, num_experts_per_tok=4,
                                           moe_intermediate_size=32, moe_shared_expert_intermediate_size=32)),
}
# Older transformers keep states in classes of the models' own.
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 23):
    FAMILIES |= HYBRIDS

# What the reference computes with. Falcon's eager attention adds ALiBi twice, so the stock sdpa is the reference.
STOCK = {"falcon-alibi": "sdpa"}


def build(family, dtype=torch.float32):
    """(model, an identical one to compare with), in eval mode."""
    name, arguments = FAMILIES[family]
    torch.manual_seed(sum(map(ord, family)))
    config = getattr(transformers, name)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=STOCK.get(family, "eager"))
    for parameter in model.parameters():
        if parameter.ndim > 1:  # the usual 0.02 gives logits that hardly depend on the cache
            torch.nn.init.normal_(parameter, std=0.15)
    model = model.to(dtype).eval()
    return model, copy.deepcopy(model)
