"""Small models, and engines that serve them, each in a process of its own."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="INFO", OMP_NUM_THREADS="2")
HERE = Path(__file__).parent
MIB = 1 << 20


@dataclass
class Engine:
    """What one engine said and did."""

    results: list
    log: str

    @property
    def tokens(self):
        """That fit, in vLLM's own words."""
        return int(re.search(r"cache size: ([\d,]+) tokens", self.log).group(1).replace(",", ""))


def run(model, jobs, tmp_path, scheme=None, dtype="float32", mib=16, cores="0-1", starts=True, waits=False, **engine):
    """An engine's answers to `jobs` (engine.py). scheme: in the environment. cores: of each of its processes, between
    bars. starts: else its start is refused. waits: it steps when it has all requests of a job; else it is in a process
    of its own and begins with those that are there."""
    out = tmp_path / "out.json"
    arguments = {"model": str(model), "dtype": dtype, "enforce_eager": True, "skip_tokenizer_init": True,
                 "kv_cache_memory_bytes": int(mib * MIB), "max_num_seqs": 16, "max_num_batched_tokens": 256,
                 "max_model_len": 2048, "seed": 0, **engine}
    environment = {key: value for key, value in os.environ.items() if key != "LOWKV_SCHEME"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = cores
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if waits else "1"
    if scheme is not None:
        environment["LOWKV_SCHEME"] = scheme
    done = subprocess.run([sys.executable, HERE / "engine.py"], env=environment, text=True, timeout=280,
                          input=json.dumps({"engine": arguments, "jobs": jobs, "out": str(out)}),
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert (done.returncode == 0) == starts, done.stdout[-6000:]
    return Engine(json.loads(out.read_text()) if starts else [], done.stdout)


def sharpen(model):
    """Makes attention matter: with random weights all tokens get about the same, whatever the keys are."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(6.0)
            layer.self_attn.k_proj.weight.mul_(6.0)
            layer.self_attn.v_proj.weight.mul_(4.0)
    return model


SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096}


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    sharpen(LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.08))).save_pretrained(folder)
    return folder


NAN_TOKEN, LARGE_TOKEN = 7, 8


@pytest.fixture(scope="session")
def odd(tmp_path_factory):
    """Its layer 0 has keys and values of 1e6 for one token, and NaN for another."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("odd")
    torch.manual_seed(1)
    model = sharpen(LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.08)))
    with torch.no_grad():
        rows = model.model.embed_tokens.weight
        rows[:, 0] = 0.0
        rows[NAN_TOKEN] = float("nan")
        rows[LARGE_TOKEN] = 0.0
        rows[LARGE_TOKEN, 0] = 1.0
        for name in ("k_proj", "v_proj"):
            getattr(model.model.layers[0].self_attn, name).weight[:, 0] = 1e5
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def mistral(tmp_path_factory):
    """Its tokens see the newest 200."""
    from transformers import MistralConfig, MistralForCausalLM

    folder = tmp_path_factory.mktemp("mistral")
    torch.manual_seed(2)
    config = MistralConfig(**SIZES, initializer_range=0.08, sliding_window=200)
    sharpen(MistralForCausalLM(config)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gemma(tmp_path_factory):
    """The tokens of two of its layers see the newest 200."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    folder = tmp_path_factory.mktemp("gemma")
    torch.manual_seed(3)
    layers = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(**SIZES, initializer_range=0.08, sliding_window=200, layer_types=layers,
                              query_pre_attn_scalar=64)
    Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bloom(tmp_path_factory):
    """Its positions are ALiBi's."""
    from transformers import BloomConfig, BloomForCausalLM

    folder = tmp_path_factory.mktemp("bloom")
    torch.manual_seed(4)
    config = BloomConfig(vocab_size=512, hidden_size=256, n_layer=3, n_head=4, initializer_range=0.08)
    BloomForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def gpt_oss(tmp_path_factory):
    """Its heads have a logit each that takes part in the softmax; one of its layers sees the newest 200 tokens."""
    from transformers import GptOssConfig, GptOssForCausalLM

    folder = tmp_path_factory.mktemp("gpt_oss")
    torch.manual_seed(5)
    config = GptOssConfig(**SIZES | {"num_hidden_layers": 2}, initializer_range=0.08, sliding_window=200,
                          layer_types=["sliding_attention", "full_attention"], num_local_experts=4,
                          num_experts_per_tok=2)
    model = GptOssForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks.copy_(torch.linspace(-2, 3, config.num_attention_heads))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def granite(tmp_path_factory):
    """One of its layers is a state-space layer."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    folder = tmp_path_factory.mktemp("granite")
    config = GraniteMoeHybridConfig(**SIZES | {"num_hidden_layers": 2}, num_local_experts=4, num_experts_per_tok=4,
                                    layer_types=["linear_attention", "full_attention"], mamba_n_heads=8,
                                    mamba_d_head=32, mamba_n_groups=1)
    GraniteMoeHybridForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """Real weights, out of the set-up's GGUF file."""
    if not os.environ.get("LOWKV_MODEL"):
        pytest.skip("LOWKV_MODEL is not set")
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    script = HERE.parents[1] / "deps/vllm_checkpoint.py"
    subprocess.run([sys.executable, script, os.environ["LOWKV_MODEL"], folder], check=True)
    return folder
