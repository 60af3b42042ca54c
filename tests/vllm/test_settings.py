"""What is refused, and how: before a model is read. No engine is started here."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from lowkv import Error
from lowkv._core import parse_scheme
from lowkv.vllm import settings

OPTION = {"lowkv": {"scheme": "lowkv2.8"}}


def asking(additional_config):
    return SimpleNamespace(additional_config=additional_config, kv_transfer_config=None)


@pytest.fixture
def variable(monkeypatch):
    """Sets LOWKV_SCHEME, or unsets it."""
    def set_scheme(text):
        monkeypatch.setenv("LOWKV_SCHEME", text) if text else monkeypatch.delenv("LOWKV_SCHEME", raising=False)
    set_scheme(None)
    return set_scheme


WRONG = [
    ("lowkv5", r"Schemes: exact, lowkv1\.5, .*kvarn2$"),
    ("skvq-k2v2", "codecs of a token's row of all heads"),
    ("kivi2,flush=128", "flush= is not served"),
    ("kivi2,rows=8", "rows= is not served"),
]


@pytest.mark.parametrize("text,words", WRONG)
def test_schemes_of_the_environment(variable, text, words):
    variable(text)
    with pytest.raises(Error, match=words) as caught:
        settings.asked(asking({}))
    assert str(caught.value).startswith(f"LOWKV_SCHEME={text}: ")


@pytest.mark.parametrize("text,words", [*WRONG, ("", "Schemes: exact, ")])
def test_schemes_of_a_configuration(variable, text, words):
    with pytest.raises(Error, match=words) as caught:
        settings.asked(asking({"lowkv": {"scheme": text}}))
    assert str(caught.value).startswith("--additional-config: scheme ")


@pytest.mark.parametrize("options", ["lowkv2.8", {}, {"scheme": 2}, {"scheme": "lowkv2.8", "strict": True}, None])
def test_words_of_a_configuration(variable, options):
    with pytest.raises(Error, match=r'{"lowkv": .*}: {"lowkv": {"scheme": "lowkv2.8"}} and the like is right'):
        settings.asked(asking({"lowkv": options}))


@pytest.mark.parametrize("named,additional_config,found", [
    (None, {}, None), (None, {"other": 1}, None), (None, SimpleNamespace(compute_hash=str), None),
    ("", {}, None), ("lowkv2.8", {}, "lowkv2.8"), (None, OPTION, "lowkv2.8"), ("", OPTION, "lowkv2.8"),
    ("lowkv2.8", OPTION, "lowkv2.8"), ("lowkv2.8,window=128", OPTION, "lowkv2.8"),
])
def test_who_asks(variable, named, additional_config, found):
    variable(named)
    scheme = settings.asked(asking(additional_config))
    assert (scheme and str(scheme)) == (found and str(parse_scheme(found)))


def test_who_asks_for_something_else(variable):
    variable("lowkv2")
    with pytest.raises(Error, match=r"^LOWKV_SCHEME=lowkv2, but --additional-config names the scheme lowkv2\.8: leave"):
        settings.asked(asking(OPTION))


def test_a_process_serves_one_scheme(variable, monkeypatch):
    monkeypatch.setattr(settings, "_used", None)
    monkeypatch.setattr(settings, "_whole", False)
    with pytest.raises(Error, match="leave out --worker-cls"):
        settings.used()
    settings.use(asking(OPTION))
    settings.use(asking(OPTION))
    assert str(settings.used()) == str(parse_scheme("lowkv2.8"))
    for other in ({}, {"lowkv": {"scheme": "lowkv2"}}):
        with pytest.raises(Error, match="in one process"):
            settings.use(asking(other))
    connected = asking(OPTION)
    connected.kv_transfer_config = connector("ExampleConnector")
    with pytest.raises(Error, match="in one process"):
        settings.use(connected)


def connector(name, module=None):
    return SimpleNamespace(kv_connector=name, kv_connector_module_path=module)


def test_pages_that_a_connector_carries_are_larger(monkeypatch):
    """By five tokens of 128 in 16 bits, keys and values, and the number of what they were packed with."""
    scheme, sizes = parse_scheme("lowkv2.8"), []
    for connected in (False, True):
        monkeypatch.setattr(settings, "_whole", connected)
        sizes.append(2 * settings.PAGE_TOKENS * settings.cell_bytes(scheme, 0, 2, 64, torch.bfloat16))
    more = sizes[1] - sizes[0] - 5 * 2 * 2 * 64 * 2
    assert 0 <= more < 2 * settings.PAGE_TOKENS  # sizes are whole bytes of each cell


def config(**changed):
    facts = {"cache_dtype": "auto", "block_size": 128, "kv_transfer_config": None, "speculative_config": None,
             "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "use_mla": False,
             "is_encoder_decoder": False, "architecture": "LlamaForCausalLM", "head_size": 64,
             "dtype": torch.bfloat16, **changed}
    space = SimpleNamespace(**facts)
    space.get_num_kv_heads, space.get_head_size = (lambda parallel: 2), (lambda: facts["head_size"])
    space.get_total_num_hidden_layers = lambda: 3
    return SimpleNamespace(cache_config=space, parallel_config=space, model_config=space,
                           kv_transfer_config=space.kv_transfer_config, speculative_config=space.speculative_config,
                           use_v2_model_runner=facts.get("use_v2_model_runner", False))


@pytest.mark.parametrize("changed,words", [
    ({}, None),
    ({"cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    ({"block_size": 64}, "--block-size 64; a multiple of 128"),
    ({"block_size": 256}, None),
    ({"kv_transfer_config": connector("ExampleConnector")}, None),
    ({"kv_transfer_config": connector("NixlConnector")}, "the KV connector NixlConnector .* is not served; Example"),
    ({"kv_transfer_config": connector("ExampleConnector", "mine")}, "the KV connector ExampleConnector .* not served"),
    ({"speculative_config": SimpleNamespace(method="eagle")}, "speculative decoding by eagle is not served; by ngram"),
    ({"speculative_config": SimpleNamespace(method="ngram")}, None),
    ({"kv_offloading_size": 1.0}, "--kv-offloading-size 1.0: pages in other memory are not served"),
    ({"kv_offloading_size": None}, None),
    ({"kv_transfer_config": connector("OffloadingConnector")}, "the KV connector OffloadingConnector"),
    ({"use_v2_model_runner": True}, "model runner V2 is not served; set VLLM_USE_V2_MODEL_RUNNER=0"),
    ({"decode_context_parallel_size": 2}, "context parallelism"),
    ({"use_mla": True}, "LlamaForCausalLM has multi-head latent attention"),
    ({"is_encoder_decoder": True}, "an encoder and cross-attention"),
    ({"head_size": 72}, "head_dim 72"),
    ({"scheme": "lowkv2.8,layer.2=lowkv4"}, None),
    ({"scheme": "lowkv2.8,layer.3=lowkv4"}, "layer.3"),
    ({"dtype": torch.float64}, "a model of torch.float64"),
])
def test_engines(changed, words):
    scheme = parse_scheme(changed.pop("scheme", "lowkv2.8"))
    if words is None:
        return settings.require_config(scheme, config(**changed))
    with pytest.raises(Error, match=words):
        settings.require_config(scheme, config(**changed))


@pytest.mark.parametrize("changed,words", [
    ({}, None),
    ({"attn_type": "encoder_only"}, "encoder_only attention"),
    ({"attn_type": "encoder_decoder"}, "encoder_decoder attention"),
    ({"use_mla": True}, "MLA"),
    ({"has_sink": True, "has_sliding_window": True}, "attention sinks"),
    ({"kv_cache_dtype": "fp8"}, "a cache of fp8"),
])
def test_layers(changed, words):
    from vllm.v1.attention.selector import AttentionSelectorConfig

    facts = AttentionSelectorConfig(**{"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto",
                                       "block_size": 128, **changed})
    if words is None:
        return settings.require_layer(facts)
    with pytest.raises(Error, match=re.escape(words)):
        settings.require_layer(facts)


REFUSED_BY_VLLMS_OWN_OPTIONS = [
    ({"kv_offloading_size": 1.0}, {}, "--kv-offloading-size 1.0: pages in other memory are not served"),
    ({"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"}, {}, "--kv-offloading-size 1.0"),
    ({}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "vLLM's model runner V2 is not served; set VLLM_USE_V2_MODEL_RUNNER=0"),
    ({}, {}, None),
    ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, None),
]


@pytest.mark.parametrize("options,environment,words", REFUSED_BY_VLLMS_OWN_OPTIONS)
def test_vllms_own_configuration(llama, options, environment, words):
    """As EngineArgs makes it, in a process of its own: nothing starts."""
    arguments = {"model": str(llama), "skip_tokenizer_init": True, "additional_config": OPTION, **options}
    program = f"from vllm.engine.arg_utils import EngineArgs; EngineArgs(**{arguments!r}).create_engine_config()"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=120,
                          env={k: v for k, v in os.environ.items() if k != "LOWKV_SCHEME"} | environment)
    assert (done.returncode == 0) == (words is None), done.stderr[-3000:]
    assert words is None or words in done.stderr


def test_versions():
    settings.require_version("0.32.0+cpu")
    with pytest.raises(Error, match=r"vLLM 0\.33\.1: this lowkv serves vLLM 0\.32\.0 only"):
        settings.require_version("0.33.1")


def platform_of(program="", **environment):
    """vLLM's platform in a fresh process after `program`, or what it says."""
    names = ("LOWKV_SCHEME", "VLLM_TARGET_DEVICE", "VLLM_PLUGINS")
    program += ("\nfrom vllm.plugins import load_general_plugins; load_general_plugins()"
                "\nfrom vllm.platforms import current_platform; print(type(current_platform).__module__)")
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=120,
                          env={**{k: v for k, v in os.environ.items() if k not in names}, **environment})
    return (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]


