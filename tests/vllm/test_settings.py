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


def engine(additional_config=None):
    return SimpleNamespace(additional_config=additional_config or {}, kv_transfer_config=None)


@pytest.mark.parametrize("text,words", [
    ("lowkv5", r"Schemes: exact, lowkv1\.5, .*turboquant2-qr$"),
    ("skvq-k2v2", "codecs of a token's row of all heads"),
    ("kivi2,flush=128", "flush= is not served"),
    ("kivi2,rows=8", "\"rows\" .* is no longer in lowkv"),
])
def test_wrong_schemes(monkeypatch, text, words):
    monkeypatch.setenv("LOWKV_SCHEME", text)
    with pytest.raises(Error, match=words) as caught:
        settings.asked(engine())
    assert str(caught.value).startswith(f"LOWKV_SCHEME={text}: ")


def test_a_budget_is_refused(monkeypatch):
    monkeypatch.setenv("LOWKV_SCHEME", "lowkv2.8")
    monkeypatch.setenv("LOWKV_BUDGET", "2GiB")
    with pytest.raises(Error, match=r"^LOWKV_BUDGET is not served in vLLM, whose pages all have one size: unset it"):
        settings.asked(engine())


@pytest.mark.parametrize("options", ["lowkv2.8", {}, {"scheme": "lowkv2.8"}, None])
def test_the_scheme_is_not_in_the_configuration(monkeypatch, options):
    monkeypatch.setenv("LOWKV_SCHEME", "lowkv2.8")
    with pytest.raises(Error, match=r'^additional_config has "lowkv": .*LOWKV_SCHEME alone names the scheme'):
        settings.asked(engine({"lowkv": options}))


@pytest.mark.parametrize("other", [{}, {"other": 1}, SimpleNamespace(compute_hash=str)])
def test_configurations_for_others(monkeypatch, other):
    monkeypatch.setenv("LOWKV_SCHEME", "lowkv2.8")
    assert str(settings.asked(engine(other))) == str(parse_scheme("lowkv2.8"))


def test_a_process_serves_one_scheme(monkeypatch):
    monkeypatch.setattr(settings, "_used", None)
    monkeypatch.setattr(settings, "_whole", False)
    with pytest.raises(Error, match="set LOWKV_SCHEME before vLLM is imported"):
        settings.used()
    for same in ("lowkv2.8", "lowkv2.8,window=128"):
        monkeypatch.setenv("LOWKV_SCHEME", same)
        settings.use(engine())
    assert str(settings.used()) == str(parse_scheme("lowkv2.8"))
    connected = engine()
    connected.kv_transfer_config = connector("ExampleConnector")
    with pytest.raises(Error, match="in one process"):
        settings.use(connected)
    monkeypatch.setenv("LOWKV_SCHEME", "lowkv2")
    with pytest.raises(Error, match="in one process"):
        settings.use(engine())
    monkeypatch.delenv("LOWKV_SCHEME")
    with pytest.raises(Error, match="LOWKV_SCHEME was unset"):
        settings.use(engine())


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
             "tensor_parallel_size": 1, "enable_chunked_prefill": True, "policy": "fcfs", "enable_prefix_caching": True,
             "is_encoder_decoder": False, "is_hybrid": False, "is_attention_free": False, "worker_cls": settings.WORKER,
             "architecture": "LlamaForCausalLM", "head_size": 64, "dtype": torch.bfloat16, **changed}
    space = SimpleNamespace(**facts)
    space.get_num_kv_heads, space.get_head_size = (lambda parallel: 2), (lambda: facts["head_size"])
    space.get_total_num_hidden_layers = lambda: 3
    return SimpleNamespace(cache_config=space, parallel_config=space, model_config=space, scheduler_config=space,
                           kv_transfer_config=space.kv_transfer_config, speculative_config=space.speculative_config,
                           use_v2_model_runner=facts.get("use_v2_model_runner", False))


