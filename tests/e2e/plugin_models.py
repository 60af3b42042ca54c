"""The tiny models by name: one per kind of attention (models/)."""

from functools import partial

from models.decoder import (
    bloom,
    cohere2,
    command_r,
    ernie4_5,
    exaone4,
    falcon,
    gpt2,
    gptneox,
    llama,
    mistral,
    mistral3,
    mpt,
    phi3,
    qwen2,
    qwen2vl,
    qwen3,
    qwen3vl,
    seed_oss,
    smollm3,
    stablelm,
    t5,
)
from models.delta import kimi_linear, qwen3next, qwen4exp, qwen35, qwen35moe
from models.experts import afmoe, deepseek2, glm4moe, gpt_oss, hunyuan_moe, minimax_m2, mixtral, qwen3moe
from models.gemma import gemma2, gemma3, gemma3n, gemma4
from models.hybrid import falcon_h1, granitehybrid, jamba, lfm2, nemotron_h

# name: (how it attends, what writes it)
ALL = {
    "llama": ("RoPE, kv heads shared", llama),
    "llama-40": ("head_dim 40", partial(llama, head_dim=40)),
    "llama-256": ("head_dim 256", partial(llama, head_dim=256)),
    "llama-320": ("head_dim 320", partial(llama, head_dim=320)),
    "llama-576": ("head_dim 576", partial(llama, head_dim=576)),
    "mistral": ("a window that llama.cpp ignores", mistral),
    "mistral3": ("YaRN, temperature by position", mistral3),
    "qwen2": ("biases of q, k and v", qwen2),
    "qwen2vl": ("M-RoPE", qwen2vl),
    "qwen3": ("q and k normed", qwen3),
    "qwen3vl": ("the same, M-RoPE with interleaved sections", qwen3vl),
    "qwen3moe": ("the same with experts", qwen3moe),
    "glm4moe": ("half of a head rotated, biases, a layer for drafts", glm4moe),
    "minimax-m2": ("half of a head rotated, norms over all heads", minimax_m2),
    "mixtral": ("Llama with experts", mixtral),
    "gemma2": ("every second layer slides, soft caps", gemma2),
    "gemma3": ("five of six slide, one kv head", gemma3),
    "gemma3n": ("layers that share a cache, AltUp", gemma3n),
    "gemma4": ("shared caches, heads of two sizes", gemma4),
    "gemma4-512": ("the real sizes of full layers", partial(gemma4, head_dim=512)),
    "phi3": ("one matrix for q, k and v, long RoPE", phi3),
    "falcon": ("one kv head, parallel", falcon),
    "command-r": ("parallel, layer norm without bias", command_r),
    "cohere2": ("three of four slide, parallel", cohere2),
    "stablelm": ("a quarter of a head rotated", stablelm),
    "gptneox": ("the same, parallel", gptneox),
    "ernie4_5": ("eight heads share a kv head", ernie4_5),
    "seed_oss": ("biases, heads wider than the model", seed_oss),
    "smollm3": ("every fourth layer without positions", smollm3),
    "exaone4": ("no norm before attention", exaone4),
    "exaone4-32b": ("the same, three of four slide, the fourth without positions", partial(
        exaone4, layers=64, head_dim=128, keys={
            "attention.sliding_window": 160, "attention.sliding_window_pattern": [True, True, True, False] * 16})),
    "gpt2": ("learned positions", gpt2),
    "mpt": ("ALiBi, clamped", mpt),
    "bloom": ("ALiBi of six heads", bloom),
    "gpt-oss": ("attention sinks, every second layer slides", gpt_oss),
    "afmoe": ("gated, three of four slide, the fourth without positions", afmoe),
    "hunyuan-moe": ("keys normed after RoPE", hunyuan_moe),
    "deepseek2": ("latent attention (MLA), 576 channels", partial(deepseek2, latent=True)),
    "deepseek2-27": ("the same, as many layers as DeepSeek V2 Lite", partial(
        deepseek2, latent=True, layers=27)),
    "kimi-k2": ("the same in Kimi K2's form, 61 layers", partial(
        deepseek2, latent=True, layers=61, heads=8, query_rank=96)),
    "glm-4.7-flash": ("the same in GLM 4.7 Flash's form, 47 layers", partial(
        deepseek2, latent=True, layers=47, heads=5, plain=192, value=256, query_rank=48)),
    "deepseek2-old": ("keys of 192 channels, values of 128", partial(deepseek2, latent=False)),
    "jamba": ("Mamba around attention without positions", jamba),
    "falcon-h1": ("attention beside Mamba-2", falcon_h1),
    "lfm2": ("short convolutions around attention", lfm2),
    "granitehybrid": ("Mamba-2 around attention without positions", granitehybrid),
    "nemotron_h": ("the same, feed-forward in layers of its own", nemotron_h),
    "qwen3next": ("gated delta nets around gated attention", qwen3next),
    "qwen35": ("the same, M-RoPE", qwen35),
    "qwen35moe": ("the same with experts", qwen35moe),
    "qwen4exp": ("the same, sparse attention", qwen4exp),
    "kimi-linear": ("delta attention around MLA without positions", kimi_linear),
    "t5": ("encoder and decoder, bias of scores", t5),
}


def write_model(name, path):
    return ALL[name][1](path)