def test_only_where_it_can_stand_in():
    assert platform_of() == platform_of(LOWKV_SCHEME="lowkv2.8") == "lowkv.vllm.platform"
    assert platform_of(VLLM_TARGET_DEVICE="cpu") == platform_of(VLLM_PLUGINS="") == "vllm.platforms.cpu"
    assert "VLLM_TARGET_DEVICE=cpu" in platform_of(LOWKV_SCHEME="lowkv2.8", VLLM_TARGET_DEVICE="cpu")
    newer = "import vllm; vllm.__version__ = '0.33.0'"
    assert platform_of(newer) == "vllm.platforms.cpu"
    assert "vLLM 0.33.0: this lowkv serves vLLM 0.32.0 only" in platform_of(newer, LOWKV_SCHEME="lowkv2.8")
    # Another plug-in's platform, and vLLM's own for another device.
    other = ("import importlib.metadata as installed, sys, types\n"
             "found, sys.modules['other'] = installed.entry_points, types.SimpleNamespace(ask=lambda: %s)\n"
             "group = {'group': 'vllm.platform_plugins'}\n"
             "both = [*found(**group), installed.EntryPoint('other', 'other:ask', group['group'])]\n"
             "installed.entry_points = lambda **asked: both if asked == group else found(**asked)")
    assert platform_of(other % None) == "lowkv.vllm.platform"
    assert platform_of(other % "'vllm.platforms.interface.UnspecifiedPlatform'") == "vllm.platforms.interface"
    device = "from vllm import platforms; platforms.builtin_platform_plugins = {'cuda': lambda: '%s'}"
    assert platform_of(device % "vllm.platforms.interface.UnspecifiedPlatform") == "vllm.platforms.interface"


def test_without_a_scheme_it_is_vllms_own(variable):
    """The only two methods that it overrides answer as vLLM's, and an engine's configuration comes out the same."""
    from unittest.mock import patch

    from lowkv.vllm.platform import Platform
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.selector import AttentionSelectorConfig

    assert {name for name in vars(Platform) if not name.startswith("__")} == {"check_and_update_config",
                                                                              "get_attn_backend_cls"}
    configs = []
    for platform in (CpuPlatform, Platform):
        with patch("vllm.platforms._current_platform", platform()):
            configs.append(VllmConfig())
    ours = configs[1]
    assert ours.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    same = [{**vars(config), "instance_id": None} for config in configs]
    assert str(same[0]) == str(same[1])
    for changed in ({}, {"has_sink": True}, {"use_mla": True, "block_size": 16}):
        facts = AttentionSelectorConfig(**{"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "auto",
                                           "block_size": 128, **changed})
        with set_current_vllm_config(ours):
            assert Platform.get_attn_backend_cls(None, facts) == CpuPlatform.get_attn_backend_cls(None, facts)