@pytest.mark.parametrize("changed,words", [
    ({}, None),
    ({"cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, r"--worker-cls vllm\..*CPUWorker: .*; leave it out"),
    ({"block_size": 64}, "--block-size 64; a multiple of 128"),
    ({"block_size": 256}, None),
    ({"kv_transfer_config": connector("ExampleConnector"), "enable_chunked_prefill": False}, None),
    ({"kv_transfer_config": connector("ExampleConnector")}, "which must take all of it; give --no-enable-chunked-pref"),
    ({"kv_transfer_config": connector("ExampleConnector"), "enable_chunked_prefill": False, "tensor_parallel_size": 2},
     "ExampleConnector with --tensor-parallel-size 2"),
    ({"tensor_parallel_size": 2}, None),
    ({"policy": "priority"}, "--scheduling-policy priority with prefix caching"),
    ({"policy": "priority", "enable_prefix_caching": False}, None),
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
    ({"is_hybrid": True, "block_size": 400}, r"LlamaForCausalLM has layers that keep states \(state-space"),
    ({"is_attention_free": True}, "LlamaForCausalLM has layers that keep states"),
    ({"head_size": 72}, "head_dim 72"),
    ({"scheme": "lowkv2.8,layer.2=lowkv4"}, None),
    ({"scheme": "lowkv2.8,layer.3=lowkv4"}, "layer.3"),
    ({"dtype": torch.float64}, "rows of torch.float64; lowkv takes float32"),
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
    ({"has_sink": True, "has_sliding_window": True}, None),
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
    ({"additional_config": {"lowkv": {"scheme": "lowkv2.8"}}}, {}, "LOWKV_SCHEME alone names the scheme"),
    ({}, {}, None),
    ({}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, None),
]


@pytest.mark.parametrize("options,environment,words", REFUSED_BY_VLLMS_OWN_OPTIONS)
def test_vllms_own_configuration(llama, options, environment, words):
    """As EngineArgs makes it, in a process of its own: nothing starts."""
    arguments = {"model": str(llama), "skip_tokenizer_init": True, **options}
    program = f"from vllm.engine.arg_utils import EngineArgs; EngineArgs(**{arguments!r}).create_engine_config()"
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=120,
                          env=os.environ | {"LOWKV_SCHEME": "lowkv2.8"} | environment)
    assert (done.returncode == 0) == (words is None), done.stderr[-3000:]
    assert words is None or words in done.stderr


def test_versions():
    settings.require_version("0.32.0+cpu")
    with pytest.raises(Error, match=r"vLLM 0\.33\.1: this lowkv serves vLLM 0\.32\.0 only"):
        settings.require_version("0.33.1")


def python(program, **environment):
    """The last line that a fresh process prints, or its error's."""
    names = ("LOWKV_SCHEME", "VLLM_TARGET_DEVICE", "VLLM_PLUGINS")
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=120,
                          env={**{k: v for k, v in os.environ.items() if k not in names}, **environment})
    return (done.stderr if done.returncode else done.stdout).strip().splitlines()[-1]


def platform_of(program="", **environment):
    """vLLM's platform after `program`, and whether lowkv's was imported; or the error."""
    return python(f"""{program}
from vllm.plugins import load_general_plugins; load_general_plugins()
from vllm.platforms import current_platform
import sys; print(type(current_platform).__module__, "lowkv.vllm.platform" in sys.modules)""", **environment)


STOCK, OURS = "vllm.platforms.cpu False", "lowkv.vllm.platform True"


def test_the_platform_is_lowkvs_where_a_scheme_is_set():
    assert platform_of(LOWKV_SCHEME="lowkv2.8") == OURS
    assert "VLLM_TARGET_DEVICE=cpu" in platform_of(LOWKV_SCHEME="lowkv2.8", VLLM_TARGET_DEVICE="cpu")
    newer = "import vllm; vllm.__version__ = '0.33.0'"
    assert "vLLM 0.33.0: this lowkv serves vLLM 0.32.0 only" in platform_of(newer, LOWKV_SCHEME="lowkv2.8")
    late = "from vllm.platforms import current_platform; import os; os.environ['LOWKV_SCHEME'] = 'lowkv2.8'"
    assert "set LOWKV_SCHEME before vLLM is imported" in platform_of(late)


def test_without_a_scheme_nothing_happens():
    assert platform_of() == platform_of(LOWKV_SCHEME="") == platform_of(VLLM_TARGET_DEVICE="cpu") == STOCK
    assert platform_of("import vllm; vllm.__version__ = '0.33.0'") == STOCK
    # The entry points neither import vLLM nor probe other plug-ins.
    assert python("import sys, lowkv.vllm as ours; print(ours.platform(), ours.require(), 'vllm' in sys.modules)"
                  ) == "None None False"
    device = "from vllm import platforms; platforms.builtin_platform_plugins = {'cuda': lambda: '%s'}"
    assert platform_of(device % "vllm.platforms.interface.UnspecifiedPlatform") == "vllm.platforms.interface False"
